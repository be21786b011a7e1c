# SPDX-License-Identifier: Apache-2.0
"""Checks on metadata. Each raises an error of the catalogue or returns nothing; none looks at a value.

The order in which an operation calls them is part of its contract, and stands in its own file. What is here is
what more than one operation asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kda_cupy.arrays import HOST, ArrayInfo, describe, shares_memory
from kda_cupy.dtypes import FLOAT32
from kda_cupy.errors import KdaError, error

MAX_K = 512
"""A lane holds at most 16 keys of a row."""
STATE_AXES = "[pool, HV, V, K]"


def shape_text(shape: Iterable[int]) -> str:
    """``[4, 8, 128]``."""
    return f"[{', '.join(map(str, shape))}]"


def strides_text(info: ArrayInfo) -> str:
    """Strides in elements where they are whole, else in bytes."""
    size = info.dtype.itemsize
    if all(stride % size == 0 for stride in info.strides):
        return f"strides {shape_text(stride // size for stride in info.strides)} for shape {shape_text(info.shape)}"
    return f"strides {shape_text(info.strides)} bytes for elements of {size}"


def check_contiguous_last(code: str, name: str, info: ArrayInfo) -> None:
    if not info.is_contiguous_in_last:
        raise error(code, operand=name, got=strides_text(info))


def check_contiguous(code: str, name: str, info: ArrayInfo) -> None:
    if not info.is_contiguous:
        raise error(code, operand=name, got=strides_text(info))


def check_dtype(name: str, info: ArrayInfo, allowed: Iterable[np.dtype[Any]], code: str = "KDA-ARRAY-DTYPE") -> None:
    allowed = tuple(allowed)
    if info.dtype not in allowed:
        names = [dtype.name for dtype in allowed]
        wanted = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
        raise error(code, operand=name, got=info.dtype.name, wanted_dtype=wanted)


def check_strides(name: str, info: ArrayInfo) -> None:
    """No negative stride, and every stride a whole number of elements. Axes of length 1 may have any stride."""
    for length, stride in zip(info.shape, info.strides, strict=True):
        if length > 1 and (stride < 0 or stride % info.dtype.itemsize):
            raise error("KDA-ARRAY-NEGATIVE-STRIDE", operand=name, got=strides_text(info))


def check_one_place(infos: Mapping[str, ArrayInfo], code: str) -> None:
    """All operands on one GPU, or all in host memory."""
    (first, reference), *rest = infos.items()
    for name, info in rest:
        if info.device == reference.device:
            continue
        if HOST in (info.device, reference.device):
            host, other = (name, first) if info.device == HOST else (first, name)
            raise error("KDA-ARRAY-HOST-ON-DEVICE", operand=host, got=f"`{other}` on {infos[other].place}", other=other)
        raise error(code, operand=name, got=f"`{first}` on {reference.place} and `{name}` on {info.place}")


def check_state_layout(name: str, info: ArrayInfo) -> None:
    """Inner strides dense, slots 16-byte aligned, K a size that the kernels know. Rank 4 is known."""
    slots, HV, V, K = info.shape
    size = info.dtype.itemsize
    dense = (V * K * size, K * size, size)
    lengths = (HV, V, K)
    for length, stride, wanted in zip(lengths, info.strides[1:], dense, strict=True):
        if length > 1 and stride != wanted:
            raise error("KDA-STATE-STRIDES", operand=name, got=strides_text(info))
    if not (0 < K <= MAX_K and K % 4 == 0 and V > 0 and HV > 0):
        raise error(
            "KDA-STATE-LAYOUT",
            operand=name,
            got=shape_text(info.shape),
            layout=f"{STATE_AXES} with K a multiple of 4 from 4 to {MAX_K} and no empty axis but the first",
        )
    if info.misalignment or (slots > 1 and info.strides[0] % 16):
        offset = f"an address {info.misalignment} bytes past a 16-byte boundary"
        stride = f"a slot stride of {info.strides[0]} bytes"
        raise error("KDA-STATE-ALIGNMENT", operand=name, got=offset if info.misalignment else stride)
    if slots > 1 and info.strides[0] < HV * V * K * size:
        raise error("KDA-STATE-STRIDES", operand=name, got=strides_text(info))


def check_state(array: Any, num_heads: int, *, device: int | None = None) -> None:
    """Raise OperandError unless ``array`` can serve as a state pool ``[P, HV=num_heads, V, K]``.

    NumPy or CuPy array: float32, inner three strides dense, slot stride free but a multiple of 4 elements, first
    element on a 16-byte boundary, on ``device`` if one is given (-1: host memory). Looks at metadata only.
    """
    info, _ = describe(array)
    if device is not None and info.device != device:
        wanted = "host memory" if device == HOST else f"cuda:{device}"
        raise error("KDA-STATE-DEVICE", operand="state", got=info.place, place=wanted)
    check_dtype("state", info, (FLOAT32,), "KDA-STATE-DTYPE")
    if info.rank != 4:
        raise error("KDA-STATE-RANK", operand="state", got=f"shape {shape_text(info.shape)}", rank=info.rank)
    check_contiguous_last("KDA-STATE-CONTIGUOUS", "state", info)
    check_strides("state", info)
    check_state_layout("state", info)
    if info.shape[1] != num_heads:
        layout = f"[pool, HV={num_heads}, V, K]"
        raise error("KDA-STATE-LAYOUT", operand="state", got=shape_text(info.shape), layout=layout)
    if not info.writeable:
        raise error("KDA-ARRAY-READ-ONLY", operand="state")


def is_valid_state(array: Any, num_heads: int) -> bool:
    """True if :func:`check_state` would raise nothing. Never raises; anything that is no array is False."""
    try:
        check_state(array, num_heads)
    except (KdaError, AttributeError):
        return False
    return True


def check_no_overlap(
    written: str, info: ArrayInfo, pointer: int, name: str, other: ArrayInfo, other_pointer: int
) -> None:
    """The operand ``written`` has no byte in common with the operand ``name``."""
    if shares_memory(info, pointer, other, other_pointer):
        raise error("KDA-ARRAY-OVERLAP", operand=written, got=f"`{written}` inside the memory of `{name}`", other=name)


def as_float(code: str, name: str, value: object) -> float:
    """A finite Python float from any host scalar (float, int, NumPy scalar, 0-d NumPy array)."""
    try:
        if hasattr(value, "__cuda_array_interface__"):
            raise TypeError("a device value would have to be read back on every call")
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise error(code, operand=name, got=f"{value!r} of type {type(value).__name__}") from None
    if not math.isfinite(number):
        raise error(code, operand=name, got=repr(number))
    return number
