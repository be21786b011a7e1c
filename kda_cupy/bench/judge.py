# SPDX-License-Identifier: Apache-2.0
"""A case is judged before it is timed: a fast wrong answer has no place in a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy.bench.cases import OPERATIONS, Case, Inputs, random_state
from kda_cupy.reference import truth

#: Relative errors of the output that rounding explains (contract: one token). Rounding to bfloat16 alone is 1.6e-3;
#: float16 has three more bits.
OUT_BOUNDS: Final = {"float32": 2e-6, "bfloat16": 3e-3, "float16": 3e-3 / 8}
STATE_BOUND: Final = 2e-6
JUDGED_ROWS: Final = 6
"""Live rows of a batch, first and last among them, that are compared with float64."""
_SENTINEL = 123.0


class Verdict(NamedTuple):
    """``norm(got - truth) / norm(truth)`` of output and state, and what is wrong with them (or nothing)."""

    error_out: float
    error_state: float
    complaint: str = ""


def judge(
    case: Case,
    inputs: Inputs,
    state: Any,
    place: Callable[[Any], Any],
    fetch: Callable[[Any], Any],
    rng: np.random.Generator,
) -> Verdict:
    """Run a case once, with a row of padding added, and compare with the float64 truth.

    inputs: NumPy, ``case.B + 1`` rows, of which one is made padding. state: [P > case.B, HV, V, K] where the case runs;
    scattered slots of it are written. place, fetch: from NumPy to arrays of the state's library, and back.
    """
    padding = (case.B + 1) // 2
    live = np.delete(np.arange(case.B + 1), padding)
    judged = live[np.unique(np.linspace(0, case.B - 1, JUDGED_ROWS).astype(int))]
    slots = rng.permutation(np.arange(1, len(state)))[: case.B + 1]
    slots = np.insert(slots[: case.B], padding, -1).astype(np.int32)
    before = random_state(case, len(judged), rng)
    for slot, values in zip(slots[judged].tolist(), before, strict=True):
        state[slot] = place(values)
    out = place(np.full((case.B + 1, 1, case.HV, case.V), _SENTINEL, inputs.mixed_qkv.dtype))
    OPERATIONS[case.op](*map(place, inputs), state, place(slots), out=out, lower_bound=case.lower_bound)
    got_out = fetch(out)
    got_state = np.stack([fetch(state[slot]) for slot in slots[judged].tolist()])

    own = np.arange(len(judged))
    want_out, want_state = truth.packed_decode(
        *inputs.rows(judged), before, own, lower_bound=case.lower_bound
    )
    return verdict(
        case,
        truth.relative_error(got_out[judged], want_out),
        truth.relative_error(got_state, want_state),
        padding_is_zero=not np.any(got_out[padding]),
    )


def verdict(case: Case, error_out: float, error_state: float, *, padding_is_zero: bool) -> Verdict:
    """Compare with the bounds; NaN is above any."""
    complaints = [
        f"error of {name} is {error:.3g}, above {bound:.3g}"
        for name, error, bound in (
            ("out", error_out, OUT_BOUNDS[case.dtype]),
            ("state", error_state, STATE_BOUND),
        )
        if not error <= bound
    ]
    if not padding_is_zero:
        complaints.append("the output of a padding row is not zero")
    return Verdict(error_out, error_state, "; ".join(complaints))
