# SPDX-License-Identifier: Apache-2.0
"""Findings as a table for 80 columns, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kda_cupy.accuracy.finding import Finding
from kda_cupy.bench.render import WIDTH

SCHEMA: Final = "kda_cupy.check"
SCHEMA_VERSION: Final = 1
LEGEND: Final = (
    "out, state: norm(got - float64) / norm(float64); <=: what rounding explains.",
    "verify+commit: out of the verify; state after the commit, and of each snapshot.",
    "conv: state is the history of raw inputs, which has to be the same to the bit.",
)
HEADINGS: Final = ("operation", "case", "out", "<=", "state", "<=", "")


@dataclass(slots=True)
class Report:
    """What ``kda-cupy check`` found, and on what."""

    backend: str
    environment: dict[str, Any]
    wanted: int
    """Examinations."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """False after Ctrl-C."""
        return len(self.findings) == self.wanted

    @property
    def failed(self) -> list[Finding]:
        """Those with an error above its bound, a NaN or a complaint."""
        return [each for each in self.findings if not each.passed]

    def to_json(self) -> str:
        """The record; ``passed`` is true only if all of it was examined."""
        named = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
        values = asdict(self) | {
            "complete": self.complete,
            "passed": self.complete and not self.failed,
            "findings": [each.as_json() for each in self.findings],
        }
        return json.dumps(named | values, indent=1, allow_nan=False) + "\n"

    def lines(self) -> list[str]:
        """A table a dtype, then what is wrong, word for word, then one line that sums it up."""
        cells = [_cells(each) for each in self.findings]
        widths = [max(map(len, column)) for column in zip(HEADINGS, *cells, strict=True)]
        shown: list[str] = []
        dtype = ""
        for finding, row in zip(self.findings, cells, strict=True):
            if finding.dtype != dtype:
                dtype = finding.dtype
                shown += ["", f"{dtype} activations, float32 state", _line(HEADINGS, widths)]
                shown.append("-" * min(WIDTH, sum(widths) + len(widths) - 1))
            shown.append(_line(row, widths))
        shown += ["", *LEGEND] if shown else []
        shown += [f"{each.operation}, {each.case}, {each.dtype}: {_reason(each)}" for each in self.failed]
        return shown[1:]

    def summary(self) -> str:
        """How many were right."""
        found, failed = len(self.findings), len(self.failed)
        right = f"{found - failed} of {found} are within their bounds"
        return right if self.complete else f"{right}; {self.wanted - found} were not examined"


def _cells(finding: Finding) -> tuple[str, ...]:
    return (
        finding.operation,
        finding.case,
        _number(finding.error_out),
        _number(finding.bound_out),
        _number(finding.error_state),
        _number(finding.bound_state),
        "ok" if finding.passed else "FAIL",
    )


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    """Words to the left, numbers to the right."""
    padded = [
        f"{cell:<{width}}" if place in (0, 1, 6) else f"{cell:>{width}}"
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return " ".join(padded).rstrip()


def _reason(finding: Finding) -> str:
    measured = (
        ("out", finding.error_out, finding.bound_out),
        ("state", finding.error_state, finding.bound_state),
    )
    return finding.complaint or "; ".join(
        f"error of {name} is {error:.3g}, above {bound:.3g}"
        for name, error, bound in measured
        if not error <= bound
    )
