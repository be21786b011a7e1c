# SPDX-License-Identifier: Apache-2.0
"""The parameter struct of kernels/causal_conv1d_update.cu, and the grid that it is launched with.

As in step_params.py; where C has an array of three, here are three fields, one for each piece of the channels. A piece
that is not there has 0 channels and 0 blocks, and nothing else of it is read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

THREADS: Final = 128
"""Threads a block, a channel each."""
PIECES: Final = 3


class ConvPointers(NamedTuple):
    """``ConvUpdateParams``, first part: addresses and where this launch begins."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    bias: tuple[int, ...]
    """0: no bias (for all pieces or none)."""
    cs: tuple[int, ...]
    windows: tuple[int, ...]
    """0: the history is rolled in place (for all pieces or none)."""
    conv_state_indices: int
    """0: row i uses slot i."""
    intermediate_state_indices: int
    out: int
    errors: int
    """Of kda_cupy.guard."""
    first_row: int
    """Of this launch: see kda_cupy.launch.split_rows."""


class ConvLayout(NamedTuple):
    """``ConvUpdateParams``, second part. Strides in elements."""

    x_stride: tuple[int, ...]
    """From row to row."""
    x_channel_stride: tuple[int, ...]
    x_token_stride: tuple[int, ...]
    w_stride: tuple[int, ...]
    """From channel to channel."""
    w_tap_stride: tuple[int, ...]
    bias_stride: tuple[int, ...]
    cs_slot_stride: tuple[int, ...]
    cs_channel_stride: tuple[int, ...]
    cs_tap_stride: tuple[int, ...]
    window_row_stride: tuple[int, ...]
    window_step_stride: tuple[int, ...]
    window_channel_stride: tuple[int, ...]
    window_tap_stride: tuple[int, ...]
    channels: tuple[int, ...]
    blocks: tuple[int, ...]
    """Of a row; see :func:`blocks_of`."""
    out_stride: int
    """From row to row."""
    out_channel_stride: int
    out_token_stride: int
    slot_index_stride: int
    scratch_index_stride: int
    slots: int
    """P."""
    scratch_rows: int
    tokens: int
    """Of every row."""
    null_index: int
    """-1 or 0: slots up to here are padding."""
    slot_index_is_64bit: int
    scratch_index_is_64bit: int
    operation: int
    """Index in guard.OPERATIONS."""


_POINTERS: Final = struct.Struct("<19Qq")
_LAYOUT: Final = struct.Struct("<53q4i")
PARAMS_BYTES: Final = _POINTERS.size + _LAYOUT.size


def _flat(fields: tuple[int | tuple[int, ...], ...]) -> list[int]:
    """All numbers in a row, three for each piece-wise field."""
    numbers: list[int] = []
    for value in fields:
        numbers += [*value, *(0,) * (PIECES - len(value))] if isinstance(value, tuple) else [value]
    return numbers


def pack_pointers(pointers: ConvPointers) -> bytes:
    """First part of the struct."""
    return _POINTERS.pack(*_flat(pointers))


def pack_layout(layout: ConvLayout) -> bytes:
    """Second part of the struct, to be put behind the first."""
    return _LAYOUT.pack(*_flat(layout))


def blocks_of(channels: Sequence[int]) -> tuple[int, ...]:
    """Blocks of each piece: none spans two pieces."""
    return tuple(-(-each // THREADS) for each in channels)


def grid(rows: int, channels: Sequence[int]) -> tuple[int, int, int]:
    """Blocks of one launch over ``rows`` (at most 65,535)."""
    return (sum(blocks_of(channels)), 1, rows)
