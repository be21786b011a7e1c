# SPDX-License-Identifier: Apache-2.0
"""What is in the slots, moved as bits: zeroed, copied, taken out, put back.

Every array is ``[layers, P, ...]``. A run of neighbouring slots is one strided copy, of all layers at once. Elements
move as unsigned integers of their size, so that no NaN, no subnormal and no bfloat16 is anything but bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np

from kda_cupy import streams
from kda_cupy.arrays import HOST, is_numpy

PIECE_BYTES: Final = 64 << 20
"""The most that :meth:`SlotContents.pieces` wants moved at once: what a file is read and written in."""


class SlotContents:
    """The arrays that slots consist of. Slots are not checked here, and no method waits for a GPU."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """arrays: by name, all in one place, ``[layers, P, ...]`` (the number of layers may differ)."""
        self.arrays = dict(arrays)
        self._bits = {name: as_bits(array) for name, array in self.arrays.items()}
        first = next(iter(self.arrays.values()))
        self.device = HOST if is_numpy(first) else int(first.data.device_id)

    def queue(self) -> AbstractContextManager[None]:
        """The block in which slots may be touched: ordered against all launches, see :mod:`kda_cupy.streams`."""
        return nullcontext() if self.device == HOST else streams.copying_slots(self.device)

    def zero(self, slots: Sequence[int]) -> None:
        """Write zeros; nothing is multiplied, so that no NaN survives."""
        with self.queue():
            for first, end in runs(sorted(slots)):
                for bits in self._bits.values():
                    bits[:, first:end].fill(0)

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Copy one slot to others."""
        with self.queue():
            for first, end in runs(sorted(targets)):
                for bits in self._bits.values():
                    bits[:, first:end] = bits[:, source : source + 1]

    def take(self, slots: Sequence[int]) -> dict[str, Any]:
        """Copies ``[layers, len(slots), ...]``, in the order of the slots."""
        with self.queue():
            taken = {
                name: empty_beside(array, (len(array), len(slots), *array.shape[2:]))
                for name, array in self.arrays.items()
            }
            for name, copy in taken.items():
                to = as_bits(copy)
                for row, first, end in numbered_runs(slots):
                    to[:, row : row + end - first] = self._bits[name][:, first:end]
        return taken

    def put(self, copies: Mapping[str, Any], slots: Sequence[int]) -> None:
        """Write what :meth:`take` returned to these slots, all different."""
        with self.queue():
            for name, copy in copies.items():
                source = as_bits(copy)
                for row, first, end in numbered_runs(slots):
                    self._bits[name][:, first:end] = source[:, row : row + end - first]

    def pieces(self, name: str, slots: Sequence[int]) -> Iterator[tuple[Any, tuple[int, slice]]]:
        """One array in pieces of some megabytes, in the order of ``[layers, len(slots), ...]``.

        Yields views of a layer, as bits, and where they stand in that array.
        """
        bits = self._bits[name]
        slot_bytes = bits[0, :1].size * bits.itemsize
        step = max(1, PIECE_BYTES // max(slot_bytes, 1))
        for layer in range(len(bits)):
            for row, first, end in numbered_runs(slots):
                for start in range(first, end, step):
                    stop = min(start + step, end)
                    at = row + start - first
                    yield bits[layer, start:stop], (layer, slice(at, at + stop - start))


def as_bits(array: Any) -> Any:
    """A view of an array as unsigned integers of the same size."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Slots as half-open ranges of neighbours, in their order and as few as can be."""
    return ((first, end) for _, first, end in numbered_runs(slots))


def numbered_runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The same, each range after the row of its first slot."""
    breaks = [row for row in range(1, len(slots)) if slots[row] != slots[row - 1] + 1]
    for row, stop in zip([0, *breaks], [*breaks, len(slots)], strict=True):
        if row < stop:
            yield row, slots[row], slots[stop - 1] + 1


def empty_beside(array: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the same type and dtype, on CuPy's current GPU or in host memory."""
    if is_numpy(array):
        return np.empty(shape, array.dtype)
    import cupy

    return cupy.empty(shape, array.dtype)
