# SPDX-License-Identifier: Apache-2.0
"""Packed decode of many tokens, one after another: whether errors of the state grow."""

from __future__ import annotations

from typing import Any

import numpy as np

from kda_cupy.bench.cases import Case, random_state
from kda_cupy.bench.decode import OPERATIONS, make_inputs
from kda_cupy.bench.judge import choose_rows, padding_complaint
from kda_cupy.bench.workload import Memory
from kda_cupy.reference import truth


def examine(case: Case, memory: Memory, state: Any, rng: np.random.Generator) -> tuple[float, float, str]:
    """Errors of the worst token's output and of the state after ``case.t`` tokens a row, and a complaint."""
    padding, rows, slots = choose_rows(case, state, rng, compared=case.B)
    want_state: Any = random_state(case, len(rows), rng)
    mine = slots[rows].tolist()
    for slot, values in zip(mine, want_state, strict=True):
        state[slot] = memory.place(values)
    placed, errors, complaint = memory.place(slots), [], ""
    for _ in range(case.t):
        inputs = make_inputs(case, case.B + 1, rng)
        operands = [memory.place(each) for each in inputs]
        out, _ = OPERATIONS[case.op](*operands, state, placed, lower_bound=case.lower_bound)
        want_out, want_state = truth.packed_decode(
            *inputs.rows(rows), want_state, np.arange(len(rows)), lower_bound=case.lower_bound
        )
        got = memory.fetch(out)
        errors.append(truth.relative_error(got[rows], want_out))
        complaint = complaint or padding_complaint(got[padding])
    got_state = np.stack([memory.fetch(state[slot]) for slot in mine])
    return float(np.max(errors)), truth.relative_error(got_state, want_state), complaint
