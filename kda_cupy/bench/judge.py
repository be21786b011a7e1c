# SPDX-License-Identifier: Apache-2.0
"""A case is judged before it is timed: a fast wrong answer has no place in a table."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy.bench.cases import Case

#: Relative errors of the output that rounding explains (contract: one token). Rounding to bfloat16 alone is 1.6e-3;
#: float16 has three more bits.
OUT_BOUNDS: Final = {"float32": 2e-6, "bfloat16": 3e-3, "float16": 3e-3 / 8}
STATE_BOUND: Final = 2e-6
CHAINED_BOUND: Final = 1e-5
"""Contract: up to 16 chained tokens, state and (in float32) output. Half types: the rounding of the output alone."""
SENTINEL: Final = 123.0
"""What an output holds before it is written."""


class Verdict(NamedTuple):
    """``norm(got - truth) / norm(truth)`` of output and state, and what is wrong with them (or nothing)."""

    error_out: float
    error_state: float
    complaint: str = ""


class Judged(NamedTuple):
    """The batch that is judged: the case's B live rows, and one of padding somewhere between them."""

    padding: int
    rows: Any
    """The live ones that are compared, first and last among them."""
    slots: Any
    """[B + 1] int32, of which the padding has -1."""


def choose_rows(case: Case, state: Any, rng: np.random.Generator, *, compared: int) -> Judged:
    """Scattered slots of a pool for B + 1 rows, and at most so many of them to compare."""
    padding = (case.B + 1) // 2
    live = np.delete(np.arange(case.B + 1), padding)
    slots = rng.permutation(np.arange(1, len(state)))[: case.B]
    return Judged(
        padding=padding,
        rows=live[np.unique(np.linspace(0, case.B - 1, compared).astype(int))],
        slots=np.insert(slots, padding, -1).astype(np.int32),
    )


def bounds_of(case: Case) -> tuple[float, float]:
    """What the errors of output and state may be at most."""
    if case.t == 1:
        return OUT_BOUNDS[case.dtype], STATE_BOUND
    return max(OUT_BOUNDS[case.dtype], CHAINED_BOUND), CHAINED_BOUND


def verdict(case: Case, error_out: float, error_state: float, *, complaints: tuple[str, ...] = ()) -> Verdict:
    """Compare with the bounds; NaN is above any. Other complaints are added; empty ones are none."""
    measured = zip(("out", "state"), (error_out, error_state), bounds_of(case), strict=True)
    found = [
        f"error of {name} is {error:.3g}, above {bound:.3g}"
        for name, error, bound in measured
        if not error <= bound
    ]
    return Verdict(error_out, error_state, "; ".join([*found, *filter(None, complaints)]))


def padding_complaint(out: Any) -> str:
    """out: what the padding got, wanted are zeros."""
    return "the output of a padding row is not zero" if np.any(np.asarray(out) != 0) else ""
