# SPDX-License-Identifier: Apache-2.0
"""What ``kda-cupy check`` examines: every operation, KDA and GDN, both gates, and where errors are largest."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from kda_cupy.accuracy import chain, conv
from kda_cupy.accuracy.finding import Finding
from kda_cupy.bench.cases import LOWER_BOUND, Case, random_state
from kda_cupy.bench.decode import Inputs, PackedDecode, make_inputs
from kda_cupy.bench.judge import bounds_of
from kda_cupy.bench.speculation import Speculation
from kda_cupy.bench.step import WholeStep
from kda_cupy.bench.workload import Make, Memory, Rotation
from kda_cupy.errors import KdaError
from kda_cupy.guard import check_errors
from kda_cupy.pool import StatePool

EXTREME_GATE: Final = 1e4
EXTREME_A_LOG: Final = 5.0
ONCE: Final = Rotation(groups=1, launches=1, reuse_bytes=0)
SPARE_SLOTS: Final = 4
VERIFY: Final = "verify+commit"

Examine = Callable[[Case, Memory, Any, np.random.Generator], tuple[float, float, str]]


@dataclass(frozen=True)
class Exam:
    """One row of the table."""

    operation: str
    case: Case
    examine: Examine
    special: str = ""
    exact_state: bool = False
    """The bound of the state is 0: it holds copies."""

    @property
    def words(self) -> str:
        """The case, as the table has it."""
        case, heads = self.case, f"H={self.case.H}"
        heads += f" HV={case.HV}" if case.HV != case.H else ""
        dims = "" if case.K == case.V == 128 else f"K={case.K} V={case.V}"
        tokens = f"t={case.t}" if case.t > 1 else ""
        gate = "" if self.exact_state else f"{case.op} {case.gate}"
        return " ".join(filter(None, (gate, heads, dims, tokens, case.mode, self.special)))

    def take(self, memory: Memory, device: int | str) -> Finding:
        """Run it. An error of this package is a complaint: the other operations are examined all the same."""
        case = self.case
        bound_out, bound_state = bounds_of(replace(case, t=1) if self.exact_state else case)
        measured = partial(
            Finding, self.operation, self.words, case.dtype,
            bound_out=bound_out, bound_state=0.0 if self.exact_state else bound_state,
        )  # fmt: skip
        rng = np.random.default_rng(zlib.crc32(f"{self.operation} {self.words} {case.dtype}".encode()))
        try:
            pool = StatePool(case.B + SPARE_SLOTS, case.HV, case.K, case.V, device=device)
            state = pool[0]
            state[:] = memory.place(random_state(case, len(state), rng))
            error_out, error_state, complaint = self.examine(case, memory, state, rng)
            check_errors(-1 if device == "cpu" else int(device))
        except KdaError as cause:
            nan = float("nan")
            return measured(error_out=nan, error_state=nan, complaint=f"{cause.code}: {cause}")
        except MemoryError as cause:
            nan = float("nan")
            return measured(error_out=nan, error_state=nan, complaint=f"not enough memory: {cause}")
        return measured(error_out=error_out, error_state=error_state, complaint=complaint)


def exams(dtypes: tuple[str, ...]) -> list[Exam]:
    """All of them, dtype by dtype."""
    return [exam for dtype in dtypes for exam in _of(dtype)]


def _of(dtype: str) -> list[Exam]:
    gates = (None, LOWER_BOUND)
    kda, gdn = Case("kda", 4, 4, dtype=dtype, B=5), Case("gdn", 2, 4, dtype=dtype, B=5)
    decode, step, speculation = _judged(PackedDecode), _judged(WholeStep), _judged(Speculation)
    extreme = _judged(partial(PackedDecode, make=_extreme_gates))
    found = [
        *(
            Exam("packed decode", replace(each, lower_bound=gate), decode)
            for each in (kda, gdn)
            for gate in gates
        ),
        *(
            Exam("packed decode", replace(each, lower_bound=gate), extreme, "gates +-1e4")
            for each in (kda, gdn)
            for gate in gates
        ),
        *(Exam("packed decode", replace(each, H=2, HV=6, K=100, V=60), decode) for each in (kda, gdn)),
        *(Exam("packed decode", replace(each, t=16, B=2), chain.examine) for each in (kda, gdn)),
    ]
    found += [
        Exam("decode step", replace(each, operation="step", lower_bound=gate, norm=norm), step, "norm" * norm)
        for each in (kda, gdn)
        for gate, norm in zip(gates, (False, True), strict=True)
    ]
    found += [Exam("conv", replace(kda, t=t), conv.examine, exact_state=True) for t in (1, 5)]
    rounds = replace(kda, operation="round", H=2, B=3, lower_bound=LOWER_BOUND)
    found += [
        Exam(VERIFY, replace(rounds, t=t, accept=accept, mode="rings", norm=norm), speculation, "norm" * norm)
        for t, accept, norm in ((1, 1, True), (4, 3, False), (16, 16, False))
    ]
    softplus = replace(rounds, lower_bound=None, t=8, accept=5, mode="rings")
    snapshots = replace(rounds, H=4, t=4, accept=2, mode="snapshots")
    return [*found, Exam(VERIFY, softplus, speculation), Exam(VERIFY, snapshots, speculation)]


def _judged(make: Make) -> Examine:
    """The examination that a row of the benchmark goes through before it is timed."""

    def examine(case: Case, memory: Memory, state: Any, rng: np.random.Generator) -> tuple[float, float, str]:
        error_out, error_state, complaint = make(case, memory, state, ONCE, rng).judge()
        return error_out, error_state, complaint

    return examine


def _extreme_gates(case: Case, rows: int, rng: np.random.Generator) -> Inputs:
    """Raw gates at both ends, where a state is kept or lost altogether, and rates up to exp(5)."""
    inputs = make_inputs(case, rows, rng)
    signs = rng.choice(np.array([-EXTREME_GATE, EXTREME_GATE]), inputs.a.shape)
    rates = np.linspace(-2, EXTREME_A_LOG, case.HV, dtype=np.float32)
    return inputs._replace(a=signs.astype(inputs.a.dtype), A_log=rates)
