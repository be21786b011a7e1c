# SPDX-License-Identifier: Apache-2.0
"""The convolution by itself, token after token, beside float64."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kda_cupy.bench.cases import Case, random_array, random_rows
from kda_cupy.bench.judge import SENTINEL, choose_rows, padding_complaint
from kda_cupy.bench.speculation import TAPS, channels_of
from kda_cupy.bench.workload import Memory
from kda_cupy.dtypes import by_name
from kda_cupy.ops.conv_update import causal_conv1d_update
from kda_cupy.reference import truth

COMPARED: Final = 3


def examine(case: Case, memory: Memory, state: Any, rng: np.random.Generator) -> tuple[float, float, str]:
    """Errors of output and history after ``case.t`` tokens of each row, and a complaint.

    Only the number of slots of ``state`` matters. The history holds raw inputs, so its error has to be 0.
    """
    C, t, kind = sum(channels_of(case)), case.t, by_name(case.dtype)
    padding, rows, slots = choose_rows(case, state, rng, compared=COMPARED)
    x = np.ascontiguousarray(
        random_rows(rng, (case.B + 1) * t, C, case.dtype).reshape(case.B + 1, t, C).swapaxes(1, 2)
    )
    before = random_array(rng, (len(state), C, TAPS - 1)).astype(kind)
    weight, bias = random_array(rng, (C, TAPS)) / 2, random_array(rng, (C,)) / 4
    history = memory.place(before.copy())
    out = memory.place(np.full(x.shape, SENTINEL, kind))
    causal_conv1d_update(
        memory.place(x),
        history,
        memory.place(weight),
        memory.place(bias),
        "silu",
        memory.place(slots),
        out=out,
    )
    got_out, got_history = memory.fetch(out), memory.fetch(history)

    want_out, want_history = np.zeros((len(rows), C, t)), before.astype(np.float64)
    for number, (row, slot) in enumerate(zip(rows.tolist(), slots[rows].tolist(), strict=True)):
        for j, token in enumerate(x[row].astype(np.float64).T):
            want_out[number, :, j], want_history[slot] = truth.conv(
                want_history[slot], token, weight.astype(np.float64), bias.astype(np.float64), np.float64
            )
    idle = np.setdiff1d(np.arange(len(state)), slots)
    touched = (
        "" if np.array_equal(got_history[idle], before[idle]) else "a history of another slot was changed"
    )
    mine = slots[rows]
    return (
        truth.relative_error(got_out[rows], want_out),
        truth.relative_error(got_history[mine], want_history[mine]),
        "; ".join(filter(None, (padding_complaint(got_out[padding]), touched))),
    )
