# SPDX-License-Identifier: Apache-2.0
"""Operands for verify and commit: random, never zero, reproducible, with poison wherever nobody may write.

>>> problem = make_mtp(N=3, t=4, mode="rings")
>>> out = kda_decode_mtp(**to(problem, cupy))
"""

from __future__ import annotations

from typing import Any

import numpy as np
from problems import POISON, Problem, make_state, np_dtype

DIM = 128


def make_mtp(
    N: int = 3,
    t: int = 3,
    H: int = 1,
    HV: int = 2,
    dtype: str = "bfloat16",
    *,
    mode: str = "rings",
    lengths: list[int] | None = None,
    spare_tokens: int = 0,
    P: int | None = None,
    slots: Any = None,
    lower_bound: float | None = -5.0,
    bias: bool = True,
    onorm: bool = False,
    gate_dtype: str | None = None,
    weight_dtype: str = "float32",
    parameter_dtype: str = "float32",
    A_log: bool = True,
    index_dtype: str = "int32",
    ring_indices: bool = False,
    channels_fastest: bool = True,
    spare_steps: int = 1,
    seed: int = 0,
) -> Problem:
    """Arguments of ``kda_decode_mtp`` as NumPy arrays.

    lengths: of each request, instead of t for all; max_tokens_per_request is then the longest of them and t.
    spare_tokens: rows behind the last request's. spare_steps: of the scratch arrays and rings, beyond t.
    slots: default all different, none of them 0 and none the number of its row. mode: "rings" or "snapshots".
    channels_fastest: the strides of conv history and windows that engines have, (.., 1, channels).
    """
    rng = np.random.default_rng(seed)
    ragged = lengths is not None
    lengths = [t] * N if lengths is None else lengths
    assert len(lengths) == N
    t = max([t, *lengths])
    T, P, rows = sum(lengths) + spare_tokens, N + 3 if P is None else P, N + 2
    channels, widths = (2 * H + HV) * DIM, {"q": H * DIM, "k": H * DIM, "v": HV * DIM}
    if slots is None:
        slots = np.roll(rng.permutation(np.arange(1, P))[:N], 1)
    kind = np_dtype(dtype)
    problem: Problem = {}
    projection = np.full((T, channels + 8), POISON, kind)
    projection[:, :channels] = _normal(rng, T, channels)
    history = _columns(rng, (P,), channels, kind, channels_fastest)
    windows = _columns(None, (rows, t + spare_steps), channels, kind, channels_fastest)
    first = 0
    for letter, width in widths.items():
        part = slice(first, first + width)
        problem[f"x_{letter}"] = projection[:, part].reshape(1, T, width // DIM, DIM, copy=False)
        taps = 0.5 * _normal(rng, width, 4)
        taps[:, 3] += np.copysign(0.5, taps[:, 3])  # away from 0, so that a new input is another activation
        problem[f"w_{letter}"] = taps.astype(np_dtype(weight_dtype))
        if bias:
            problem[f"conv_bias_{letter}"] = (0.3 * _normal(rng, width)).astype(np_dtype(weight_dtype))
        problem[f"cs_{letter}"] = history[:, part]
        problem[f"intermediate_conv_{letter}"] = windows[:, :, part]
        first += width
    problem |= {
        "g": _rows(rng, T, (HV, DIM), np_dtype(gate_dtype or dtype)),
        "beta": _rows(rng, T, (HV,), np_dtype(gate_dtype or dtype)),
        "A_log": rng.uniform(-2, 1, HV).astype(np_dtype(parameter_dtype)) if A_log else None,
        "dt_bias": (0.5 * _normal(rng, HV * DIM)).astype(np_dtype(parameter_dtype)),
        "recurrent_state": make_state(rng, P, HV, DIM, DIM, 12),
        "ssm_state_indices": np.asarray(slots, index_dtype),
        "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(index_dtype),
        "intermediate_state_indices": rng.permutation(rows)[:N].astype(index_dtype),
        "lower_bound": lower_bound,
    }
    if ragged:
        problem["max_tokens_per_request"] = t
    problem |= scratch(mode, rows=rows, slots=P, steps=t + spare_steps, H=H, HV=HV, dtype=dtype)
    if ring_indices and mode == "rings":
        problem["ring_indices"] = rng.permutation(P)[:N].astype(index_dtype)
    if onorm:
        problem |= {
            "onorm_gate": _rows(rng, T, (HV, DIM), kind),
            "onorm_weight": (1 + 0.3 * _normal(rng, DIM)),
            "onorm_eps": 1e-5,
        }
    settle(problem, rng)
    return problem


def scratch(mode: str, *, rows: int, slots: int, steps: int, H: int, HV: int, dtype: str) -> Problem:
    """Snapshots or rings, full of POISON."""
    if mode == "snapshots":
        return {"intermediate_ssm": np.full((rows, steps, HV, DIM, DIM), POISON, np.float32)}
    return {
        "replayssm_rawv": np.full((slots, HV, steps, DIM), POISON, np_dtype(dtype)),
        "replayssm_rawk": np.full((slots, H, steps, DIM), POISON, np_dtype(dtype)),
        "replayssm_g": np.full((slots, HV, steps, DIM), POISON, np.float32),
        "replayssm_beta": np.full((slots, HV, steps), POISON, np.float32),
    }


def settle(problem: Problem, rng: np.random.Generator) -> None:
    """Draw again what makes an activation lie so near the middle of two numbers that fp32 may round it either way.

    One such element, rounded the other way than in float64, moves a state by 1e-4: more than all errors together.
    """
    kind = problem["x_q"].dtype
    if kind == np.float32:
        return
    bounds, slots = problem["cu_seqlens"].tolist(), problem["ssm_state_indices"].tolist()
    P = len(problem["recurrent_state"])
    for slot, start, end in zip(slots, bounds[:-1], bounds[1:], strict=True):
        if not 0 <= slot < P or not 0 <= start < end <= problem["x_q"].shape[1]:
            continue
        for letter in "qkv":
            x = problem[f"x_{letter}"][0, start:end]
            settle_tokens(
                x.reshape(len(x), -1, copy=False),
                problem[f"cs_{letter}"][slot],
                problem[f"w_{letter}"],
                problem.get(f"conv_bias_{letter}"),
                rng,
            )


def settle_tokens(x: Any, history: Any, taps: Any, bias: Any, rng: np.random.Generator) -> None:
    """The same for the tokens [t, channels] of one request, in place."""
    taps = taps.astype(np.float64).T
    offset = 0.0 if bias is None else bias.astype(np.float64)
    for _ in range(200):
        raw = np.concatenate([history.T.astype(np.float64), x.astype(np.float64)])
        terms = [taps[tap] * raw[tap : tap + len(x)] for tap in range(4)]
        y = sum(terms) + offset
        sigmoid = 1 / (1 + np.exp(-y))
        act, slope = y * sigmoid, np.abs(sigmoid * (1 + y * (1 - sigmoid)))
        error = 5e-7 * (slope * (sum(map(np.abs, terms)) + np.abs(offset)) + np.abs(act))
        unsettled = (act - error).astype(x.dtype) != (act + error).astype(x.dtype)
        if not unsettled.any():
            return
        unsettled &= unsettled.cumsum(0) == 1  # the first of a channel: a new one changes those behind it
        x[unsettled] = rng.standard_normal(unsettled.sum()).astype(x.dtype)
    raise AssertionError("cannot settle")


def commit_operands(problem: Problem, accept: Any, *, conv: bool = True) -> Problem:
    """Arguments of ``kda_commit`` after a verify of this problem."""
    names = ["ssm_state_indices", "recurrent_state", "intermediate_state_indices", "ring_indices"]
    names += ["intermediate_ssm", *(f"replayssm_{part}" for part in ("rawv", "rawk", "g", "beta"))]
    if conv:
        names += [f"{kind}_{letter}" for kind in ("cs", "intermediate_conv") for letter in "qkv"]
    operands = {name: problem[name] for name in names if problem.get(name) is not None}
    return operands | {"accept_lens": np.asarray(accept, np.int32)}


def _normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def _rows(rng: np.random.Generator, T: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """[1, T, *shape] with poison between the tokens."""
    width = int(np.prod(shape))
    wide = np.full((T, width + 4), POISON, dtype)
    wide[:, :width] = _normal(rng, T, width)
    return wide[:, :width].reshape(1, T, *shape, copy=False)


def _columns(rng: Any, front: tuple[int, ...], channels: int, dtype: Any, channels_fastest: bool) -> Any:
    """[*front, channels, 3], random or full of POISON."""
    shape = (*front, 3, channels) if channels_fastest else (*front, channels, 3)
    made = np.full(shape, POISON, dtype) if rng is None else _normal(rng, *shape).astype(dtype)
    return made.swapaxes(-1, -2) if channels_fastest else made
