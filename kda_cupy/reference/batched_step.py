# SPDX-License-Identifier: Apache-2.0
"""The NumPy backend of a whole decode step, and of the convolution alone: float32, all heads of several rows at once.

It keeps the rules of the CUDA backend. The convolution rounds to the activation dtype before anything uses it, and what
follows is the code of the packed decodes, so the two operations one after the other have the bits of the fused step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kda_cupy.reference.batched import advance, chunks, log_decay, sigmoid

OnBadSlot = Callable[[int, int], None]


class Step(NamedTuple):
    """The arrays of a decode step, q, k and v apart; an optional one that is absent is None."""

    x_q: Any  # [B, H, K]: raw projections
    x_k: Any
    x_v: Any  # [B, HV, V]
    w_q: Any  # [H*K, 4]
    w_k: Any
    w_v: Any
    conv_bias_q: Any  # [H*K]
    conv_bias_k: Any
    conv_bias_v: Any
    cs_q: Any  # [P, H*K, 3]: history, written
    cs_k: Any
    cs_v: Any
    g: Any  # [B, HV, K], or [B, HV] for one gate per head
    beta: Any  # [B, HV]
    A_log: Any
    dt_bias: Any
    state: Any  # [P, HV, V, K], written
    indices: Any  # [B]
    onorm_gate: Any  # [B, HV, V]
    onorm_weight: Any  # [V]
    out: Any  # [B, HV, V], written


@np.errstate(all="ignore")  # overflow to inf is an answer, as it is on a GPU
def decode_step(
    arrays: Step,
    *,
    scale: float,
    lower_bound: float | None,
    normalize_qk: bool,
    beta_scale: float,
    onorm_eps: float,
    onorm_silu: bool,
    null_index: int,
    on_bad_slot: OnBadSlot,
) -> None:
    """Both decode steps, on checked NumPy operands. Writes ``state``, ``cs_*`` and ``out``."""
    slots, HV, V, K = arrays.state.shape
    live = live_rows(arrays.indices, slots, null_index, on_bad_slot)
    arrays.out[...] = 0
    A_log = None if arrays.A_log is None else arrays.A_log.reshape(HV).astype(np.float32)
    dt_bias = arrays.dt_bias.reshape(HV, -1).astype(np.float32)
    for rows in chunks(live, HV * V * K):
        n, now = len(rows), arrays.indices[rows]
        acts = []
        for x, taps, bias, history in zip(arrays[0:3], arrays[3:6], arrays[6:9], arrays[9:12], strict=True):
            act, windows = convolve(x[rows].reshape(n, 1, -1), history[now], taps, bias, silu=True)
            history[now] = windows[:, 0]
            acts.append(act.reshape(n, -1, x.shape[-1]).astype(np.float32))
        raw = arrays.g[rows].astype(np.float32).reshape(n, HV, -1)
        o, arrays.state[now] = advance(
            arrays.state[now],
            q=acts[0],
            k=acts[1],
            v=acts[2],
            g=log_decay(raw, dt_bias, A_log, lower_bound),
            beta=sigmoid(arrays.beta[rows].astype(np.float32)) * np.float32(beta_scale),
            scale=scale,
            normalize_qk=normalize_qk,
        )
        if arrays.onorm_gate is not None:
            gate = arrays.onorm_gate[rows].astype(np.float32)
            mean = (o * o).sum(-1, keepdims=True) / np.float32(V)
            factor = arrays.onorm_weight.astype(np.float32) * sigmoid(gate)
            o = o / np.sqrt(mean + np.float32(onorm_eps)) * (factor * gate if onorm_silu else factor)
        arrays.out[rows] = o.astype(arrays.out.dtype)


def live_rows(indices: Any, slots: int, null_index: int, on_bad_slot: OnBadSlot) -> Any:
    """Rows that are neither padding nor past the pool; the latter are reported."""
    for row in np.flatnonzero(indices >= slots):
        on_bad_slot(int(row), int(indices[row]))
    return np.flatnonzero((indices > null_index) & (indices < slots))


def convolve(x: Any, history: Any, taps: Any, bias: Any, *, silu: bool) -> tuple[Any, Any]:
    """T tokens [n, t, channels] after ``history`` [n, channels, width - 1]; ``taps`` [channels, width].

    Returns what the convolution gives, rounded to the dtype of x, and the window after each token
    [n, t, channels, width - 1]: the raw inputs that the next token sees.
    """
    t, width = x.shape[1], taps.shape[1]
    raw = np.concatenate([history.swapaxes(1, 2), x], axis=1)
    w = taps.astype(np.float32).T
    y = np.zeros(x.shape, np.float32) if bias is None else np.broadcast_to(bias.astype(np.float32), x.shape)
    for tap in range(width):
        y = y + w[tap] * raw[:, tap : tap + t].astype(np.float32)
    windows = np.stack([raw[:, tap + 1 : tap + 1 + t] for tap in range(width - 1)], axis=-1)
    return (y * sigmoid(y) if silu else y).astype(x.dtype), windows


@np.errstate(all="ignore")
def conv_update(
    x: tuple[Any, ...],
    conv_state: tuple[Any, ...],
    weight: tuple[Any, ...],
    bias: tuple[Any, ...],
    windows: tuple[Any, ...],
    indices: Any,
    window_rows: Any,
    out: Any,
    *,
    silu: bool,
    null_index: int,
    on_fault: Callable[[str, int, int, int], None],
) -> None:
    """causal_conv1d_update on checked NumPy operands, a piece of the channels after the other.

    Writes ``out``, and ``windows`` or ``conv_state``. ``on_fault`` is told operand, row, value and limit.
    """
    slots = len(conv_state[0])
    live = live_rows(
        indices, slots, null_index, lambda row, slot: on_fault("conv_state_indices", row, slot, slots)
    )
    if windows:
        limit, wanted = len(windows[0]), window_rows[live]
        wrong = (wanted < 0) | (wanted >= limit)
        for row in live[wrong]:
            on_fault("intermediate_state_indices", int(row), int(window_rows[row]), limit)
        live = live[~wrong]
    out[...] = 0
    now, first = indices[live], 0
    for number, (piece, history, taps) in enumerate(zip(x, conv_state, weight, strict=True)):
        C = piece.shape[1]
        tokens = (piece if piece.ndim == 3 else piece[:, :, None])[live].swapaxes(1, 2)
        act, after = convolve(tokens, history[now], taps, bias[number] if bias else None, silu=silu)
        (out if out.ndim == 3 else out[:, :, None])[live, first : first + C] = act.swapaxes(1, 2)
        if windows:
            windows[number][window_rows[live], : after.shape[1]] = after
        elif after.shape[1]:
            history[now] = after[:, -1]
        first += C
