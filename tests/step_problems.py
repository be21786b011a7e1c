# SPDX-License-Identifier: Apache-2.0
"""Operands for the whole decode steps: random, never zero, reproducible, with poison between rows and slots.

>>> problem = make_step("kda", B=3, onorm=True)
>>> out = kda_decode_step(**to(problem, cupy))
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mtp_problems import DIM, make_mtp, settle_tokens
from problems import POISON, Problem

SCRATCH = ("cu_seqlens", "intermediate_state_indices", "intermediate_ssm")


def make_step(
    op: str = "kda", B: int = 5, H: int = 1, HV: int = 2, dtype: str = "bfloat16", **options: Any
) -> Problem:
    """Arguments of ``kda_decode_step`` (op "kda") or ``gdn_decode_step`` ("gdn") as NumPy arrays.

    options: those of make_mtp that say anything about one token.
    """
    mtp = make_mtp(N=B, t=1, H=H, HV=HV, dtype=dtype, mode="snapshots", **options)
    problem = {
        name: value
        for name, value in mtp.items()
        if name not in SCRATCH and not name.startswith("intermediate_conv")
    }
    return problem if op == "kda" else _packed(problem, H, HV)


def _packed(problem: Problem, H: int, HV: int) -> Problem:
    """The same for GDN: q, k and v side by side in each of projection, weight and history; one gate a head."""
    B, P = problem["x_q"].shape[1], len(problem["recurrent_state"])
    channels = (2 * H + HV) * DIM
    kind = problem["x_q"].dtype
    rows = np.full((B, channels + 8), POISON, kind)
    rows[:, :channels] = np.concatenate(
        [problem[f"x_{x}"].reshape(B, problem[f"w_{x}"].shape[0]) for x in "qkv"], axis=1
    )
    channel_stride, tap_stride = problem["cs_q"].strides[1:]
    shape = (P, 3, channels) if channel_stride < tap_stride else (P, channels, 3)
    history = np.empty(shape, kind)
    history = history.swapaxes(1, 2) if channel_stride < tap_stride else history
    history[...] = np.concatenate([problem[f"cs_{x}"] for x in "qkv"], axis=1)
    packed: Problem = {
        "mixed_qkv": rows[:, :channels],
        "a": np.ascontiguousarray(problem["g"][0, :, :, 0]),
        "b": np.ascontiguousarray(problem["beta"][0]),
        "conv_weight": np.concatenate([problem[f"w_{x}"] for x in "qkv"]),
        "conv_state": history,
        "A_log": problem["A_log"],
        "dt_bias": np.ascontiguousarray(problem["dt_bias"].reshape(HV, DIM)[:, 0]),
        "initial_state": problem["recurrent_state"],
        "ssm_state_indices": problem["ssm_state_indices"],
        "lower_bound": problem["lower_bound"],
    }
    if "conv_bias_q" in problem:
        packed["conv_bias"] = np.concatenate([problem[f"conv_bias_{x}"] for x in "qkv"])
    if "onorm_gate" in problem:
        packed |= {name: problem[name] for name in ("onorm_weight", "onorm_eps")}
        packed["onorm_gate"] = problem["onorm_gate"][0]
    return packed


def out_of(problem: Problem) -> Any:
    """An array that ``out`` can be, full of NaN."""
    if "x_q" in problem:
        return np.full(
            (1, problem["x_q"].shape[1], problem["x_v"].shape[2], DIM), np.nan, problem["x_q"].dtype
        )
    B, HV = problem["b"].shape
    return np.full((B, 1, HV, DIM), np.nan, problem["mixed_qkv"].dtype)


def state_of(problem: Problem) -> Any:
    """The pool."""
    return problem["recurrent_state" if "x_q" in problem else "initial_state"]


def histories_of(problem: Problem) -> list[Any]:
    """The conv histories of q, k and v, as views."""
    if "x_q" in problem:
        return [problem[f"cs_{x}"] for x in "qkv"]
    qk = (problem["mixed_qkv"].shape[1] - problem["b"].shape[1] * DIM) // 2
    history = problem["conv_state"]
    return [history[:, :qk], history[:, qk : 2 * qk], history[:, 2 * qk :]]


def next_token(problem: Problem, histories: list[Any], rng: np.random.Generator) -> Problem:
    """New projections and gates for the same rows: {name: array}. ``histories`` are those they will meet.

    Settled as in mtp_problems, or one rounding would stand for an error.
    """
    kind = problem["x_q" if "x_q" in problem else "mixed_qkv"].dtype
    slots = problem["ssm_state_indices"]
    names = ("x_q", "x_k", "x_v") if "x_q" in problem else ()
    B = len(slots)
    widths = [each.shape[1] for each in histories]
    parts = [rng.standard_normal((B, width)).astype(kind) for width in widths]
    if kind != np.float32:
        qkv = list(zip("qkv", np.cumsum([0, *widths[:-1]]), widths, strict=True))
        for x, history, (letter, first, width) in zip(parts, histories, qkv, strict=True):
            channels = slice(first, first + width)
            taps = problem[f"w_{letter}"] if names else problem["conv_weight"][channels]
            bias = problem.get(f"conv_bias_{letter}") if names else problem.get("conv_bias")
            bias = bias[channels] if bias is not None and not names else bias
            for row, slot in enumerate(slots):
                if 0 <= slot < len(history):
                    settle_tokens(x[row : row + 1], history[slot], taps, bias, rng)
    if names:
        fresh = {name: part.reshape(problem[name].shape) for name, part in zip(names, parts, strict=True)}
        others = ("g", "beta", "onorm_gate")
    else:
        fresh, others = {"mixed_qkv": np.concatenate(parts, axis=1)}, ("a", "b", "onorm_gate")
    for name in others:
        if name in problem:
            fresh[name] = rng.standard_normal(problem[name].shape).astype(problem[name].dtype)
    return fresh
