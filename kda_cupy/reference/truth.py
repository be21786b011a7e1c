# SPDX-License-Identifier: Apache-2.0
"""The float64 truth: one token of one head at a time, one formula a line. Slow, and meant to be read.

Everything fast in this package is compared with this. It takes values, not layouts: float64 arrays of one head.
``S`` is [V, K]: rows are values, columns are keys.
"""

from __future__ import annotations

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


def relative_error(got: Any, reference: Any) -> float:
    """``norm(got - reference) / norm(reference)`` in float64, with a floor of 1e-30 under the norm; NaN stays NaN.

    The floor is there because kernels flush numbers below 1.2e-38 to zero.
    """
    reference = np.asarray(reference, np.float64)
    difference = np.linalg.norm((np.asarray(got, np.float64) - reference).ravel())
    return float(difference / max(float(np.linalg.norm(reference.ravel())), 1e-30))
