# SPDX-License-Identifier: Apache-2.0
"""Operands to call the operations with: random, never zero, reproducible, in any library's arrays.

>>> problem = make_problem("kda", B=3)
>>> out, state = kda_packed_decode(**to(problem, cupy))
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Problem = dict[str, Any]
"""Arguments of one call by name: NumPy arrays, and host scalars where they differ from the default."""

POISON = 1e4
"""What lies between rows and between slots, for a read or a write there to show. Exact in float16 and float32."""


def make_problem(
    op: str = "kda",
    B: int = 5,
    H: int = 2,
    HV: int = 4,
    K: int = 128,
    V: int = 128,
    dtype: str = "bfloat16",
    *,
    P: int | None = None,
    slots: Any = None,
    index_dtype: str = "int32",
    a_dtype: str | None = None,
    b_dtype: str | None = None,
    gate_dtype: str = "float32",
    lower_bound: float | None = None,
    A_log: bool = True,
    row_padding: int = 0,
    slot_padding: int = 12,
    seed: int = 0,
) -> Problem:
    """Arguments of ``gdn_packed_decode`` (op "gdn") or ``kda_packed_decode`` ("kda") as NumPy arrays.

    P: pool slots, default B + 3. slots: slot of each row, default all different, in no order, none of them 0.
    a_dtype, b_dtype: default ``dtype``. gate_dtype: of A_log and dt_bias. A_log=False passes None.
    row_padding: elements of POISON behind each row of mixed_qkv, a and b, as in slices of a wider projection.
    slot_padding: elements of POISON behind each slot of the state (a multiple of 4; the default makes the slot stride
    no power of two).
    """
    rng = np.random.default_rng(seed)
    gates = {"kda": HV * K, "gdn": HV}[op]
    P = B + 3 if P is None else P
    if slots is None:
        slots = rng.permutation(np.arange(1, P))[:B]
    problem: Problem = {
        "mixed_qkv": _rows(rng, B, 2 * H * K + HV * V, dtype, row_padding),
        "a": _rows(rng, B, gates, a_dtype or dtype, row_padding),
        "b": _rows(rng, B, HV, b_dtype or dtype, row_padding),
        "A_log": rng.uniform(-2, 1, HV).astype(np_dtype(gate_dtype)) if A_log else None,
        "dt_bias": (0.5 * _normal(rng, (gates,))).astype(np_dtype(gate_dtype)),
        "initial_state": make_state(rng, P, HV, V, K, slot_padding),
        "ssm_state_indices": np.asarray(slots, index_dtype),
    }
    assert problem["ssm_state_indices"].shape == (B,)
    if lower_bound is not None:
        problem["lower_bound"] = lower_bound
    return problem


def make_state(rng: np.random.Generator, P: int, HV: int, V: int, K: int, slot_padding: int = 0) -> Any:
    """A random pool [P, HV, V, K], its slots ``slot_padding`` elements of POISON apart, on a 16-byte boundary."""
    size = HV * V * K
    raw = np.empty(P * (size + slot_padding) + 4, np.float32)
    start = -raw.ctypes.data % 16 // 4
    slots = raw[start : start + P * (size + slot_padding)].reshape(P, size + slot_padding)
    slots[:, :size] = _normal(rng, (P, size))
    slots[:, size:] = POISON
    return slots[:, :size].reshape(P, HV, V, K, copy=False)


def out_shape(problem: Problem) -> tuple[int, int, int, int]:
    """Shape of ``out`` [B, 1, HV, V]."""
    _, HV, V, _ = problem["initial_state"].shape
    return (problem["mixed_qkv"].shape[0], 1, HV, V)


def operation(problem: Problem) -> str:
    """Which one the problem was made for: "kda" or "gdn"."""
    return "gdn" if problem["a"].shape[1] == problem["b"].shape[1] else "kda"


def to(problem: Problem, library: Any, device: Any = None) -> Problem:
    """Copy every array of a problem to another library (the module: numpy, cupy, torch or jax), strides included.

    device: for torch ("cuda") and JAX (a jax.Device). CuPy uses its current device. JAX arrays have no strides to keep.
    """
    return {
        name: to_library(value, library, device) if isinstance(value, np.ndarray) else value
        for name, value in problem.items()
    }


def to_library(value: Any, library: Any, device: Any = None) -> Any:
    """One NumPy array as an array of ``library``, with the same strides and the same contents between its rows."""
    if library.__name__ == "jax":
        return library.device_put(value, device)
    flat, strides = _with_gaps(value), tuple(stride // value.itemsize for stride in value.strides)
    if library.__name__ == "torch":
        return _to_torch(flat, library, device).as_strided(value.shape, strides)
    copy = library.array(flat)
    return library.lib.stride_tricks.as_strided(copy, value.shape, value.strides)


def to_host(array: Any) -> Any:
    """An array of any library as a NumPy array of the same values; the host waits for them."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":
            import torch

            return array.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return array.numpy()
    return array.get() if hasattr(array, "get") else np.asarray(array)


def same_bits(left: Any, right: Any) -> bool:
    """True if two arrays of any libraries agree in shape, dtype and every bit: NaN is NaN, -0 is not 0."""
    left, right = (np.ascontiguousarray(to_host(array)) for array in (left, right))
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


def np_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def _rows(rng: np.random.Generator, B: int, width: int, dtype: str, padding: int) -> Any:
    wide = np.full((B, width + padding), POISON, np_dtype(dtype))
    wide[:, :width] = _normal(rng, (B, width))
    return wide[:, :width]


def _with_gaps(value: Any) -> Any:
    """All elements from the first to the last of a view, and what lies between them, as one axis."""
    steps = ((length - 1) * stride for length, stride in zip(value.shape, value.strides, strict=True))
    span = 1 + sum(steps) // value.itemsize if value.size else 0
    return np.lib.stride_tricks.as_strided(value, (span,), (value.itemsize,))


def _to_torch(flat: Any, torch: Any, device: Any) -> Any:
    if flat.dtype == ml_dtypes.bfloat16:
        return torch.tensor(flat.view(np.int16), device=device).view(torch.bfloat16)
    return torch.tensor(flat, device=device)
