# SPDX-License-Identifier: Apache-2.0
"""Arrays with memory of their own, between two guards, so that a store beside one is seen.

>>> buffer = Buffer(values, cupy)
>>> operation(buffer.array)
>>> buffer.changed(buffer.now(), except_at=mask)  # guards, gaps between rows and slots, every element but those
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from kda_cupy.arrays import describe

GUARD = 512
"""Bytes in front of and behind each array."""
BYTE = 0xFF
"""Of the guards: NaN in every float type, so that a read of one shows too."""
BOUNDARY = 256


class Buffer:
    """A NumPy array copied into a library's memory, strides and gaps included."""

    def __init__(self, value: Any, library: ModuleType, offset: int = 0) -> None:
        """offset: bytes past a boundary of 256."""
        info, address = describe(value)
        span = info.span_bytes
        self.library = library
        self.backing = library.full(span + 2 * GUARD + BOUNDARY + offset, BYTE, np.uint8)
        start = GUARD + -(address_of(self.backing) + GUARD) % BOUNDARY + offset
        self.before = np.full(len(self.backing), BYTE, np.uint8)
        """What the memory should hold."""
        self.before[start : start + span] = _bytes_at(address, span)
        self.restore()
        self.array = self.view(info.shape, info.dtype, start, info.strides)

    def view(self, shape: tuple[int, ...], dtype: Any, start: int, strides: tuple[int, ...]) -> Any:
        """An array of the library, ``start`` bytes into the memory."""
        if self.library is np:
            return np.ndarray(shape, dtype, buffer=self.backing, offset=start, strides=strides)
        return self.library.ndarray(shape, dtype, memptr=self.backing.data + start, strides=strides)

    def now(self) -> Any:
        """The memory as a NumPy array of bytes; waits for the GPU."""
        return self.backing.copy() if self.library is np else self.backing.get()

    def write(self, value: Any) -> None:
        """Let the array have other values, and the memory hold those."""
        self.seen_in(self.before, self.array)[...] = value
        self.restore()

    def restore(self) -> None:
        """Put back what the memory should hold."""
        self.backing[...] = self.library.asarray(self.before)

    def holds(self, array: Any) -> bool:
        """True if the array begins in this memory."""
        offset = address_of(array) - address_of(self.backing)
        return 0 <= offset < len(self.backing)

    def seen_in(self, memory: Any, array: Any) -> Any:
        """The values of one of this buffer's arrays in a NumPy copy of the memory."""
        offset = address_of(array) - address_of(self.backing)
        return np.ndarray(array.shape, array.dtype, buffer=memory, offset=offset, strides=array.strides)

    def changed(self, memory: Any, array: Any = None, except_at: Any = None) -> int:
        """How many bytes differ from what the memory should hold, those of some elements of an array left out."""
        if except_at is not None and except_at.any():
            expected = self.before.copy()
            self.seen_in(expected, array)[except_at] = self.seen_in(memory, array)[except_at]
        else:
            expected = self.before
        return 0 if expected.tobytes() == memory.tobytes() else int((expected != memory).sum())


def address_of(array: Any) -> int:
    """Of an array of NumPy or CuPy."""
    return describe(array)[1]


def _bytes_at(address: int, span: int) -> Any:
    """A copy of so many bytes of host memory: a view's elements, and what lies between them."""
    if not span:
        return np.zeros(0, np.uint8)

    class Raw:
        __array_interface__ = {  # noqa: RUF012  (a protocol attribute, not shared state)
            "version": 3,
            "shape": (span,),
            "typestr": "|u1",
            "data": (address, True),
        }

    return np.array(np.asarray(Raw()))
