# SPDX-License-Identifier: Apache-2.0
"""What a check may know of an array: metadata, never values.

NumPy and CuPy arrays have the same attributes, so every check runs, and is tested, on a machine without a GPU.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

HOST: Final = -1
#: No kernel loads more than 16 bytes at once, so no check asks for more alignment than this.
MAX_ALIGNMENT: Final = 16


class ArrayInfo(NamedTuple):
    """Metadata of one array, without the address, so that a layout that passed once is known to pass again."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes, not elements."""
    dtype: np.dtype[Any]
    device: int
    """Number of the GPU, or -1 for host memory."""
    misalignment: int
    """Address modulo 16 bytes."""
    writeable: bool = True

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for length in self.shape:
            size *= length
        return size

    def stride(self, axis: int) -> int:
        """Stride of an axis in elements (check_strides has seen that it is a whole number)."""
        return self.strides[axis] // self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if the elements lie in C order without gaps. Axes of length 1 may have any stride."""
        expected = self.dtype.itemsize
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return self.size == 0
            expected *= length
        return True

    @property
    def is_contiguous_in_last(self) -> bool:
        """True if neighbours on the last axis are neighbours in memory."""
        if self.rank == 0:
            return False
        return self.strides[-1] == self.dtype.itemsize or self.shape[-1] == 1 or self.size == 0

    def moves_by_four(self, axis: int = -1) -> bool:
        """True if a kernel may move four elements along ``axis`` at once.

        They are neighbours, each four from a multiple of four on are aligned to their own size, and no stride is 2^31
        elements or more.
        """
        axis %= self.rank
        four = 4 * self.dtype.itemsize
        others = [stride for n, stride in enumerate(self.strides) if n != axis and self.shape[n] > 1]
        return (
            4 * self.strides[axis] == four
            and self.misalignment % four == 0
            and all(stride % four == 0 and stride < 2**31 * self.dtype.itemsize for stride in others)
        )

    @property
    def span_bytes(self) -> int:
        """Bytes from the lowest address of an element to the end of the highest one; 0 if there are none."""
        if self.size == 0:
            return 0
        steps = ((n - 1) * abs(stride) for n, stride in zip(self.shape, self.strides, strict=True))
        return sum(steps) + self.dtype.itemsize

    @property
    def lowest_offset(self) -> int:
        """Where the span begins, from the address of the first element: below it if a stride is negative."""
        if self.size == 0:
            return 0
        return sum((n - 1) * min(stride, 0) for n, stride in zip(self.shape, self.strides, strict=True))

    @property
    def place(self) -> str:
        """Where it lives, in words."""
        return "host memory" if self.device == HOST else f"cuda:{self.device}"


def is_numpy(array: object) -> bool:
    """True for a plain NumPy array. Subclasses (memmap, matrix) are foreign: the bridge takes a plain view of them."""
    return type(array) is np.ndarray


def is_cupy(array: object) -> bool:
    """True for a CuPy array. Does not import CuPy: without it nobody can have made one."""
    kind = type(array)
    return kind.__name__ == "ndarray" and kind.__module__.partition(".")[0] == "cupy"


def slide(inputs: Any, taps: int = 3) -> Any:
    """Windows over raw inputs: [..., steps + taps - 1, C] seen as [..., steps, C, taps], a NumPy or CuPy view.

    Window j holds the inputs j to j + taps - 1, each in the one place it has in ``inputs``.
    """
    library = np if is_numpy(inputs) else sys.modules["cupy"]
    *front, steps, channels = inputs.shape
    *ahead, step, channel = inputs.strides
    shape, strides = (*front, steps - taps + 1, channels, taps), (*ahead, step, channel, step)
    return library.lib.stride_tricks.as_strided(inputs, shape, strides)


def describe(array: Any) -> tuple[ArrayInfo, int]:
    """Return the metadata of a NumPy or CuPy array, and its address."""
    if isinstance(array, np.ndarray):
        pointer = array.__array_interface__["data"][0]
        writeable = array.flags.writeable
        misalignment = pointer % MAX_ALIGNMENT
        return ArrayInfo(array.shape, array.strides, array.dtype, HOST, misalignment, writeable), pointer
    memory = array.data
    pointer = memory.ptr
    info = ArrayInfo(array.shape, array.strides, array.dtype, memory.device_id, pointer % MAX_ALIGNMENT)
    return info, pointer


def shares_memory(info: ArrayInfo, pointer: int, other: ArrayInfo, other_pointer: int) -> bool:
    """True if the two arrays have a byte in common.

    Exact, also for views that interleave without touching (a padded pool whose gaps hold something else).
    """
    start, other_start = pointer + info.lowest_offset, other_pointer + other.lowest_offset
    if start + info.span_bytes <= other_start or other_start + other.span_bytes <= start:
        return False
    if info.device != other.device or not (info.size and other.size):
        return False
    return _interleaved_views_touch(info, other, other_start - start)


@lru_cache(maxsize=1024)
def _interleaved_views_touch(info: ArrayInfo, other: ArrayInfo, distance: int) -> bool:
    """Whether two arrays, the lowest address of the second ``distance`` bytes behind that of the first, share a byte.

    Exact, and sometimes a tenth of a millisecond's work: hence the memory.
    """
    start = max(0, -distance) + MAX_ALIGNMENT
    views = (
        _shadow(info, start - info.lowest_offset),
        _shadow(other, start + distance - other.lowest_offset),
    )
    return bool(np.shares_memory(*views))


def _shadow(info: ArrayInfo, pointer: int) -> Any:
    """A NumPy view of the same addresses; its memory is never read, it may be a GPU's."""

    class Shadow:
        __array_interface__ = {  # noqa: RUF012  (a protocol attribute, not shared state)
            "version": 3,
            "shape": info.shape,
            "strides": info.strides,
            "typestr": f"|V{info.dtype.itemsize}",
            "data": (pointer, True),
        }

    return np.asarray(Shadow())
