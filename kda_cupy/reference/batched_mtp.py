# SPDX-License-Identifier: Apache-2.0
"""The NumPy backend of the speculative operations: verify and commit in float32, one request at a time, all heads.

It keeps the rules of the CUDA backend: the persistent state is only read by a verify, padding is inert, activations
are rounded to their dtype before anything uses them, an earlier token never sees a later one, and a request has the
same bits whatever the batch around it. Snapshots and rings come out of the same loop, so both modes agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kda_cupy.reference.batched import l2_normalized, log_decay, sigmoid

OnFault = Callable[[str, int, int, int], None]
"""Called with operand, row, value and limit of the first index of a row that must not be followed."""


class Verify(NamedTuple):
    """The arrays of a verify, as the operation takes them; an optional one that is absent is None."""

    x_q: Any
    x_k: Any
    x_v: Any
    w_q: Any
    w_k: Any
    w_v: Any
    conv_bias_q: Any
    conv_bias_k: Any
    conv_bias_v: Any
    cs_q: Any
    cs_k: Any
    cs_v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    recurrent_state: Any
    ssm_state_indices: Any
    cu_seqlens: Any
    intermediate_ssm: Any
    intermediate_state_indices: Any
    intermediate_conv_q: Any
    intermediate_conv_k: Any
    intermediate_conv_v: Any
    replayssm_rawv: Any
    replayssm_rawk: Any
    replayssm_g: Any
    replayssm_beta: Any
    ring_indices: Any
    onorm_gate: Any
    onorm_weight: Any
    out: Any


class _Place(NamedTuple):
    """Where a live request's things lie."""

    slot: int
    tokens: slice
    scratch: int
    ring: int


def decode_mtp(
    arrays: Verify,
    *,
    max_tokens: int,
    scratch_rows: int,
    scale: float,
    lower_bound: float | None,
    normalize_qk: bool,
    beta_scale: float,
    onorm_eps: float,
    null_index: int,
    on_fault: OnFault,
) -> None:
    """kda_decode_mtp on checked NumPy operands. Writes ``out``, windows, and snapshots or rings."""
    arrays.out[...] = 0
    for row in range(len(arrays.ssm_state_indices)):
        place = _locate(arrays, row, max_tokens, scratch_rows, null_index, on_fault)
        if place is not None:
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # NaN and inf stay with their request, silently
                _verify_request(
                    arrays, place, scale, lower_bound, normalize_qk, np.float32(beta_scale), onorm_eps
                )


def _locate(
    arrays: Verify, row: int, max_tokens: int, scratch_rows: int, null_index: int, on_fault: OnFault
) -> _Place | None:
    """None for padding, for an empty request, and for one with an index that must not be followed."""
    slot = int(arrays.ssm_state_indices[row])
    if slot <= null_index:
        return None
    start, end = int(arrays.cu_seqlens[row]), int(arrays.cu_seqlens[row + 1])
    if not (0 <= end - start <= max_tokens and start >= 0 and end <= arrays.x_q.shape[1]):
        on_fault("cu_seqlens", row, end - start, max_tokens)
        return None
    if start == end:
        return None
    scratch = int(arrays.intermediate_state_indices[row])
    rings = arrays.replayssm_rawv is not None
    ring = slot if arrays.ring_indices is None else int(arrays.ring_indices[row])
    checks = [
        ("ssm_state_indices", slot, len(arrays.recurrent_state)),
        ("intermediate_state_indices", scratch, scratch_rows),
    ]
    if rings and arrays.ring_indices is not None:
        checks.append(("ring_indices", ring, len(arrays.replayssm_rawv)))
    for operand, value, limit in checks:
        if not 0 <= value < limit:
            on_fault(operand, row, value, limit)
            return None
    return _Place(slot, slice(start, end), scratch, ring)


def _verify_request(
    arrays: Verify,
    place: _Place,
    scale: float,
    lower_bound: float | None,
    normalize_qk: bool,
    beta_scale: Any,
    onorm_eps: float,
) -> None:
    _, HV, V, K = arrays.recurrent_state.shape
    slot, tokens, scratch, ring = place
    t = tokens.stop - tokens.start
    acts = []
    for x, taps, bias, history, windows in zip(
        arrays[0:3],
        arrays[3:6],
        arrays[6:9],
        arrays[9:12],
        (arrays.intermediate_conv_q, arrays.intermediate_conv_k, arrays.intermediate_conv_v),
        strict=True,
    ):
        act, window = _convolved(x[0, tokens].reshape(t, -1), taps, bias, history[slot])
        windows[scratch, :t] = window
        acts.append(act)
    rawk, rawv = acts[1].reshape(t, -1, K), acts[2].reshape(t, HV, V)
    q, k, v = acts[0].reshape(t, -1, K).astype(np.float32), rawk.astype(np.float32), rawv.astype(np.float32)
    if normalize_qk:
        q, k = l2_normalized(q), l2_normalized(k)
    heads = np.arange(HV) // (HV // k.shape[1])
    q = q * np.float32(scale)
    A_log = None if arrays.A_log is None else arrays.A_log.reshape(HV).astype(np.float32)
    dt_bias = arrays.dt_bias.reshape(HV, K).astype(np.float32)
    g = log_decay(arrays.g[0, tokens].astype(np.float32), dt_bias, A_log, lower_bound)
    beta = sigmoid(arrays.beta[0, tokens].astype(np.float32)) * beta_scale
    if arrays.replayssm_rawv is not None:
        steps = min(t, arrays.replayssm_rawv.shape[2])
        arrays.replayssm_rawv[ring, :, :steps] = rawv[:steps].swapaxes(0, 1)
        arrays.replayssm_rawk[ring, :, :steps] = rawk[:steps].swapaxes(0, 1)
        arrays.replayssm_g[ring, :, :steps] = g[:steps].swapaxes(0, 1)
        arrays.replayssm_beta[ring, :, :steps] = beta[:steps].T

    S = arrays.recurrent_state[slot].copy()
    for j in range(t):
        S = _updated(S, k[j, heads], v[j], g[j], beta[j])
        if arrays.intermediate_ssm is not None:
            arrays.intermediate_ssm[scratch, j] = S
        o = (S * q[j, heads, None, :]).sum(-1)
        if arrays.onorm_gate is not None:
            mean = (o * o).sum(-1, keepdims=True) / np.float32(V) + np.float32(onorm_eps)
            gate = sigmoid(arrays.onorm_gate[0, tokens.start + j].astype(np.float32))
            o = o / np.sqrt(mean) * arrays.onorm_weight.astype(np.float32) * gate
        arrays.out[0, tokens.start + j] = o.astype(arrays.out.dtype)


def _convolved(x: Any, taps: Any, bias: Any, history: Any) -> tuple[Any, Any]:
    """Activations [t, channels], rounded to the dtype of x, and the raw inputs before and after each token."""
    t = len(x)
    raw = np.concatenate([history.T.astype(x.dtype), x])
    w = taps.astype(np.float32).T
    y = np.zeros(x.shape, np.float32) if bias is None else np.broadcast_to(bias.astype(np.float32), x.shape)
    for tap in range(4):
        y = y + w[tap] * raw[tap : tap + t].astype(np.float32)
    windows = np.stack([raw[tap + 1 : tap + 1 + t] for tap in range(3)], axis=-1)
    return (y * sigmoid(y)).astype(x.dtype), windows


def _updated(S: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
    """The state of all heads [HV, V, K] after one token."""
    S = S * np.exp(g)[:, None, :]
    u = beta[:, None] * (v - (S * k[:, None, :]).sum(-1))
    S += u[..., None] * k[:, None, :]
    return S


class Commit(NamedTuple):
    """The arrays of a commit; all but the vectors carry a leading layer axis, those that are absent are None."""

    accept_lens: Any
    ssm_state_indices: Any
    intermediate_state_indices: Any
    ring_indices: Any
    track_indices: Any
    track_steps: Any
    recurrent_state: Any
    intermediate_ssm: Any
    replayssm_rawv: Any
    replayssm_rawk: Any
    replayssm_g: Any
    replayssm_beta: Any
    cs_q: Any
    cs_k: Any
    cs_v: Any
    intermediate_conv_q: Any
    intermediate_conv_k: Any
    intermediate_conv_v: Any


class _Move(NamedTuple):
    """What one row makes permanent, and where from."""

    accepted: int
    slot: int
    scratch: int
    ring: int
    track_slot: int
    track_step: int
    """-1: no tracking."""


def commit(
    arrays: Commit,
    *,
    max_tokens: int,
    scratch_rows: int,
    normalize_k: bool,
    null_index: int,
    on_fault: OnFault,
) -> None:
    """kda_commit on checked NumPy operands. Writes ``recurrent_state`` and ``cs_*``."""
    for row in range(len(arrays.accept_lens)):
        move = _plan_move(arrays, row, max_tokens, scratch_rows, null_index, on_fault)
        if move is None:
            continue
        for layer in range(len(arrays.recurrent_state)):
            with np.errstate(over="ignore", invalid="ignore"):
                _commit_layer(arrays, layer, move, normalize_k)


def _plan_move(
    arrays: Commit, row: int, max_tokens: int, scratch_rows: int, null_index: int, on_fault: OnFault
) -> _Move | None:
    slot, accepted = int(arrays.ssm_state_indices[row]), int(arrays.accept_lens[row])
    slots = arrays.recurrent_state.shape[1]
    if slot <= null_index:
        return None
    scratch = ring = 0
    if slot >= slots:
        on_fault("ssm_state_indices", row, slot, slots)
        return None
    if not 0 <= accepted <= max_tokens:
        on_fault("accept_lens", row, accepted, max_tokens)
        return None
    if accepted == 0:
        return None
    checks = []
    if scratch_rows:
        scratch = int(arrays.intermediate_state_indices[row])
        checks.append(("intermediate_state_indices", scratch, scratch_rows))
    if arrays.replayssm_rawv is not None:
        ring = slot if arrays.ring_indices is None else int(arrays.ring_indices[row])
        if arrays.ring_indices is not None:
            checks.append(("ring_indices", ring, arrays.replayssm_rawv.shape[1]))
    track_slot, track_step = 0, -1
    if arrays.track_indices is not None:
        track_slot, track_step = int(arrays.track_indices[row]), int(arrays.track_steps[row])
        if track_step < 0 or track_slot <= null_index:
            track_step = -1
        else:
            checks += [("track_indices", track_slot, slots), ("track_steps", track_step, accepted)]
    for operand, value, limit in checks:
        if not 0 <= value < limit:
            on_fault(operand, row, value, limit)
            return None
    return _Move(accepted, slot, scratch, ring, track_slot, track_step)


def _commit_layer(arrays: Commit, layer: int, move: _Move, normalize_k: bool) -> None:
    state = arrays.recurrent_state[layer]
    if arrays.intermediate_ssm is not None:
        snapshots = arrays.intermediate_ssm[layer, move.scratch]
        state[move.slot] = snapshots[move.accepted - 1]
        if move.track_step >= 0:
            state[move.track_slot] = snapshots[move.track_step]
    else:
        _replay(arrays, layer, move, state, normalize_k)
    if arrays.cs_q is None:
        return
    for history, windows in zip(arrays[12:15], arrays[15:18], strict=True):
        history[layer, move.slot] = windows[layer, move.scratch, move.accepted - 1]
        if move.track_step >= 0:
            history[layer, move.track_slot] = windows[layer, move.scratch, move.track_step]


def _replay(arrays: Commit, layer: int, move: _Move, state: Any, normalize_k: bool) -> None:
    v, k, g, beta = (ring[layer, move.ring].astype(np.float32) for ring in arrays[8:12])
    if normalize_k:
        k = l2_normalized(k)
    heads = np.arange(len(v)) // (len(v) // len(k))
    S, tracked = state[move.slot], None
    for j in range(move.accepted):
        S = _updated(S, k[heads, j], v[:, j], g[:, j], beta[:, j])
        if j == move.track_step:
            tracked = S.copy()
    state[move.slot] = S
    if tracked is not None:
        state[move.track_slot] = tracked
