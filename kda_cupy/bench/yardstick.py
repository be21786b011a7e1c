# SPDX-License-Identifier: Apache-2.0
"""The yardstick RW as a launch: see kernels/yardstick.cu."""

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
TILE_ELEMENTS: Final = 1024
"""kTileElements of the kernel: what one block moves."""


class ReadWriteParams(NamedTuple):
    """The parameter struct of ``read_write``, field by field. Strides in elements."""

    state: int
    indices: int
    first_row: int
    slot_stride: int
    index_stride: int
    slots: int
    index_is_64bit: bool
    factor: float


_LAYOUT = struct.Struct("<2Q4qif")


def read_write(state: Any, indices: Any, factor: float = FACTOR) -> Launch:
    """Prepare one pass that scales, in place, the slots of ``state`` that ``indices`` name.

    state: CuPy [P, HV, V, K], laid out as the operations want it. indices: CuPy [B], int32 or int64; slots outside the
    pool are skipped.
    """
    (info, pointer), (index_info, index_pointer) = describe(state), describe(indices)
    slots, HV, V, K = info.shape
    (B,) = index_info.shape
    params = ReadWriteParams(
        state=pointer,
        indices=index_pointer,
        first_row=0,
        slot_stride=info.stride(0),
        index_stride=index_info.stride(0),
        slots=slots,
        index_is_64bit=index_info.dtype == INT64,
        factor=factor,
    )
    tiles = -(-V * K // TILE_ELEMENTS)
    launches = tuple(
        ((tiles, HV, rows), np.void(_LAYOUT.pack(*params._replace(first_row=first))))
        for first, rows in split_rows(B)
    )
    kernel = get_kernel(YardstickConfig(K, V, _LAYOUT.size), info.device)
    return Launch(kernel, info.device, (32, 1, 1), launches, results=None, keep=(state, indices))
