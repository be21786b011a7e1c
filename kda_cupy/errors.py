# SPDX-License-Identifier: Apache-2.0
"""The exceptions of this package, and how they are raised.

Every refusal has a code and a page (``kda_cupy.catalogue``). The code raises with :func:`error` only, so the
sentence a user meets, the page that ``kda-cupy errors CODE`` shows and ``docs/errors.md`` cannot drift apart.

    raise error("KDA-STATE-DTYPE", operand="initial_state", got="float16")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class KdaError(Exception):
    """Root of everything this package raises on purpose.

    Attributes: ``code`` (stable for ever), ``operand`` (name of the argument, or ``""``), ``got`` (what came),
    ``wanted`` (the rule, in words), ``hint`` (the cure, in one clause).
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        operand: str = "",
        got: str = "",
        wanted: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.operand = operand
        self.got = got
        self.wanted = wanted
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the attributes when the exception crosses a process boundary."""
        return (_rebuild, (type(self), self.args[0], self.__dict__.copy()))


def _rebuild(kind: type[KdaError], message: str, attributes: dict[str, str]) -> KdaError:
    made = kind(message)
    made.__dict__.update(attributes)
    return made


class OperandError(KdaError, ValueError):
    """Shapes, dtypes, strides, alignment, overlap, options."""


class DeviceError(KdaError, ValueError):
    """Operands on different devices, or on the wrong one."""


class SlotError(KdaError, IndexError):
    """Slots, rows and counts out of range."""


class PoolExhausted(KdaError, RuntimeError):
    """A pool has fewer free slots than were asked for."""


class BridgeError(KdaError, TypeError):
    """An object that is no array this package can read."""


class CompileError(KdaError, RuntimeError):
    """A kernel could not be compiled for this GPU."""


class NoGpuError(KdaError, RuntimeError):
    """There is no GPU, no driver or no CuPy to use one with."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the catalogue. ``words`` and ``cure`` are format strings over the fields given to :func:`error`."""

    code: str
    exception: type[KdaError]
    words: str
    """The sentence that a user searches for; it comes first in the message."""
    cure: str
    """What to do, as one imperative clause; it comes last in the message."""
    meaning: str
    """Two or three sentences: the rule and its reason."""
    when: tuple[str, ...]
    """Concrete triggers, and the usual story behind each."""
    solutions: tuple[str, ...]
    before: str
    """Code that meets this error; it runs as written after ``PREAMBLE``."""
    after: str
    """The same, mended."""
    related: tuple[str, ...]
    predicate: str = ""
    """Public function that tells without raising, where there is one."""
    needs: str = ""
    """What a machine must be like for the example to run, if not every machine will do."""

    def message(self, got: str, fields: dict[str, object]) -> str:
        """The whole message: the rule, what came (unless the rule's own words say it), the cure."""
        words = self.words.format(**fields)
        came = f" Got {got}." if got and "{got}" not in self.words else ""
        return f"{words}{'' if words.endswith('.') else '.'}{came} {self.cure.format(**fields)}."


def error(code: str, *, operand: str = "", got: str = "", **fields: object) -> KdaError:
    """Make (not raise) the exception of a catalogue page.

    ``got`` says what came, in words. ``fields`` fill the page's sentences; ``operand`` is one of them.
    """
    from kda_cupy.catalogue import CATALOGUE

    page = CATALOGUE[code]
    values: dict[str, object] = {"operand": operand, "got": got, **fields}
    return page.exception(
        page.message(got, values),
        code=code,
        operand=operand,
        got=got,
        wanted=page.words.format(**values),
        hint=page.cure.format(**values),
    )
