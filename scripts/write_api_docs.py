# SPDX-License-Identifier: Apache-2.0
"""Write docs/api.md from the docstrings of everything public: ``python scripts/write_api_docs.py [FILE]``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import kda_cupy  # noqa: E402

SECTIONS: dict[str, tuple[str, ...]] = {
    "Layers": ("KdaLayer", "GdnLayer", "CapturedStep"),
    "Operations": (
        "kda_packed_decode",
        "gdn_packed_decode",
        "kda_decode_step",
        "gdn_decode_step",
        "causal_conv1d_update",
        "kda_decode_mtp",
        "kda_commit",
    ),
    "Calls that only launch": ("bind", "BoundCall"),
    "States": ("StatePool", "Snapshot", "check_state", "is_valid_state"),
    "Errors": (
        "check_errors",
        "KdaError",
        "OperandError",
        "DeviceError",
        "SlotError",
        "PoolExhausted",
        "BridgeError",
        "CompileError",
        "NoGpuError",
    ),
}
INTRODUCTION = """\
# API reference

<!-- Written by scripts/write_api_docs.py from the docstrings: change those, and run the script. -->

Everything that `import kda_cupy` offers. `help(kda_cupy.kda_packed_decode)` shows the same text in a terminal.
Letters are those of [the contract](contract.md#letters).
"""
RULE = re.compile(r"=+(?: +=+)+$")


def page() -> str:
    """The whole page."""
    listed = [name for names in SECTIONS.values() for name in names]
    missing = set(kda_cupy.__all__).symmetric_difference(listed)
    if missing:
        raise SystemExit(
            f"SECTIONS of {Path(__file__).name} and kda_cupy.__all__ differ in {sorted(missing)}"
        )
    parts = [INTRODUCTION]
    for section, names in SECTIONS.items():
        parts.append(f"## {section}\n")
        for name in names:
            parts += of_class(name) if inspect.isclass(getattr(kda_cupy, name)) else of_function(name)
    return "\n".join(parts).rstrip() + "\n"


def of_function(name: str) -> list[str]:
    """Heading, signature and text."""
    function = getattr(kda_cupy, name)
    return [f"### {name}\n", signature(name, function), markdown(inspect.getdoc(function) or "")]


def of_class(name: str) -> list[str]:
    """Heading, text, how to make one, and its public members."""
    cls = getattr(kda_cupy, name)
    parts = [f"### {name}\n"]
    if issubclass(cls, Exception):
        kinds = [f"`{base.__name__}`" for base in cls.__mro__[1:] if issubclass(base, Exception)]
        parts.append(f"Is a {', '.join(kind for kind in kinds if kind != '`Exception`') or '`Exception`'}.\n")
    parts.append(markdown(inspect.getdoc(cls) or ""))
    if "__init__" in vars(cls) and cls.__init__.__doc__ and not issubclass(cls, Exception):
        parts += [signature(name, cls.__init__), markdown(inspect.getdoc(cls.__init__) or "")]
    for member, value in vars(cls).items():
        kind = "property" if isinstance(value, property) else ""
        target: Any = value.fget if kind else getattr(value, "__func__", value)
        if member.startswith("_") or not inspect.isfunction(target) or not target.__doc__:
            continue
        kind = kind or ("class method" if isinstance(value, classmethod) else "")
        parts.append(f"#### {name}.{member}\n")
        parts.append(f"*{kind}*\n" if kind == "property" else signature(f"{name}.{member}", target))
        parts.append(markdown(inspect.getdoc(target) or ""))
    return parts


def signature(name: str, function: Callable[..., Any]) -> str:
    """As code, on several lines where it has to; annotations that say no more than "some array" are left out."""
    found = inspect.signature(function)
    names: list[str] = []
    starred = False
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            names.append("*")
            starred = True
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        names.append(_parameter(parameter))
    line = f"{name}({', '.join(names)})"
    if len(line) > 100:
        rows = [""]
        for each in names:
            if len(rows[-1]) + len(each) > 92:
                rows.append("")
            rows[-1] += f"{each}, "
        line = f"{name}(\n" + "\n".join(f"    {row.rstrip()}" for row in rows) + "\n)"
    return f"```text\n{line}\n```\n"


def _parameter(parameter: inspect.Parameter) -> str:
    annotation = str(parameter.annotation)
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    typed = annotation not in ("Any", str(Any)) and parameter.annotation is not parameter.empty
    text = f"{stars}{parameter.name}" + (f": {annotation}" if typed else "")
    if parameter.default is parameter.empty:
        return text
    return text + (" = " if typed else "=") + repr(parameter.default)


def markdown(text: str) -> str:
    """A docstring of this package as Markdown: tables, literal blocks, references."""
    return "\n".join(_blocks(text.splitlines())) + "\n"


def _blocks(lines: list[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if RULE.match(line):
            end = next(i for i in range(at + 1, len(lines)) if RULE.match(lines[i]) and i > at + 2)
            yield from _table(lines[at : end + 1])
            at = end + 1
        elif line.startswith(">>> "):
            end = next((i for i in range(at, len(lines)) if not lines[i].strip()), len(lines))
            yield from ("```pycon", *lines[at:end], "```")
            at = end
        elif line.rstrip().endswith("::"):
            end = next((i for i in range(at + 2, len(lines)) if lines[i][:1].strip()), len(lines))
            block = [each[4:] for each in lines[at + 2 : end]]
            while block and not block[-1]:
                block.pop()
            yield from (_inline(line.rstrip()[:-1]), "", "```text", *block, "```", "")
            at = end
        else:
            yield _inline(line)
            at += 1


def _table(lines: list[str]) -> Iterator[str]:
    spans = [(found.start(), found.end()) for found in re.finditer("=+", lines[0])]
    spans[-1] = (spans[-1][0], 10**6)
    starts = [start for start, _ in spans]
    rows: list[list[str]] = []
    for line in lines[1:-1]:
        if RULE.match(line):
            continue
        cells = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], 10**6], strict=True)]
        if rows and len(rows) > 1 and _goes_on(cells, rows[-1]):
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    for number, row in enumerate(rows):
        first = ", ".join(f"`{name}`" if name else "" for name in row[0].split(", ")) if number else row[0]
        first = first if "``" not in row[0] else _inline(row[0])
        yield "| " + " | ".join([first, *(_inline(cell).replace("|", "\\|") for cell in row[1:])]) + " |"
        if number == 0:
            yield "|---" * len(row) + "|"


def _goes_on(cells: list[str], above: list[str]) -> bool:
    """Whether a line of a table continues the row above it."""
    return not cells[0] or above[0].endswith(",") or (cells[0].startswith("_") and not cells[1])


def _inline(text: str) -> str:
    """References become links, literals code; what Markdown would take for markup is escaped outside them."""
    text = re.sub(r":(?:func|meth|class|mod):`([\w.]+)`", _reference, text.replace("``", "`"))
    pieces = re.split(r"(\[?`[^`]*`(?:\]\(#[\w.-]+\))?)", text)
    return "".join(piece if number % 2 else _escaped(piece) for number, piece in enumerate(pieces))


def _escaped(text: str) -> str:
    bold = re.compile(r"\*\*([a-z][a-z ]*)\*\*")
    pieces = bold.split(text)
    for number, piece in enumerate(pieces):
        escaped = piece.replace("*", "\\*").replace("<", "&lt;")
        pieces[number] = f"**{piece}**" if number % 2 else re.sub(r"(?<!\w)_(?=\w)", r"\\_", escaped)
    return "".join(pieces)


def _reference(found: re.Match[str]) -> str:
    name = found[1].removeprefix("kda_cupy.")
    if name.split(".")[0] not in kda_cupy.__all__:
        owners = [each for each in ("StatePool", "KdaLayer") if hasattr(getattr(kda_cupy, each), name)]
        if not owners:
            return f"`{name}`"
        return f"[`{name}`](#{owners[0].lower()}{name.lower()})"
    return f"[`{name}`](#{name.lower().replace('.', '')})"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "api.md"
    target.write_text(page(), encoding="utf-8", newline="\n")
    print(f"wrote {target}")
