# SPDX-License-Identifier: Apache-2.0
"""The record of a run: everything a reader needs in a year, raw samples included. Tables are views of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from kda_cupy.bench.cases import Case
from kda_cupy.bench.judge import Verdict

SCHEMA: Final = "kda_cupy.bench"
SCHEMA_VERSION: Final = 2
GPU_CHECK: Final = "kda_cupy.gpu_check"
READABLE: Final = (1, 2)
"""Versions; what a row of an older one does not say has the default of its field."""


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
    """Rows (decode) or requests."""
    dtype: str
    operation: str = "decode"
    """``"decode"``; ``"step"`` or ``"chain"`` (the step unfused); ``"verify"``, ``"commit"`` or ``"round"`` (both)."""
    t: int = 1
    """Tokens of a request."""
    mode: str = ""
    """``"rings"`` or ``"snapshots"``; nothing for a decode."""
    accept: int = 0
    """Tokens that the commit keeps; 0 where there is none."""
    norm: bool = False
    """With the fused output norm."""
    plain_windows: bool = False
    """Conv windows of a verify that hold each raw input up to three times; else they slide and hold it once."""
    peer: str = ""
    """Whose implementation; empty for this package's."""
    status: str = "timed"
    """``"timed"``, ``"wrong"`` (an error above its bound, so not timed) or ``"skipped"`` (no memory)."""
    note: str = ""
    error_out: float | None = None
    error_state: float | None = None
    difference: float | None = None
    """Of a peer's results from this package's, relative: the larger of output and state."""
    median_us: float | None = None
    p95_us: float | None = None
    min_us: float | None = None
    noise_percent: float | None = None
    """Standard deviation of the samples over their mean."""
    bytes_moved: int | None = None
    """By one call, by the operation's own formula."""
    yardstick: str = "RW"
    """Which: RW reads and writes the state, R reads it, SNAP reads it and stores t copies."""
    yardstick_us: float | None = None
    """Its median on the same slots."""
    yardstick_bytes: int | None = None
    """That it moves."""
    host_eager_us: float | None = None
    """Wall clock of one call that checks its operands, not waiting for the GPU."""
    host_bound_us: float | None = None
    """The same for a bound call."""
    variant: str = ""
    registers: int = 0
    """A thread."""
    local_bytes: int = 0
    """A thread; anything but 0 is a spill."""
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""
    source_digest: str = ""
    launches: int = 1
    """Calls a sample."""
    reuse_bytes: int = 0
    """State that moves between two uses of a slot."""
    samples_us: tuple[float, ...] = ()
    yardstick_samples_us: tuple[float, ...] = ()

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes it the same row of another record."""
        return tuple([getattr(self, name) for name in _IDENTITY])

    @property
    def table(self) -> str:
        """The operation beside which it is shown: a chain stands beside its step."""
        return "step" if self.operation == "chain" else self.operation

    @property
    def form(self) -> str:
        """Of a step ``"fused"`` or ``"normed"``, of a chain its name; nothing for other operations."""
        names = {"step": "normed" if self.norm else "fused", "chain": "chain"}
        return names.get(self.operation, "")

    @property
    def gb_per_s(self) -> float | None:
        """Of the operation: ``bytes_moved`` over the median."""
        return self.bytes_moved / self.median_us / 1e3 if self.bytes_moved and self.median_us else None

    @property
    def ratio(self) -> float | None:
        """Time over the yardstick's."""
        return self.median_us / self.yardstick_us if self.median_us and self.yardstick_us else None

    @property
    def yardstick_speed(self) -> float | None:
        """Bytes a microsecond."""
        return (
            self.yardstick_bytes / self.yardstick_us if self.yardstick_bytes and self.yardstick_us else None
        )

    @property
    def is_slow(self) -> bool:
        """A decode at less than half the speed of the yardstick, which does all of its work but the arithmetic."""
        return self.operation == "decode" and not self.peer and self.ratio is not None and self.ratio > 2

    def flat(self) -> dict[str, Any]:
        """All but the samples, and what follows from them: a line of a CSV file."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if "samples" not in each.name}
        return values | {"gb_per_s": self.gb_per_s, "ratio": self.ratio}


_IDENTITY: Final = tuple(
    name for name in (*(each.name for each in fields(Case)), "gate", "peer") if name != "lower_bound"
)


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
    shared = {each.name for each in fields(Row)} & {each.name for each in fields(Case)}
    return Row(gate=case.gate, **{name: getattr(case, name) for name in shared}, **measured)


@dataclass(slots=True)
class Record:
    """A run. Rows are appended as they come."""

    environment: dict[str, Any]
    """:func:`kda_cupy.environment.collect`."""
    protocol: Protocol
    rows: list[Row] = field(default_factory=list)
    complete: bool = True
    """False if it was interrupted."""
    kernel_digests: dict[str, str] = field(default_factory=dict)
    """Of every source under kernels/, whichever were used; registers and bytes of those stand in the rows."""
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
        if named[0] == GPU_CHECK and isinstance(stored.get("bench"), dict):
            return cls._from_gpu_check(stored)
        if named[0] != SCHEMA or named[1] not in READABLE:
            raise ValueError(
                f"a record of {named[0]} {named[1]}; this version reads {SCHEMA} {SCHEMA_VERSION}"
            )
        try:
            rows = [_read_row(each) for each in stored.pop("rows")]
            return cls(rows=rows, protocol=Protocol(**stored.pop("protocol")), **stored)
        except (KeyError, TypeError, AttributeError) as cause:
            raise ValueError(f"a damaged benchmark record: {cause}") from cause

    @classmethod
    def _from_gpu_check(cls, stored: dict[str, Any]) -> Record:
        """The benchmark within a record of scripts/gpu_check.sh, whose environment stands beside it."""
        environment = stored.get("environment", {})
        gpu = {"index": stored["bench"].get("protocol", {}).get("device"), **environment.get("gpu", {})}
        bench = {
            "kernel_digests": stored.get("kernel_digests", {}), **stored["bench"],
            "environment": {**environment, "gpus": [gpu]},
        }  # fmt: skip
        return cls.from_json(json.dumps(bench))


def _read_row(stored: dict[str, Any]) -> Row:
    """Raises KeyError for a row without what every row has."""
    values: dict[str, Any] = {}
    for each in fields(Row):
        if each.name in stored or each.default is MISSING:
            value = stored[each.name]
            values[each.name] = tuple(value) if isinstance(value, list) else value
    if values.get("yardstick_us") and "yardstick_bytes" not in values:  # version 1 knew RW alone
        values["yardstick_bytes"] = 2 * 4 * math.prod(values[name] for name in ("B", "HV", "V", "K"))
    return Row(**values)
