# SPDX-License-Identifier: Apache-2.0
"""Slots on disk: a safetensors file that says which pool it fits, and replaces an older one whole or not at all.

The file holds the arrays of ``Geometry.contents()`` as ``[layers, slots, ...]`` in C order, under their names, so
``safetensors.torch.load_file`` reads it too. Everything else stands in its metadata.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np

from kda_cupy.arrays import HOST
from kda_cupy.errors import KdaError, error
from kda_cupy.pool import tensor_file
from kda_cupy.pool.contents import SlotContents, as_bits
from kda_cupy.pool.geometry import Geometry, Part
from kda_cupy.pool.tensor_file import Entry, MalformedError, read_exactly

FORMAT: Final = "kda_cupy.StatePool"
VERSION: Final = "1"
HEADER_BYTES: Final = 1 << 20
SLOT_BYTES: Final = 24
"""A header that fits a pool has at most so many bytes, and so many for each slot: a number, a comma and a space."""


def save(
    path: str | os.PathLike[str], geometry: Geometry, contents: SlotContents, slots: Sequence[int]
) -> None:
    """Write slots to a file, which takes the place of ``path`` once it is whole and on the disk."""
    parts = _parts(geometry, len(slots))
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "layout": _layout(parts),
        "geometry": _sizes(geometry),
        "slots": json.dumps(list(slots)),
    }
    with contents.queue(), replacing(Path(path)) as file:
        file.write(tensor_file.encode_header(parts, metadata))
        for part in parts:
            for piece, _ in contents.pieces(part.name, slots):
                host = piece if isinstance(piece, np.ndarray) else piece.get()
                file.write(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data)


class SavedSlots(NamedTuple):
    """A file that has been read."""

    slots: list[int]
    """Their numbers when they were saved."""
    arrays: dict[str, Any]
    """In host memory, ``[layers, slots, ...]``."""


def load(
    path: str | os.PathLike[str], geometry: Geometry, rows: int | None, accept: Callable[[list[int]], None]
) -> SavedSlots:
    """Read a file that fits a pool, and holds so many slots if a number is given.

    ``accept`` is asked about the numbers of the slots before the data are read, and raises if they will not do.

    Raises OperandError (KDA-POOL-FILE) for a file that does not, before memory is taken for its data.
    """
    try:
        # Opened so that a pipe cannot make it wait; unbuffered, so that bytes go straight to where they belong.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            header = tensor_file.read_header(file, HEADER_BYTES + SLOT_BYTES * geometry.capacity)
            slots = _check_metadata(header.metadata, geometry)
            if rows not in (None, len(slots)):
                raise MalformedError(f"{len(slots)} saved slots for {rows} slots of the pool")
            parts = _parts(geometry, len(slots))
            _check_tensors(header.tensors, parts)
            accept(slots)
            arrays = {part.name: read_exactly(file, header.tensors[part.name]) for part in parts}
            return SavedSlots(slots, arrays)
    except MalformedError as reason:
        raise _refusal(path, str(reason)) from None


def put(saved: SavedSlots, contents: SlotContents, slots: Sequence[int]) -> None:
    """Write what was loaded to slots. What memory that takes is taken before anything is written."""
    with contents.queue():
        stage = _stage(saved, contents, slots)
        for name, array in saved.arrays.items():
            bits = as_bits(array)
            for piece, where in contents.pieces(name, slots):
                piece[...] = stage(bits[where])


def _stage(saved: SavedSlots, contents: SlotContents, slots: Sequence[int]) -> Callable[[Any], Any]:
    """What brings a piece from host memory to where the pool is."""
    if contents.device == HOST:
        return lambda host: host
    import cupy

    pieces = (piece for name in saved.arrays for piece, _ in contents.pieces(name, slots))
    ours = cupy.cuda.get_current_stream()
    room = cupy.empty(max((piece.size * piece.itemsize for piece in pieces), default=0), np.uint8)

    def move(host: Any) -> Any:
        staged = room[: host.size * host.itemsize].view(host.dtype).reshape(host.shape)
        staged.set(np.ascontiguousarray(host), stream=ours)  # behind the copy out of it of the piece before
        return staged

    return move


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file for writing. When the block ends it takes the place of ``path``; if it fails, nothing has happened.

    A crash at any moment leaves the old file or the new one (and perhaps a hidden ``.*.kda_cupy.tmp`` beside it).
    """
    path = path.resolve()  # what a symbolic link points to is replaced, not the link
    temporary = path.with_name(f".{secrets.token_hex(8)}.kda_cupy.tmp")
    try:
        with temporary.open("xb") as file:
            with suppress(FileNotFoundError):  # whoever may not read the old file shall not read the new one
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk only when the folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parts(geometry: Geometry, n: int) -> list[Part]:
    """The arrays of a slot, for ``n`` slots."""
    return [part._replace(shape=(part.shape[0], n, *part.shape[2:])) for part in geometry.contents()]


def _layout(parts: Sequence[Part]) -> str:
    return json.dumps({part.name: part.axes for part in parts})


def _sizes(geometry: Geometry) -> str:
    sizes = {"layers": geometry.layers, "HV": geometry.HV, "V": geometry.V, "K": geometry.K}
    return json.dumps(sizes | ({} if geometry.activation is None else {"H": geometry.H}))


def _check_metadata(metadata: Mapping[str, str], geometry: Geometry) -> list[int]:
    """Returns the numbers of the saved slots."""
    expected = {
        "format": FORMAT,
        "version": VERSION,
        "geometry": _sizes(geometry),
        "layout": _layout(geometry.contents()),
    }
    for key, wanted in expected.items():
        found = metadata.get(key)
        if found != wanted:
            text = "no" if found is None else f"the {key} {found[:200]}"
            raise MalformedError(f"{text}{f' {key}' * (found is None)} where the pool has {wanted}")
    slots = _slots(metadata)
    if len(set(slots)) < len(slots):
        raise MalformedError("a list of slots that names one twice")
    return slots


def _slots(metadata: Mapping[str, str]) -> list[int]:
    try:
        slots = json.loads(metadata.get("slots", "null"))
    except (ValueError, RecursionError):
        slots = None
    if not isinstance(slots, list) or not all(type(slot) is int and 0 < slot < 1 << 63 for slot in slots):
        raise MalformedError("no list of slots")
    return slots


def _check_tensors(tensors: Mapping[str, Entry], parts: Sequence[Part]) -> None:
    """The very arrays of the pool."""
    expected = {part.name: part for part in parts}
    for name in (*expected, *tensors):
        if name not in tensors or name not in expected:
            raise MalformedError(
                f"a file {'without' if name in expected else 'with'} the tensor {name[:40]!r}"
            )
        found, part = tensors[name], expected[name]
        if (found.shape, found.dtype) != (part.shape, part.dtype):
            came, wanted = (f"{list(each.shape)} {each.dtype}" for each in (found, part))
            raise MalformedError(f"the tensor {name!r} {came} where the pool has {wanted}")


def _refusal(path: str | os.PathLike[str], reason: str) -> KdaError:
    return error("KDA-POOL-FILE", operand="path", got=reason, path=os.fspath(path))
