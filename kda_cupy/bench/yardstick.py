# SPDX-License-Identifier: Apache-2.0
"""The yardsticks RW, R and SNAP as launches: see kernels/yardstick.cu."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy.arrays import describe
from kda_cupy.config import YardstickConfig
from kda_cupy.dtypes import INT64
from kda_cupy.launch import Launch, split_rows
from kda_cupy.modules import get_kernel

FACTOR: Final = -1.0
UNLIKELY_SUM: Final = 12345.678
"""A sum of random numbers that no lane finds."""


class Shape(NamedTuple):
    """Of a block."""

    warps: int
    loads: int
    """Of 16 bytes, that a lane has in flight."""


NARROW: Final = Shape(warps=1, loads=8)
WIDE: Final = Shape(warps=8, loads=16)


class YardstickParams(NamedTuple):
    """The parameter struct of the kernel, field by field. Strides in elements."""

    state: int
    indices: int
    copies: int
    copy_indices: int
    first_row: int
    slot_stride: int
    index_stride: int
    slots: int
    copy_row_stride: int
    copy_step_stride: int
    copy_index_stride: int
    copy_rows: int
    index_is_64bit: bool
    copy_index_is_64bit: bool
    steps: int
    factor: float


_LAYOUT = struct.Struct("<4Q8q3if")
_NO_COPIES: Final[dict[str, Any]] = {
    "copies": 0, "copy_indices": 0, "copy_row_stride": 0, "copy_step_stride": 0, "copy_index_stride": 0,
    "copy_rows": 0, "copy_index_is_64bit": False, "steps": 1,
}  # fmt: skip


def read_write(state: Any, indices: Any, factor: float = FACTOR) -> Launch:
    """RW: prepare one pass that scales, in place, the slots of ``state`` that ``indices`` name.

    state: CuPy [P, HV, V, K], laid out as the operations want it. indices: CuPy [B], int32 or int64; slots outside the
    pool are skipped.
    """
    return _prepare("RW", NARROW, state, indices, (), {"factor": factor})


def read(
    state: Any, indices: Any, sink: Any, *, shape: Shape = NARROW, wanted: float = UNLIKELY_SUM
) -> Launch:
    """R: prepare one pass that only reads them.

    sink: CuPy float32, one element, which receives ``wanted`` if that is what the numbers of any lane add up to:
    nothing reads it, but for its sake nothing can be left out.
    """
    return _prepare("R", shape, state, indices, (sink,), {"factor": wanted, "copies": describe(sink)[1]})


def read_and_copy(state: Any, indices: Any, copies: Any, rows: Any, factor: float = FACTOR) -> Launch:
    """SNAP: prepare one pass that reads them and stores a scaled copy for every step.

    copies: CuPy float32 [rows, steps, HV, V, K], its inner three axes dense. rows: CuPy [B], int32 or int64: where the
    copies of each go; step j receives ``S * factor**(j + 1)``. Rows outside are skipped.
    """
    (info, pointer), (row_info, row_pointer) = describe(copies), describe(rows)
    values = {
        "copies": pointer,
        "copy_indices": row_pointer,
        "copy_row_stride": info.stride(0),
        "copy_step_stride": info.stride(1),
        "copy_index_stride": row_info.stride(0),
        "copy_rows": info.shape[0],
        "copy_index_is_64bit": row_info.dtype == INT64,
        "steps": info.shape[1],
        "factor": factor,
    }
    return _prepare("SNAP", NARROW, state, indices, (copies, rows), values)


def state_yardsticks(moves: str, state: Any, slots: list[Any]) -> list[list[Launch]]:
    """RW or R over groups of slots, a launch a group; a list for each of its forms, of which the faster counts."""
    if moves == "RW":
        return [[read_write(state, each) for each in slots]]
    import cupy

    with cupy.cuda.Device(describe(state)[0].device):
        sink = cupy.zeros(1, np.float32)
    return [[read(state, each, sink, shape=shape) for each in slots] for shape in (NARROW, WIDE)]


def _prepare(
    moves: str, shape: Shape, state: Any, indices: Any, keep: tuple[Any, ...], values: dict[str, Any]
) -> Launch:
    (info, pointer), (index_info, index_pointer) = describe(state), describe(indices)
    slots, HV, V, K = info.shape
    (B,) = index_info.shape
    params = YardstickParams(
        state=pointer,
        indices=index_pointer,
        first_row=0,
        slot_stride=info.stride(0),
        index_stride=index_info.stride(0),
        slots=slots,
        index_is_64bit=index_info.dtype == INT64,
        **(_NO_COPIES | values),
    )
    tiles = -(-V * K // (shape.warps * shape.loads * 128))
    launches = tuple(
        ((tiles, HV, rows), np.void(_LAYOUT.pack(*params._replace(first_row=first))))
        for first, rows in split_rows(B)
    )
    config = YardstickConfig(moves, K, V, shape.warps, shape.loads, _LAYOUT.size)
    kernel = get_kernel(config, info.device)
    return Launch(
        kernel, info.device, (32 * shape.warps, 1, 1), launches, results=None, keep=(state, indices, *keep)
    )


def bytes_moved(moves: str, B: int, HV: int, V: int, K: int, steps: int) -> int:
    """Bytes that a yardstick moves: ``B * HV*V*K * 4`` times 2 (RW), 1 (R) or ``1 + steps`` (SNAP)."""
    return B * HV * V * K * 4 * {"RW": 2, "R": 1, "SNAP": 1 + steps}[moves]
