# SPDX-License-Identifier: Apache-2.0
"""Which public names raise which error, read from the source of the package: nobody has to keep a list.

Calls are followed by name, from the public functions and methods down to the codes in the source. A code that is
handed on as an argument belongs to the caller; a default that is a code, to callers that name none. What a caller
catches and does not raise again is not its own. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent
_CODE: Final = re.compile(r"KDA-[A-Z0-9]+(-[A-Z0-9]+)+")
_CATCH_ALL: Final = {"KdaError", "Exception", "BaseException"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class _Node:
    """A function, method or module-level variable: the codes in its text, and the names it uses."""

    codes: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)


@dataclass
class _Source:
    """What the package consists of, by names such as ``kda_cupy.pool.StatePool.release``."""

    nodes: dict[str, _Node] = field(default_factory=dict)
    methods: dict[str, list[str]] = field(default_factory=dict)
    """Names of the methods of each class."""
    definitions: dict[str, _Function] = field(default_factory=dict)
    returns: dict[str, str] = field(default_factory=dict)
    """The class that a function says it returns."""
    scopes: dict[str, dict[str, str]] = field(default_factory=dict)
    """What a module's own names mean."""
    attributes: dict[str, str] = field(default_factory=dict)
    """The class of an attribute, where the body of its class declares one."""


@cache
def raisers() -> dict[str, tuple[str, ...]]:
    """For each code, the public functions and methods that may raise it, sorted; a class's name is its constructor."""
    source = _read()
    found: dict[str, set[str]] = {}
    for shown, name in _public(source):
        for code in _reachable(source, name):
            found.setdefault(code, set()).add(shown)
    return {code: tuple(sorted(names)) for code, names in found.items()}


def raised_by(code: str) -> tuple[str, ...]:
    """Public functions and methods that may raise ``code``; none for a code that nothing raises."""
    return raisers().get(code, ())


@cache
def codes_in_source() -> frozenset[str]:
    """Every code that stands in the package's code, the catalogue aside."""
    source = _read()
    defaults = {code for each in source.definitions.values() for code in _codes(each.args)}
    return frozenset(defaults.union(*(node.codes for node in source.nodes.values())))


def _read() -> _Source:
    source, trees = _Source(), {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[-1] != "catalogue":
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            trees[module] = ast.parse(path.read_text(encoding="utf-8"))
            source.scopes[module] = dict(_scope(module, trees[module]))
    for scope in source.scopes.values():
        scope.update({name: _origin(source, meaning) for name, meaning in scope.items()})
    for module, tree in trees.items():
        source.attributes.update(_attributes(source, module, tree))
        for holder, function in _functions(module, tree):
            name = f"{holder}.{function.name}"
            source.definitions[name] = function
            if holder != module:
                source.methods.setdefault(holder, []).append(function.name)
            if isinstance(function.returns, ast.Name):
                source.returns[name] = source.scopes[module].get(function.returns.id, "")
    for module, tree in trees.items():
        for holder, function in _functions(module, tree):
            reader = _Reader(source, module, "" if holder == module else holder)
            source.nodes[f"{holder}.{function.name}"] = reader.read_function(function)
    for module, tree in trees.items():
        _read_top_level(source, module, tree)
    return source


def _scope(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of a module, those imported inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
    for statement in tree.body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name, f"{module}.{statement.name}"
        for target in _targets(statement):
            yield target, f"{module}.{target}"


def _origin(source: _Source, name: str) -> str:
    """Where a name is defined that a package imports from one of its modules."""
    package, _, leaf = name.rpartition(".")
    meaning = source.scopes.get(package, {}).get(leaf, name)
    return name if meaning == name else _origin(source, meaning)


def _attributes(source: _Source, module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Attributes that a class declares in its body to be of one of our classes."""
    for statement in (each for each in tree.body if isinstance(each, ast.ClassDef)):
        for member in statement.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.annotation, ast.Name):
                kind = source.scopes[module].get(member.annotation.id)
                for name in _targets(member) if kind else ():
                    yield f"{module}.{statement.name}.{name}", str(kind)


def _targets(statement: ast.stmt) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _functions(module: str, tree: ast.Module) -> Iterator[tuple[str, _Function]]:
    """Every function with the name of its module, and every method with that of its class."""
    for statement in tree.body:
        if isinstance(statement, _Function):
            yield module, statement
        elif isinstance(statement, ast.ClassDef):
            for member in statement.body:
                if isinstance(member, _Function):
                    yield f"{module}.{statement.name}", member


def _read_top_level(source: _Source, module: str, tree: ast.Module) -> None:
    """Variables use what they are made of, and what a call at import time puts into them (a registry)."""
    for statement in tree.body:
        value = getattr(statement, "value", None)
        if value is None:
            continue
        reader = _Reader(source, module, "")
        reader.visit(value)
        for target in _targets(statement):
            source.nodes[f"{module}.{target}"] = reader.node
        if (
            isinstance(statement, ast.Expr)
            and isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
        ):
            called = source.nodes.get(source.scopes[module].get(value.func.id, ""), _Node())
            for name in called.uses - source.definitions.keys():
                source.nodes.setdefault(name, _Node()).uses |= reader.node.uses


def _codes(node: ast.AST) -> set[str]:
    texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and _CODE.fullmatch(text)}


class _Reader(ast.NodeVisitor):
    """Collects the codes and the uses of one function, or of one expression."""

    def __init__(self, source: _Source, module: str, holder: str) -> None:
        self.source, self.module, self.holder = source, module, holder
        self.node = _Node()
        self.local: set[str] = set()
        self.classes: dict[str, str] = {"self": holder, "cls": holder}
        """What is known of the classes of local variables."""

    def read_function(self, function: _Function) -> _Node:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        self.local = {argument.arg for argument in arguments}
        for argument in arguments:
            if isinstance(argument.annotation, ast.Name):
                self.classes[argument.arg] = self.resolve(argument.annotation)
        for each in ast.walk(function):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                self.local.add(each.id)
        for statement in function.body:
            self.visit(statement)
        return self.node

    def resolve(self, node: ast.expr) -> str:
        """The full name of what an expression names, or "" if it is none of ours."""
        if isinstance(node, ast.Name):
            return self.source.scopes[self.module].get(node.id, "")
        if isinstance(node, ast.Attribute):
            holder = self.holder_of(node.value)
            return f"{holder}.{node.attr}" if holder else ""
        return ""

    def holder_of(self, node: ast.expr) -> str:
        """The module or class that attributes of an expression belong to, or ""."""
        if isinstance(node, ast.Name):
            return self.classes.get(node.id) or ("" if node.id in self.local else self.resolve(node))
        return self.source.attributes.get(self.resolve(node), "")

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id not in self.local:
            self.node.uses.add(self.resolve(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.node.uses.add(self.resolve(node))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self.node.codes |= _codes(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            made = self.resolve(node.value.func)
            for target in _targets(node):
                self.classes[target] = self.source.returns.get(
                    made, made if made in self.source.methods else ""
                )

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "cls":  # the constructor by another name
            self.node.uses.add(self.holder)
        called = self.source.definitions.get(self.resolve(node.func))
        handed_on = [*node.args, *(keyword.value for keyword in node.keywords)]
        if called and not any(
            _codes(argument) for argument in handed_on if isinstance(argument, ast.Constant)
        ):
            self.node.codes |= _codes(called.args)

    def visit_Try(self, node: ast.Try) -> None:
        if not any(map(_swallows, node.handlers)):
            for statement in node.body:
                self.visit(statement)
        for handler in node.handlers:
            if not _ends_in_bare_raise(handler):
                self.visit(handler)
        for statement in [*node.orelse, *node.finalbody]:
            self.visit(statement)


def _swallows(handler: ast.ExceptHandler) -> bool:
    caught = (
        {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)}
        if handler.type
        else _CATCH_ALL
    )
    raises = any(isinstance(each, ast.Raise) for each in ast.walk(handler))
    return bool(caught & _CATCH_ALL) and not raises


def _ends_in_bare_raise(handler: ast.ExceptHandler) -> bool:
    """What such a handler does is tidying up; what it raises is what it caught."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _reachable(source: _Source, name: str) -> set[str]:
    codes: set[str] = set()
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        waiting += [
            f"{current}.{made}" for made in ("__init__", "__post_init__") if current in source.methods
        ]
        node = source.nodes.get(current)
        if node:
            codes |= node.codes
            waiting += node.uses
    return codes


def _public(source: _Source) -> Iterator[tuple[str, str]]:
    """What the package exports: how it is shown, and its full name. Exception types are left out."""
    package = PACKAGE.name
    for shown, name in source.scopes[package].items():
        if name in source.definitions:
            yield shown, name
        elif name in source.methods and not name.startswith(f"{package}.errors."):
            yield shown, name
            for method in source.methods[name]:
                if not method.startswith("_"):
                    yield f"{shown}.{method}", f"{name}.{method}"
