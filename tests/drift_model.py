# SPDX-License-Identifier: Apache-2.0
"""How far a state drifts from float64 over many tokens, in place or deferred (verify, then commit from rings).

>>> drift(numpy, tokens=100_000, way="in place")
{100: (state error, largest output error so far), 1000: ...}
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from mtp_problems import DIM, commit_operands, make_mtp
from problems import to, to_host, to_library
from step_problems import make_step

import kda_cupy
from kda_cupy.reference import truth
from kda_cupy.reference.truth import relative_error

WAYS = ("in place", "deferred")
MEMORY = -7.0
"""Added to the raw gates: with a lower bound of -5 a key forgets some 0.5 % a token, so hundreds of tokens matter."""
CHUNK = 8
"""Tokens of a verify."""
DRAWN = 1024
"""Tokens drawn; they come again and again."""


def drift(
    library: ModuleType, tokens: int, way: str, dtype: str = "float32"
) -> dict[int, tuple[float, float]]:
    """Errors by number of tokens, at powers of ten: of the state, and the largest of an output so far."""
    rng = np.random.default_rng(3)
    t = CHUNK if way == "deferred" else 1
    options = {"H": 1, "HV": 1, "dtype": dtype, "P": 2, "slots": [1], "lower_bound": -5.0, "seed": 1}
    problem = make_mtp(N=1, t=t, spare_steps=0, **options) if t > 1 else make_step("kda", B=1, **options)
    problem["recurrent_state"][1] = 0
    for letter in "qkv":
        problem[f"cs_{letter}"][1] = 0
    model = _Model(problem)
    moved = to(problem, library)
    commit = to(commit_operands(problem, [t]), library) if t > 1 else {}
    commit |= {
        name: moved[name] for name in commit if name in moved
    }  # the very arrays that the verify writes
    kind = problem["x_q"].dtype
    drawn = [rng.standard_normal((DRAWN, DIM)).astype(kind) for _ in range(4)]
    drawn[3] = (drawn[3] + np.asarray(MEMORY, kind)).astype(kind)
    beta = rng.standard_normal((DRAWN, 1)).astype(kind)
    pieces = {
        name: each.reshape(1, DRAWN, 1, DIM)
        for name, each in zip(("x_q", "x_k", "x_v", "g"), drawn, strict=True)
    }
    pieces["beta"] = beta.reshape(1, DRAWN, 1)
    there = {name: to_library(each, library) for name, each in pieces.items()}
    errors: dict[int, tuple[float, float]] = {}
    worst, mark = 0.0, 100
    for first in range(0, tokens, t):
        at = slice(first % DRAWN, first % DRAWN + t)
        now = {name: each[:, at] for name, each in there.items()}
        wanted = model.decode({name: each[0, at].astype(np.float64) for name, each in pieces.items()}, kind)
        if t > 1:
            out = kda_cupy.kda_decode_mtp(**{**moved, **now})
            kda_cupy.kda_commit(**commit)
        else:
            out = kda_cupy.kda_decode_step(**{**moved, **now})
        if first % 97 < t or first + t >= mark:
            worst = max(worst, relative_error(to_host(out)[0], wanted))
        if first + t >= mark:
            errors[mark] = (relative_error(to_host(moved["recurrent_state"])[1], model.state[None]), worst)
            mark *= 10
    return errors


class _Model:
    """One head, token by token, in float64."""

    def __init__(self, problem: dict[str, Any]) -> None:
        self.state = np.zeros((DIM, DIM))
        self.histories = [np.zeros((DIM, 3)) for _ in range(3)]
        self.taps = [problem[f"w_{letter}"].astype(np.float64) for letter in "qkv"]
        self.biases = [problem[f"conv_bias_{letter}"].astype(np.float64) for letter in "qkv"]
        self.A_log, self.dt_bias = float(problem["A_log"][0]), problem["dt_bias"].astype(np.float64)

    def decode(self, now: dict[str, Any], kind: Any) -> Any:
        out = np.zeros((len(now["beta"]), 1, DIM))
        for j in range(len(out)):
            acts = []
            for i, name in enumerate(("x_q", "x_k", "x_v")):
                act, self.histories[i] = truth.conv(
                    self.histories[i], now[name][j, 0], self.taps[i], self.biases[i], kind
                )
                acts.append(act)
            token = truth.Token(
                q=truth.l2_normalized(acts[0]) * DIM**-0.5,
                k=truth.l2_normalized(acts[1]),
                v=acts[2],
                g=truth.log_decay(now["g"][j, 0], self.dt_bias, self.A_log, -5.0),
                beta=float(truth.sigmoid(now["beta"][j, 0])),
            )
            self.state, out[j, 0] = truth.step(self.state, token)
        return out
