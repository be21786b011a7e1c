# SPDX-License-Identifier: Apache-2.0
"""The NumPy backend: the operations in float32, all heads of several rows at once, on machines without a GPU.

It keeps the rules of the CUDA backend: state in place, padding untouched and zero, outputs rounded once, the same
bits for a row whatever the batch around it. The last is why sums over K are ``sum(axis=-1)`` of a product (NumPy's
order depends on the length alone) and not matrix products (whose order is the BLAS library's own affair).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

CHUNK_BYTES = 8 << 20
"""State gathered at a time: small enough for a cache, large enough that Python does not show."""


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), fp32."""
    with np.errstate(over="ignore"):  # exp overflows to inf, and 1 / inf is the right answer
        return np.float32(1) / (np.float32(1) + np.exp(-x))


def softplus(x: Any) -> Any:
    """log(1 + exp(x)), fp32; x itself above 20."""
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, np.float32(20)))))


def log_decay(raw: Any, dt_bias: Any, A_log: Any, lower_bound: float | None) -> Any:
    """g, fp32. ``raw`` is [rows, HV, K] or [rows, HV, 1]."""
    x = raw + dt_bias
    rate = np.float32(1)
    with np.errstate(over="ignore"):
        if A_log is not None:
            rate = np.minimum(np.exp(A_log), np.finfo(np.float32).max)[:, None]
        if lower_bound is None:
            return -rate * softplus(x)
        return np.float32(lower_bound) * sigmoid(rate * x)


def l2_normalized(x: Any) -> Any:
    """Divide by the norm over the last axis, fp32; the epsilon is added to the sum of squares."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + np.float32(1e-6))


@np.errstate(all="ignore")  # overflow to inf is an answer, as it is on a GPU, and no reason to stop half way
def packed_decode(
    mixed_qkv: Any,
    a: Any,
    b: Any,
    A_log: Any,
    dt_bias: Any,
    state: Any,
    indices: Any,
    out: Any,
    *,
    per_key_gate: bool,
    H: int,
    scale: float,
    lower_bound: float | None,
    normalize_qk: bool,
    beta_scale: float,
    null_index: int,
    on_bad_slot: Callable[[int, int], None],
) -> None:
    """Both packed decodes, on checked NumPy operands. Writes ``state`` [P, HV, V, K] and ``out`` [B, 1, HV, V]."""
    slots, HV, V, K = state.shape
    for row in np.flatnonzero(indices >= slots):
        on_bad_slot(int(row), int(indices[row]))
    live = np.flatnonzero((indices > null_index) & (indices < slots))
    out[...] = 0
    if A_log is not None:
        A_log = A_log.reshape(HV).astype(np.float32)
    dt_bias = dt_bias.reshape(HV, -1).astype(np.float32)
    for rows in chunks(live, HV * V * K):
        n = len(rows)
        x = mixed_qkv[rows].astype(np.float32)
        slots_now = indices[rows]
        o, state[slots_now] = advance(
            state[slots_now],
            q=x[:, : H * K].reshape(n, H, K),
            k=x[:, H * K : 2 * H * K].reshape(n, H, K),
            v=x[:, 2 * H * K :].reshape(n, HV, V),
            g=log_decay(
                a[rows].astype(np.float32).reshape(n, HV, K if per_key_gate else 1),
                dt_bias,
                A_log,
                lower_bound,
            ),
            beta=sigmoid(b[rows].astype(np.float32)) * np.float32(beta_scale),
            scale=scale,
            normalize_qk=normalize_qk,
        )
        out[rows, 0] = o.astype(out.dtype)


def chunks(rows: Any, state_elements: int) -> list[Any]:
    """Cut rows into pieces whose states together are about CHUNK_BYTES."""
    at_once = max(1, CHUNK_BYTES // (state_elements * 4))
    return [rows[start : start + at_once] for start in range(0, len(rows), at_once)]


def advance(
    S: Any, *, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, normalize_qk: bool
) -> tuple[Any, Any]:
    """One token of n rows, fp32: S [n, HV, V, K], q and k [n, H, K], v [n, HV, V], g [n, HV, K or 1], beta [n, HV].

    Returns o [n, HV, V] and the new states.
    """
    group = S.shape[1] // q.shape[1]
    if normalize_qk:
        q, k = l2_normalized(q), l2_normalized(k)
    q = np.repeat(q * np.float32(scale), group, axis=1)[:, :, None, :]
    k = np.repeat(k, group, axis=1)[:, :, None, :]
    S = S * np.exp(g)[:, :, None, :]
    u = beta[:, :, None] * (v - (S * k).sum(-1))
    S += u[..., None] * k
    return (S * q).sum(-1), S
