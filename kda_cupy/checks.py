# SPDX-License-Identifier: Apache-2.0
"""Checks on metadata. Each raises an error of the catalogue or returns nothing; none looks at a value.

The order in which an operation calls them is part of its contract, and stands in its own file. What is here is
what more than one operation asks for.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kda_cupy import bridge
from kda_cupy.arrays import HOST, ArrayInfo, describe, shares_memory
from kda_cupy.dtypes import FLOAT32
from kda_cupy.errors import KdaError, error

MAX_K = 512
"""A lane holds at most 16 keys of a row."""
STATE_AXES = "[P, HV, V, K]"


def shape_text(shape: Iterable[int]) -> str:
    """``[4, 8, 128]``."""
    return f"[{', '.join(map(str, shape))}]"


def strides_text(info: ArrayInfo) -> str:
    """Strides in elements where they are whole, else in bytes."""
    size = info.dtype.itemsize
    if all(stride % size == 0 for stride in info.strides):
        strides = shape_text(stride // size for stride in info.strides)
        return f"element strides {strides} for shape {shape_text(info.shape)}"
    return f"strides {shape_text(info.strides)} bytes for elements of {size}"


def check_contiguous_last(code: str, name: str, info: ArrayInfo) -> None:
    """Neighbours on the last axis are neighbours in memory."""
    if not info.is_contiguous_in_last:
        raise error(code, operand=name, got=f"`{name}` with {strides_text(info)}")


def check_contiguous(code: str, name: str, info: ArrayInfo) -> None:
    """C order without gaps; axes of length 1 may have any stride."""
    if not info.is_contiguous:
        raise error(code, operand=name, got=f"`{name}` with {strides_text(info)}")


def check_dtype(
    name: str, info: ArrayInfo, allowed: Iterable[np.dtype[Any]], code: str = "KDA-ARRAY-DTYPE"
) -> None:
    """One of the allowed types, in native byte order."""
    allowed = tuple(allowed)
    if info.dtype not in allowed:
        names = [dtype.name for dtype in allowed]
        wanted = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
        raise error(
            code, operand=name, got=str(info.dtype), wanted_dtype=wanted
        )  # str() shows a foreign byte order


def check_strides(name: str, info: ArrayInfo) -> None:
    """No negative stride, and every stride a whole number of elements. Axes of length 1 may have any stride."""
    for length, stride in zip(info.shape, info.strides, strict=True):
        if length > 1 and (stride < 0 or stride % info.dtype.itemsize):
            raise error("KDA-ARRAY-NEGATIVE-STRIDE", operand=name, got=strides_text(info))


def check_alignment(name: str, info: ArrayInfo) -> None:
    """Elements lie where a GPU can load them: at a multiple of their own size."""
    past = info.misalignment % info.dtype.itemsize
    if past and info.size:
        got = f"an address {past} byte{'s' if past > 1 else ''} past a multiple of {info.dtype.itemsize}"
        raise error("KDA-ARRAY-ALIGNMENT", operand=name, got=got)


def check_one_place(infos: Mapping[str, ArrayInfo], code: str) -> None:
    """All operands on one GPU, or all in host memory."""
    (first, reference), *rest = infos.items()
    for name, info in rest:
        if info.device == reference.device:
            continue
        if HOST in (info.device, reference.device):
            host, other = (name, first) if info.device == HOST else (first, name)
            got = f"`{host}` in host memory and `{other}` on {infos[other].place}"
            raise error("KDA-ARRAY-HOST-ON-DEVICE", operand=host, got=got, other=other)
        raise error(code, operand=name, got=f"`{first}` on {reference.place} and `{name}` on {info.place}")


def check_state_layout(name: str, info: ArrayInfo) -> None:
    """K a size that the kernels know, inner strides dense, slots apart and 16-byte aligned. Rank 4 is known."""
    slots, HV, V, K = info.shape
    size = info.dtype.itemsize
    if not (0 < K <= MAX_K and K % 4 == 0 and V > 0 and HV > 0):
        layout = f"[pool, HV>=1, V>=1, K=4, 8, .., {MAX_K}]"
        raise error("KDA-STATE-LAYOUT", operand=name, got=shape_text(info.shape), layout=layout)
    dense = (V * K * size, K * size, size)
    lengths = (HV, V, K)
    for length, stride, wanted in zip(lengths, info.strides[1:], dense, strict=True):
        if length > 1 and stride != wanted:
            raise error("KDA-STATE-STRIDES", operand=name, got=strides_text(info))
    if info.misalignment or (slots > 1 and info.strides[0] % 16):
        got = f"a slot stride of {info.strides[0]} bytes"
        if info.misalignment:
            got = f"an address {info.misalignment} bytes past a 16-byte boundary"
        raise error("KDA-STATE-ALIGNMENT", operand=name, got=got)
    if slots > 1 and info.strides[0] < HV * V * K * size:
        raise error("KDA-STATE-STRIDES", operand=name, got=strides_text(info))


def check_state(array: Any, num_heads: int, *, device: int | None = None) -> None:
    """Raise OperandError unless ``array`` can serve as a state pool ``[P, HV=num_heads, V, K]``.

    Any array with DLPack: float32, inner three strides dense, slot stride free but a multiple of 4 elements, first
    element on a 16-byte boundary, writable, on ``device`` if one is given (-1: host memory). Looks at metadata only.
    DeviceError if it is elsewhere, BridgeError for what is no array.
    """
    info, _ = describe(bridge.adopt("state", array, written=True))
    if device is not None and info.device != device:
        came, wanted = ("in host memory" if n == HOST else f"on cuda:{n}" for n in (info.device, device))
        raise error("KDA-STATE-DEVICE", operand="state", got=f"an array {came}", place=wanted)
    check_dtype("state", info, (FLOAT32,), "KDA-STATE-DTYPE")
    if info.rank != 4:
        got = f"shape {shape_text(info.shape)}"
        raise error("KDA-STATE-RANK", operand="state", got=got, rank=info.rank, axes=STATE_AXES)
    if info.shape[1] != num_heads:
        layout = f"[pool, HV={num_heads}, V, K]"
        raise error("KDA-STATE-LAYOUT", operand="state", got=shape_text(info.shape), layout=layout)
    check_contiguous_last("KDA-STATE-CONTIGUOUS", "state", info)
    check_strides("state", info)
    check_state_layout("state", info)
    if not info.writeable:
        raise error("KDA-ARRAY-READ-ONLY", operand="state", got="read-only memory")


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
        raise error(
            "KDA-ARRAY-OVERLAP",
            operand=written,
            got=f"`{written}` and `{name}` with bytes in common",
            other=name,
        )


def as_float(code: str, name: str, value: object) -> float:
    """A finite Python float from a float, an int, a NumPy scalar or a 0-d NumPy array.

    Nothing else: a value on the GPU would have to be waited for, and a plan that is remembered by a tensor's
    identity would not see it change.
    """
    kind = type(value).__name__
    if hasattr(value, "__cuda_array_interface__"):  # repr() would wait for it too
        raise error(code, operand=name, got=f"a value in GPU memory, of type {kind}")
    if isinstance(value, np.ndarray) and value.ndim:
        raise error(code, operand=name, got=f"an array of shape {shape_text(value.shape)}")
    try:
        if not isinstance(value, (int, float, np.generic, np.ndarray)) or isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise error(code, operand=name, got=f"{reprlib.repr(value)} of type {kind}") from None
    if not math.isfinite(number):
        raise error(code, operand=name, got=repr(number))
    return number
