# SPDX-License-Identifier: Apache-2.0
"""The record of a run: everything a reader needs in a year, raw samples included. Tables are views of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from kda_cupy.bench.cases import Case
from kda_cupy.bench.judge import Verdict

SCHEMA: Final = "kda_cupy.bench"
SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Protocol:
    """How the times were taken."""

    backend: str
    """``"cuda"`` or ``"numpy"``."""
    timer: str
    l2: str
    """``"cold"``, ``"warm"``, or ``"unknown"`` (NumPy)."""
    repeats: int
    """Samples a row."""
    device: int | None = None
    reuse_bytes: int = 0
    """State that must move between two uses of a slot (cold)."""
    pool_bytes: int = 0
    """Size of the pool that the slots are scattered over, unless memory is short."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case. Times in microseconds a call; None where there is none."""

    op: str
    gate: str
    H: int
    HV: int
    K: int
    V: int
    B: int
    dtype: str
    status: str = "timed"
    """``"timed"``, ``"wrong"`` (an error above its bound, so not timed) or ``"skipped"`` (no memory)."""
    note: str = ""
    error_out: float | None = None
    error_state: float | None = None
    median_us: float | None = None
    p95_us: float | None = None
    min_us: float | None = None
    noise_percent: float | None = None
    """Standard deviation of the samples over their mean."""
    bytes_moved: int | None = None
    """By one call, by the operation's own formula."""
    yardstick_us: float | None = None
    """Median of the yardstick RW on the same slots."""
    host_eager_us: float | None = None
    """Wall clock of one call that checks its operands, not waiting for the GPU."""
    host_bound_us: float | None = None
    """The same for a bound call."""
    variant: str = ""
    registers: int = 0
    source_digest: str = ""
    launches: int = 1
    """Calls a sample."""
    reuse_bytes: int = 0
    """State that moves between two uses of a slot."""
    samples_us: tuple[float, ...] = ()
    yardstick_samples_us: tuple[float, ...] = ()

    @property
    def gb_per_s(self) -> float | None:
        """Of the operation: ``bytes_moved`` over the median."""
        return self.bytes_moved / self.median_us / 1e3 if self.bytes_moved and self.median_us else None

    @property
    def ratio(self) -> float | None:
        """Time over the yardstick's."""
        return self.median_us / self.yardstick_us if self.median_us and self.yardstick_us else None

    @property
    def yardstick_bytes(self) -> int:
        """The state, read and written."""
        return 2 * self.B * self.HV * self.V * self.K * 4

    @property
    def is_slow(self) -> bool:
        """Less than half the speed of the yardstick."""
        return self.ratio is not None and self.ratio > 2

    def flat(self) -> dict[str, Any]:
        """All but the samples, and what follows from them: a line of a CSV file."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if "samples" not in each.name}
        return values | {"gb_per_s": self.gb_per_s, "ratio": self.ratio}


def summarize(samples_us: Sequence[float]) -> dict[str, Any]:
    """The fields of a row that samples decide."""
    samples = np.asarray(samples_us, np.float64)
    return {
        "median_us": float(np.median(samples)),
        "p95_us": float(np.quantile(samples, 0.95)),
        "min_us": float(samples.min()),
        "noise_percent": float(100 * samples.std() / samples.mean()),
        "samples_us": tuple(map(float, samples)),
    }


def make_row(case: Case, verdict: Verdict | None = None, **measured: Any) -> Row:
    """The row of a case. With a complaint in the verdict it is "wrong"; NaN errors become None, JSON has none."""
    if verdict is not None:
        errors = {"error_out": verdict.error_out, "error_state": verdict.error_state}
        measured |= {name: error if math.isfinite(error) else None for name, error in errors.items()}
        if verdict.complaint:
            measured |= {"status": "wrong", "note": verdict.complaint}
    return Row(case.op, case.gate, case.H, case.HV, case.K, case.V, case.B, case.dtype, **measured)


@dataclass(slots=True)
class Record:
    """A run. Rows are appended as they come."""

    environment: dict[str, Any]
    """:func:`kda_cupy.environment.collect`."""
    protocol: Protocol
    rows: list[Row] = field(default_factory=list)
    complete: bool = True
    """False if it was interrupted."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_json(self) -> str:
        """The record as text that :meth:`from_json` reads."""
        named = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
        rows = [asdict(row) | {"gb_per_s": row.gb_per_s, "ratio": row.ratio} for row in self.rows]
        return json.dumps(named | asdict(self) | {"rows": rows}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Read what :meth:`to_json` wrote. Raises ValueError for anything else."""
        try:
            stored = json.loads(text)
            named = stored.pop("schema"), stored.pop("schema_version")
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise ValueError("not a benchmark record") from cause
        if named != (SCHEMA, SCHEMA_VERSION):
            raise ValueError(
                f"a record of {named[0]} {named[1]}; this version reads {SCHEMA} {SCHEMA_VERSION}"
            )
        known = {each.name for each in fields(Row)}
        try:
            rows = []
            for stored_row in stored.pop("rows"):
                values: dict[str, Any] = {name: stored_row[name] for name in known}
                values |= {name: tuple(each) for name, each in values.items() if isinstance(each, list)}
                rows.append(Row(**values))
            return cls(rows=rows, protocol=Protocol(**stored.pop("protocol")), **stored)
        except (KeyError, TypeError, AttributeError) as cause:
            raise ValueError(f"a damaged benchmark record: {cause}") from cause
