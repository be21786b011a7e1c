# SPDX-License-Identifier: Apache-2.0
"""Checks on metadata. Each raises an error of the catalogue or returns nothing; none looks at a value.

The order in which an operation calls them is part of its contract, and stands in its own file. What is here is
what more than one operation asks for.
"""

from __future__ import annotations

import reprlib
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np

from kda_cupy import bridge
from kda_cupy.arrays import HOST, ArrayInfo, describe, shares_memory
from kda_cupy.dtypes import BFLOAT16, FLOAT32
from kda_cupy.errors import error
from kda_cupy.gpu import compute_capability

FLOAT32_MAX = float(np.finfo(np.float32).max)
_REAL = (*map(np.dtype, "bBhHiIlLqQefdg"), BFLOAT16)
MAX_HEADS = 65_535
"""The y and z axes of a grid stop there."""
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


def check_place(name: str, info: ArrayInfo, device: int) -> None:
    """On the GPU of that number, or in host memory (-1)."""
    if info.device != device:
        came, wanted = ("in host memory" if n == HOST else f"on cuda:{n}" for n in (info.device, device))
        raise error("KDA-STATE-DEVICE", operand=name, got=f"an array {came}", place=wanted)


def check_state_layout(name: str, info: ArrayInfo) -> None:
    """K a size that the kernels know, inner strides dense, slots apart and 16-byte aligned. Rank 4 is known."""
    slots, HV, V, K = info.shape
    size = info.dtype.itemsize
    if not (0 < K <= MAX_K and K % 4 == 0 and V > 0 and 0 < HV <= MAX_HEADS):
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
    if device is not None:
        check_place("state", info, device)
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
    except Exception:  # a refusal, or whatever an object that is no array raises when it is looked at
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
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.generic, np.ndarray)):
            raise TypeError
        if isinstance(value, (np.generic, np.ndarray)) and value.dtype not in _REAL:
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise error(code, operand=name, got=f"{reprlib.repr(value)} of type {kind}") from None
    if not abs(number) <= FLOAT32_MAX:  # a kernel's float; NaN is not below it either
        raise error(code, operand=name, got=repr(number))
    return number


def check_scale(value: object, K: int) -> float:
    """The scale as a float; None means K**-0.5."""
    return K**-0.5 if value is None else as_float("KDA-VALUE-SCALE", "scale", value)


def check_lower_bound(value: object, *, has_A_log: bool) -> float | None:
    """The lower bound as a float below 0, or None for the unbounded gate, which needs an ``A_log``."""
    if value is None:
        if not has_A_log:
            raise error("KDA-VALUE-A-LOG-MISSING", operand="A_log", got="A_log=None and lower_bound=None")
        return None
    lower_bound = as_float("KDA-VALUE-LOWER-BOUND", "lower_bound", value)
    if not np.float32(lower_bound) < 0:  # -1e-60 is 0 to a kernel
        raise error("KDA-VALUE-LOWER-BOUND", operand="lower_bound", got=repr(lower_bound))
    return lower_bound


def check_modes(null_index: object, validate: object) -> None:
    """The two options that every operation on slots has."""
    if not isinstance(null_index, (int, np.integer)) or null_index not in (-1, 0):
        raise error("KDA-VALUE-NULL-INDEX", operand="null_index", got=reprlib.repr(null_index))
    if not isinstance(validate, str) or validate not in ("metadata", "full"):
        raise error("KDA-VALUE-VALIDATE", operand="validate", got=reprlib.repr(validate))


def check_flag(name: str, value: object) -> bool:
    """True or False, and nothing that merely counts as one: "False" would, and a tensor may change its mind later."""
    if not isinstance(value, (bool, np.bool_)):
        raise error(
            "KDA-VALUE-FLAG", operand=name, got=f"{reprlib.repr(value)} of type {type(value).__name__}"
        )
    return bool(value)


def check_bfloat16_support(infos: Mapping[str, ArrayInfo | None]) -> None:
    """No operand in bfloat16 on a GPU that does not know the type. They are all in one place."""
    for name, info in infos.items():
        if info is None or info.dtype != BFLOAT16 or info.device == HOST:
            continue
        capability = compute_capability(info.device)
        if int(capability) < 80:
            got = f"`{name}` in bfloat16 on a GPU of compute capability {capability[:-1]}.{capability[-1]}"
            raise error("KDA-ARRAY-BF16-SUPPORT", operand=name, got=got)


def check_slots(indices: Any, slots: int, null_index: int, operand: str = "ssm_state_indices") -> None:
    """Read the indices (this waits for the GPU) and raise SlotError for one out of range or named twice."""
    host = indices if isinstance(indices, np.ndarray) else indices.get()
    host = host.astype(np.int64)
    for row in np.flatnonzero(host >= slots)[:1]:
        got, allowed = f"slot {host[row]}", f"a slot below P={slots}, or negative for padding"
        raise error(
            "KDA-VALUE-SLOT-RANGE", operand=operand, got=got, place=f"{operand}[{row}]", allowed=allowed
        )
    live = np.flatnonzero(host > null_index)
    _, first, counts = np.unique(host[live], return_index=True, return_counts=True)
    for twice in np.flatnonzero(counts > 1)[:1]:
        slot = host[live[first[twice]]]
        rows = np.flatnonzero(host == slot).tolist()
        others = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        got = f"slot {slot} in rows {', '.join(map(str, rows[:3]))}{others}"
        raise error("KDA-VALUE-SLOT-DUPLICATE", operand=operand, got=got)


def is_dense(info: ArrayInfo, axes: int) -> bool:
    """True if the last ``axes`` axes lie in C order without gaps; axes of length 1 may have any stride."""
    tail = info._replace(shape=info.shape[-axes:], strides=info.strides[-axes:])
    return info.size == 0 or tail.is_contiguous


def check_elements_apart(name: str, info: ArrayInfo) -> None:
    """Every element has memory of its own: no axis is broadcast or folded over another one."""
    extent = info.dtype.itemsize
    for stride, length in sorted(zip(info.strides, info.shape, strict=True)):
        if length > 1 and info.size:
            if stride < extent:
                raise error("KDA-ARRAY-FOLDED", operand=name, got=strides_text(info))
            extent += stride * (length - 1)


def check_written(infos: Mapping[str, ArrayInfo]) -> None:
    """What an operation writes to is writable, and no two elements of it are in one place."""
    for name, info in infos.items():
        if not info.writeable:
            raise error("KDA-ARRAY-READ-ONLY", operand=name, got="read-only memory")
    for name, info in infos.items():
        check_elements_apart(name, info)


MOST_REMEMBERED = 256
"""Sets of addresses that :func:`check_apart` remembers: the buffers of as many layers."""


def check_apart(
    infos: Mapping[str, ArrayInfo | None],
    pointers: tuple[int, ...],
    written: Container[str],
    passed: set[tuple[int, ...]],
) -> None:
    """No operand that is written to shares a byte with another one. Negative strides are refused before.

    passed: addresses that arrays of these very layouts have passed with; a serving loop repeats itself.
    """
    if pointers in passed:
        return
    here = {name: info for name, info in infos.items() if info is not None and info.size}
    starts = dict(zip(infos, pointers, strict=True))
    still_open: list[tuple[int, str]] = []
    for start, end, name in sorted(
        (starts[each], starts[each] + here[each].span_bytes, each) for each in here
    ):
        still_open = [span for span in still_open if span[0] > start]
        for _, other in still_open:
            if name in written or other in written:
                first, second = (name, other) if name in written else (other, name)
                check_no_overlap(first, here[first], starts[first], second, here[second], starts[second])
        still_open.append((end, name))
    if len(passed) >= MOST_REMEMBERED:
        passed.clear()
    passed.add(pointers)
