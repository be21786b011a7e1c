# SPDX-License-Identifier: Apache-2.0
"""The float64 truth: one token of one head at a time, one formula a line. Slow, and meant to be read.

Everything fast in this package is compared with this. It takes values, not layouts: float64 arrays of one head.
``S`` is [V, K]: rows are values, columns are keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

L2_EPSILON = 1e-6


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    # The two halves keep exp from overflowing, so that the answer is exact at both ends.
    x = np.asarray(x, np.float64)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0 / (1.0 + small), small / (1.0 + small))


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), which is x above 20 by definition here."""
    x = np.asarray(x, np.float64)
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def log_decay(raw: Array, dt_bias: Array, A_log: float | None, lower_bound: float | None) -> Array:
    """g, per key (KDA) or for the head (GDN)."""
    x = np.asarray(raw, np.float64) + dt_bias
    rate = 1.0 if A_log is None else np.minimum(np.exp(np.float64(A_log)), np.finfo(np.float64).max)
    if lower_bound is not None:
        return lower_bound * sigmoid(rate * x)
    return -rate * softplus(x)


def l2_normalized(x: Array) -> Array:
    """Divide by the norm, the epsilon added to the sum of squares."""
    normalized: Array = x / np.sqrt(np.sum(x * x) + L2_EPSILON)
    return normalized


class Token(NamedTuple):
    """What one head sees of one token, as float64."""

    q: Array  # [K]
    k: Array  # [K]
    v: Array  # [V]
    g: Array  # [K] or []: log decay
    beta: float


def step(S: Array, token: Token) -> tuple[Array, Array]:
    """Returns the state after the token [V, K] and the output [V]."""
    S = S * np.exp(token.g)
    u = token.beta * (token.v - S @ token.k)
    S = S + np.outer(u, token.k)
    o = S @ token.q
    return S, o


def packed_decode(
    mixed_qkv: Any,
    a: Any,
    b: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    ssm_state_indices: Any,
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    null_index: int = -1,
) -> tuple[Array, Array]:
    """Both packed decodes on NumPy operands of any float dtype; ``a`` as wide as ``b`` means GDN.

    Returns the outputs [B, 1, HV, V] and a new state pool [P, HV, V, K], both float64. Nothing is written.
    """
    state = np.array(initial_state, np.float64)
    slots, HV, V, K = state.shape
    B, width = mixed_qkv.shape
    H = (width - HV * V) // (2 * K)
    rows = np.asarray(mixed_qkv, np.float64)
    raw_gate = np.asarray(a, np.float64).reshape(B, HV, -1)
    raw_beta = np.asarray(b, np.float64)
    bias = np.asarray(dt_bias, np.float64).reshape(HV, -1)
    rates = [None] * HV if A_log is None else [float(x) for x in np.asarray(A_log, np.float64).reshape(HV)]
    out = np.zeros((B, 1, HV, V))
    for row, slot in enumerate(np.asarray(ssm_state_indices).tolist()):
        if slot < 0 or slot <= null_index or slot >= slots:
            continue
        for head in range(HV):
            key_head = head // (HV // H)
            q = rows[row, key_head * K : (key_head + 1) * K]
            k = rows[row, H * K + key_head * K : H * K + (key_head + 1) * K]
            v = rows[row, 2 * H * K + head * V : 2 * H * K + (head + 1) * V]
            if use_qk_l2norm_in_kernel:
                q, k = l2_normalized(q), l2_normalized(k)
            token = Token(
                q=q * (K**-0.5 if scale is None else scale),
                k=k,
                v=v,
                g=log_decay(raw_gate[row, head], bias[head], rates[head], lower_bound),
                beta=float(sigmoid(raw_beta[row, head])) * (2.0 if allow_neg_eigval else 1.0),
            )
            state[slot, head], out[row, 0, head] = step(state[slot, head], token)
    return out, state


def conv(
    history: Array, x: Array, taps: Array, bias: Array | float, activation: Any, *, silu: bool = True
) -> tuple[Array, Array]:
    """One token of the causal convolution, per channel, and its SiLU.

    ``history`` [channels, 3] holds raw inputs, oldest first; ``x`` [channels]; ``taps`` [channels, 4];
    or fewer of both.
    Returns the activation [channels], rounded to the dtype ``activation``, and the history after the token.
    """
    window = np.column_stack([history, x])
    y = np.sum(window * taps, axis=1) + bias
    act = y * sigmoid(y) if silu else y
    return act.astype(activation).astype(np.float64), window[:, 1:]


def output_norm(o: Array, gate: Array, weight: Array, eps: float, *, silu: bool = False) -> Array:
    """One token of one head: RMS norm over V, then the gate: its sigmoid (KDA) or SiLU (GDN)."""
    opening = gate * sigmoid(gate) if silu else sigmoid(gate)
    normalized: Array = o / np.sqrt(np.mean(o * o) + eps) * weight * opening
    return normalized


class Convolution(NamedTuple):
    """The convolution of q, k or v for one request, as float64."""

    x: Array  # [t, channels]: raw projections
    history: Array  # [channels, 3]
    taps: Array  # [channels, 4]
    bias: Array | float  # [channels], or 0


class Request(NamedTuple):
    """What the verify of one request starts from, as float64."""

    q: Convolution
    k: Convolution
    v: Convolution
    raw_gate: Array  # [t, HV, K], or [t, HV, 1]: one gate a head
    raw_beta: Array  # [t, HV]
    A_log: Array | None  # [HV]
    dt_bias: Array  # [HV, K or 1]
    state: Array  # [HV, V, K]
    norm_gate: Array | None  # [t, HV, V]
    norm_weight: Array | None  # [V]


class Verified(NamedTuple):
    """What the verify of one request says, token by token."""

    out: Array  # [t, HV, V]
    states: Array  # [t, HV, V, K]: after each token
    windows: tuple[Array, Array, Array]  # [t, channels, 3] of q, k, v: after each token
    rawv: Array  # [HV, t, V]
    rawk: Array  # [H, t, K]
    g: Array  # [HV, t, K]: log decay
    beta: Array  # [HV, t]


def verify(
    request: Request,
    *,
    activation: Any,
    scale: float | None = None,
    lower_bound: float | None = None,
    onorm_eps: float = 0.0,
    onorm_silu: bool = False,
    normalize_qk: bool = True,
    beta_scale: float = 1.0,
) -> Verified:
    """Decode t tokens one after another from an unchanged state and history, and tell what came after each."""
    HV, V, K = request.state.shape
    tokens, H = len(request.q.x), request.k.x.shape[1] // K
    acts, windows = zip(*[_convolved(each, activation) for each in request[:3]], strict=True)
    q, k, v = acts[0].reshape(tokens, H, K), acts[1].reshape(tokens, H, K), acts[2].reshape(tokens, HV, V)
    result = Verified(
        out=np.zeros((tokens, HV, V)),
        states=np.zeros((tokens, HV, V, K)),
        windows=windows,
        rawv=v.transpose(1, 0, 2),
        rawk=k.transpose(1, 0, 2),
        g=np.zeros((HV, tokens, K)),
        beta=beta_scale * sigmoid(request.raw_beta).T,
    )
    if normalize_qk:
        q, k = (np.array([[l2_normalized(x) for x in row] for row in each]) for each in (q, k))
    for head in range(HV):
        S = request.state[head]
        A_log = None if request.A_log is None else float(request.A_log[head])
        for j in range(tokens):
            token = Token(
                q=q[j, head // (HV // H)] * (K**-0.5 if scale is None else scale),
                k=k[j, head // (HV // H)],
                v=v[j, head],
                g=log_decay(request.raw_gate[j, head], request.dt_bias[head], A_log, lower_bound),
                beta=float(result.beta[head, j]),
            )
            S, o = step(S, token)
            if request.norm_gate is not None and request.norm_weight is not None:
                gate = request.norm_gate[j, head]
                o = output_norm(o, gate, request.norm_weight, onorm_eps, silu=onorm_silu)
            result.out[j, head], result.states[j, head], result.g[head, j] = o, S, token.g
    return result


def decode_mtp(operands: Mapping[str, Any]) -> list[Verified | None]:
    """kda_decode_mtp on NumPy operands by name, one result a request; None for padding and what is out of range.

    Nothing is written, and what the operation writes is not looked at.
    """
    state, bounds = operands["recurrent_state"], np.asarray(operands["cu_seqlens"]).tolist()
    slots = len(state)
    T, N = operands["x_q"].shape[1], len(bounds) - 1
    longest = operands.get("max_tokens_per_request") or T // max(N, 1)
    null_index = operands.get("null_index", -1)
    results: list[Verified | None] = []
    for slot, start, end in zip(operands["ssm_state_indices"].tolist(), bounds[:-1], bounds[1:], strict=True):
        live = max(null_index, -1) < slot < slots and 0 <= end - start <= longest and start >= 0 and end <= T
        if not live:
            results.append(None)
            continue

        request = _request(operands, slot, slice(start, end))
        results.append(
            verify(
                request,
                activation=operands["x_q"].dtype,
                scale=operands.get("scale"),
                lower_bound=operands.get("lower_bound"),
                onorm_eps=operands.get("onorm_eps") or 0.0,
                normalize_qk=operands.get("use_qk_l2norm_in_kernel", True),
                beta_scale=2.0 if operands.get("allow_neg_eigval") else 1.0,
            )
        )
    return results


def kda_decode_step(operands: Mapping[str, Any]) -> list[Verified | None]:
    """kda_decode_step on NumPy operands by name, one result a row: a verify of one token each, all of it kept.

    ``states[0]`` and ``windows`` are the state and the history after the token. Nothing is written.
    """
    return decode_mtp({**operands, "cu_seqlens": np.arange(operands["x_q"].shape[1] + 1)})


def gdn_decode_step(operands: Mapping[str, Any]) -> list[Verified | None]:
    """gdn_decode_step on NumPy operands by name, one result a row, as in :func:`kda_decode_step`."""

    def values(name: str) -> Array | None:
        value = operands.get(name)
        return None if value is None else np.asarray(value, np.float64)

    rows, state = np.asarray(operands["mixed_qkv"], np.float64), operands["initial_state"]
    slots, HV, V, _ = state.shape
    qk = (rows.shape[1] - HV * V) // 2
    bias, A_log = values("conv_bias"), values("A_log")
    results: list[Verified | None] = []
    for row, slot in enumerate(np.asarray(operands["ssm_state_indices"]).tolist()):
        if slot < 0 or slot <= operands.get("null_index", -1) or slot >= slots:
            results.append(None)
            continue
        q, k, v = (
            Convolution(
                x=rows[row : row + 1, channels],
                history=np.asarray(operands["conv_state"][slot, channels], np.float64),
                taps=np.asarray(operands["conv_weight"][channels], np.float64),
                bias=0.0 if bias is None else bias[channels],
            )
            for channels in (slice(0, qk), slice(qk, 2 * qk), slice(2 * qk, None))
        )
        gate = values("onorm_gate")
        request = Request(
            q=q,
            k=k,
            v=v,
            raw_gate=np.asarray(operands["a"][row], np.float64).reshape(1, HV, 1),
            raw_beta=np.asarray(operands["b"][row : row + 1], np.float64),
            A_log=None if A_log is None else A_log.reshape(HV),
            dt_bias=np.asarray(operands["dt_bias"], np.float64).reshape(HV, 1),
            state=np.asarray(state[slot], np.float64),
            norm_gate=None if gate is None else gate[row : row + 1],
            norm_weight=values("onorm_weight"),
        )
        results.append(
            verify(
                request,
                activation=operands["mixed_qkv"].dtype,
                scale=operands.get("scale"),
                lower_bound=operands.get("lower_bound"),
                onorm_eps=operands.get("onorm_eps") or 0.0,
                onorm_silu=True,
                normalize_qk=operands.get("use_qk_l2norm_in_kernel", True),
                beta_scale=2.0 if operands.get("allow_neg_eigval") else 1.0,
            )
        )
    return results


def _request(operands: Mapping[str, Any], slot: int, rows: slice) -> Request:
    """The values of one request, its tokens being ``rows``."""

    def values(name: str) -> Array | None:
        value = operands.get(name)
        return None if value is None else np.asarray(value, np.float64)

    def tokens(name: str) -> Array:
        return np.asarray(operands[name][0, rows], np.float64)

    def convolution(letter: str) -> Convolution:
        x, bias = tokens(f"x_{letter}"), values(f"conv_bias_{letter}")
        return Convolution(
            x=x.reshape(len(x), math.prod(x.shape[1:])),
            history=np.asarray(operands[f"cs_{letter}"][slot], np.float64),
            taps=np.asarray(operands[f"w_{letter}"], np.float64),
            bias=0.0 if bias is None else bias,
        )

    _, HV, _, K = operands["recurrent_state"].shape
    A_log = values("A_log")
    return Request(
        q=convolution("q"),
        k=convolution("k"),
        v=convolution("v"),
        raw_gate=tokens("g"),
        raw_beta=tokens("beta"),
        A_log=None if A_log is None else A_log.reshape(HV),
        dt_bias=np.asarray(operands["dt_bias"], np.float64).reshape(HV, K),
        state=np.asarray(operands["recurrent_state"][slot], np.float64),
        norm_gate=None if operands.get("onorm_gate") is None else tokens("onorm_gate"),
        norm_weight=values("onorm_weight"),
    )


def _convolved(each: Convolution, activation: Any) -> tuple[Array, Array]:
    """Activations [t, channels] and the windows after each token [t, channels, 3]."""
    acts, windows, history = np.zeros_like(each.x), np.zeros((*each.x.shape, 3)), each.history
    for j, x in enumerate(each.x):
        acts[j], history = conv(history, x, each.taps, each.bias, activation)
        windows[j] = history
    return acts, windows


def replay(
    state: Array,
    rawv: Array,
    rawk: Array,
    g: Array,
    beta: Array,
    accepted: int,
    *,
    normalize_k: bool = True,
) -> Array:
    """The state [HV, V, K] after the first ``accepted`` tokens that one request left in the rings."""
    state = state.copy()
    HV, H = len(rawv), len(rawk)
    for head in range(HV):
        for j in range(accepted):
            k = rawk[head // (HV // H), j]
            if normalize_k:
                k = l2_normalized(k)
            token = Token(q=k, k=k, v=rawv[head, j], g=g[head, j], beta=float(beta[head, j]))
            state[head], _ = step(state[head], token)
    return state


def relative_error(got: Any, reference: Any) -> float:
    """``norm(got - reference) / norm(reference)`` in float64, with a floor of 1e-30 under the norm; NaN stays NaN.

    The floor is there because kernels flush numbers below 1.2e-38 to zero.
    """
    reference = np.asarray(reference, np.float64)
    difference = np.linalg.norm((np.asarray(got, np.float64) - reference).ravel())
    return float(difference / max(float(np.linalg.norm(reference.ravel())), 1e-30))
