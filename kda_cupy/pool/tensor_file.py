# SPDX-License-Identifier: Apache-2.0
"""The safetensors container, written and read without that library: 8 bytes of length, a JSON header, raw bytes.

A reader trusts nothing: every number of the header is checked against the others and against the size of the file
before anybody allocates a byte by it. Nothing here knows of pools.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

import numpy as np

from kda_cupy.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, INT64

MAX_HEADER_BYTES: Final = 100_000_000
"""What the library reads."""
_NAMES: Final = {FLOAT32: "F32", BFLOAT16: "BF16", FLOAT16: "F16", INT32: "I32", INT64: "I64"}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"


class Tensor(Protocol):
    """What :func:`encode_header` needs to know."""

    @property
    def name(self) -> str:
        """Its key."""

    @property
    def shape(self) -> tuple[int, ...]:
        """In C order."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """A type of ``dtypes.py``."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""


class Entry(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int
    """Where its bytes begin, from the beginning of the file."""
    nbytes: int


class Header(NamedTuple):
    """What a file says of itself, once it has been found to be true."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]


class MalformedError(ValueError):
    """A file that is none of this format, and what is wrong with it."""


def encode_header(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file in which the bytes of the tensors follow in this order."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        shape, offsets = list(tensor.shape), [begin, end]
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": offsets}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(file: BinaryIO, most_bytes: int = MAX_HEADER_BYTES) -> Header:
    """Read and check the header of a file that stands at its beginning. Raises MalformedError.

    most_bytes: of the header. Parsed JSON takes up to some twenty times the memory of its text.
    """
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise MalformedError("no regular file")
    if status.st_size < _LENGTH_BYTES:
        raise MalformedError(f"{status.st_size} bytes, too few for a header")
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    room = min(status.st_size - _LENGTH_BYTES, most_bytes)
    if not 2 <= length <= room:
        raise MalformedError(f"a header of {length} bytes where {room} are possible")
    header = _parse(file.read(length))
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise MalformedError("metadata that are no texts")
    start = _LENGTH_BYTES + length
    tensors = {name: _entry(name, value, start) for name, value in header.items()}
    end = start
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].begin):
        if entry.begin != end:
            raise MalformedError(f"the bytes of {name!r} do not follow those of the tensor before")
        end += entry.nbytes
    if end != status.st_size:
        raise MalformedError(f"{status.st_size} bytes where the header says {end}")
    return Header(tensors, metadata)


def read_exactly(file: BinaryIO, entry: Entry) -> Any:
    """The tensor as a NumPy array. MalformedError if the file became shorter in the meantime."""
    array = np.empty(entry.shape, entry.dtype)
    left = array.reshape(-1).view(np.uint8).data
    file.seek(entry.begin)
    while left:
        got = file.readinto(left)  # type: ignore[attr-defined]
        if not got:
            raise MalformedError("a file that was cut while it was read")
        left = left[got:]
    return array


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as reason:  # JSON, UTF-8, numbers of thousands of digits, nesting
        first = str(reason).partition("\n")[0][:100]
        raise MalformedError(f"a header that is no JSON ({first})") from None
    if not isinstance(header, dict):
        raise MalformedError("a header that is no JSON object")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands there twice")
    return made


def _entry(name: str, value: Any, start: int) -> Entry:
    """What the header says of one tensor, its numbers found to agree."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedError(f"a tensor {name!r} without dtype, shape and data_offsets")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise MalformedError(f"a tensor {name!r} of dtype {str(kind)[:20]!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > 32:
        raise MalformedError(f"a tensor {name!r} whose shape or offsets are no whole numbers")
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise MalformedError(f"a tensor {name!r} with {end - begin} bytes where its shape takes {nbytes}")
    return Entry(tuple(shape), dtype, start + begin, nbytes)


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(
        type(number) is int and 0 <= number < 1 << 63 for number in numbers
    )
