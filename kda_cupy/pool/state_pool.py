# SPDX-License-Identifier: Apache-2.0
"""``StatePool``: the memory that states live in between tokens, and who owns which slot of it."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, overload

import numpy as np

from kda_cupy import bridge
from kda_cupy.arrays import HOST, describe, slide
from kda_cupy.checks import check_dtype, shape_text
from kda_cupy.dtypes import FLOATS
from kda_cupy.errors import error
from kda_cupy.guard import check_errors
from kda_cupy.pool import files, layouts
from kda_cupy.pool.contents import SlotContents
from kda_cupy.pool.geometry import TAPS, Geometry, check_device, check_geometry
from kda_cupy.pool.ledger import SlotLedger, slot_number, slot_numbers
from kda_cupy.pool.snapshot import Snapshot
from kda_cupy.pool.wrapping import check_conv, check_states

Slots = np.ndarray[Any, np.dtype[np.int32]]
"""Slots that belong to the caller: a copy, in host memory."""


class StatePool:
    """Recurrent states of many sequences in one allocation, and the slots that are free.

    ===========  ===================================  ============================================================
    array        shape                                meaning
    ===========  ===================================  ============================================================
    ``state``    float32 [layers, P, HV, V, K]        rows are values V, columns are keys K
    ``conv``     [layers, P, 2*H*K + HV*V, 3]         raw inputs of q, k and v, oldest first; None without an
                                                      ``activation_dtype``. Channels are neighbours in memory
    ===========  ===================================  ============================================================

    They are CuPy arrays on one GPU, or NumPy arrays (``device="cpu"``); ``pool[layer]`` is the ``[P, HV, V, K]`` array
    that the operations take. P is ``capacity + 1``: slot 0 is reserved, never handed out and zero as long as no row
    names it (operations take ``null_index=0``, which makes it padding); user slots are 1 to ``capacity``.

    Slots are plain ints. All methods may be called from several threads. On a GPU they queue their work on CuPy's
    current stream and do not wait for it; it comes after every launch and copy of this package that was queued before
    on that GPU, on whatever stream, and before every later one. Replays of CUDA graphs and other libraries' kernels
    are not seen: order those yourself if they run on another stream.

    >>> pool = StatePool(64, num_value_heads=32, head_k_dim=128, device="cpu")
    >>> with pool.slot() as slot:
    ...     slot, pool.free_slots
    (1, 63)
    """

    _ledger: SlotLedger
    _contents: SlotContents
    _geometry: Geometry

    def __init__(
        self,
        capacity: int,
        num_value_heads: int,
        head_k_dim: int = 128,
        head_v_dim: int | None = None,
        *,
        layers: int = 1,
        device: int | str | None = None,
        num_key_heads: int | None = None,
        activation_dtype: Any = None,
        verify_rows: int = 0,
        verify_tokens: int = 0,
        snapshots: bool = False,
    ) -> None:
        """Allocate and zero a pool.

        capacity: slots to hand out. num_value_heads: HV. head_k_dim: K, a multiple of 4 up to 512. head_v_dim: V,
        default K. layers: leading axis of every array. device: number of the GPU, ``"cpu"`` for NumPy, default CuPy's
        current GPU.

        With ``activation_dtype`` ("bfloat16", "float16", "float32") a slot has a conv history too, for
        ``num_key_heads`` H (default HV) heads of q and k. With ``verify_rows`` and ``verify_tokens`` the pool also
        holds what kda_decode_mtp leaves for kda_commit, for so many requests of so many tokens: replay rings, or a
        state after each token (``snapshots=True``); :meth:`operands` names them.

        Raises OperandError (KDA-POOL-GEOMETRY) for sizes that make no pool, NoGpuError without a GPU.
        """
        geometry = check_geometry(
            capacity,
            num_value_heads,
            head_k_dim,
            head_v_dim,
            layers=layers,
            num_key_heads=num_key_heads,
            activation_dtype=activation_dtype,
            verify_rows=verify_rows,
            verify_tokens=verify_tokens,
            snapshots=snapshots,
        )
        check_device(device)
        contents = {part.name: part.allocate(device) for part in geometry.contents()}
        scratch = {part.name: part.allocate(device) for part in (*geometry.rings(), *geometry.scratch())}
        self._adopt(geometry, contents, scratch, None)

    def _adopt(
        self, geometry: Geometry, contents: Mapping[str, Any], scratch: Mapping[str, Any], original: Any
    ) -> None:
        self._geometry = geometry
        self._contents = SlotContents(contents)
        self._scratch = scratch
        self._original = original  # keeps foreign memory alive
        self._ledger = SlotLedger(geometry.capacity)
        self.state = contents["state"]
        self.conv = contents.get("conv")

    @classmethod
    def wrap(cls, array: Any, conv: Any = None, *, num_key_heads: int | None = None) -> Self:
        """Make a pool of somebody else's buffer ``[P, HV, V, K]`` or ``[layers, P, HV, V, K]``, without copying.

        NumPy, CuPy, or any writable array with DLPack (torch); slots and layers may be padded or interleaved (free
        strides, multiples of 4 elements, as long as no two slots share memory). ``conv``: a conv history
        ``[P, 2*H*K + HV*V, 3]``, with the same leading axes, H being ``num_key_heads`` (default HV); any strides.

        Nothing is written until a slot is allocated; updates are visible in the original. Slot 0 is not handed out here
        either. ``pool[layer]`` is a NumPy or CuPy array: work on it is ordered on CuPy's current stream, and no longer
        on that of the original's library. Raises what :func:`kda_cupy.check_state` raises, BridgeError for what is no
        array, and OperandError (KDA-POOL-GEOMETRY) without a slot besides slot 0.
        """
        states = check_states(bridge.adopt("array", array, written=True))
        contents, dtype = {"state": states}, None
        if conv is not None:
            history = bridge.adopt("conv", conv, written=True)
            contents["conv"] = history[None] if history.ndim == 3 else history
            check_dtype("conv", describe(history)[0], FLOATS)
            dtype = history.dtype
        L, P, HV, V, K = states.shape
        geometry = check_geometry(
            P - 1, HV, K, V, layers=L, num_key_heads=num_key_heads, activation_dtype=dtype
        )
        if conv is not None:
            check_conv(contents["conv"], geometry, states)
        pool = cls.__new__(cls)
        pool._adopt(geometry, contents, {}, (array, conv))
        return pool

    @classmethod
    def for_budget(
        cls,
        budget_bytes: int,
        num_value_heads: int,
        head_k_dim: int = 128,
        head_v_dim: int | None = None,
        *,
        device: int | str | None = None,
        **options: Any,
    ) -> Self:
        """The largest pool that fits into so many bytes; everything but ``capacity`` is as in the constructor.

        Slot 0 and verify scratch count. Raises OperandError (KDA-POOL-GEOMETRY) if not one slot fits.
        """
        smallest = check_geometry(1, num_value_heads, head_k_dim, head_v_dim, **options)
        capacity = smallest.capacity_for(operator.index(budget_bytes))
        if capacity < 1:
            got = f"{budget_bytes:,} bytes where a slot takes {smallest.bytes_per_slot:,}"
            rule = "`budget_bytes` for slot 0, one more slot and the scratch of verify"
            raise error("KDA-POOL-GEOMETRY", operand="budget_bytes", got=got, rule=rule)
        return cls(capacity, num_value_heads, head_k_dim, head_v_dim, device=device, **options)

    def __getitem__(self, layer: int) -> Any:
        """The ``[P, HV, V, K]`` state of one layer (a view)."""
        return self.state[operator.index(layer)]

    def __len__(self) -> int:
        """``capacity``, whatever is in use."""
        return self.capacity

    @property
    def capacity(self) -> int:
        """Number of slots that can be handed out in all: 1 to ``capacity``."""
        return self._geometry.capacity

    @property
    def layers(self) -> int:
        """Length of the leading axis of every array."""
        return self._geometry.layers

    @property
    def free_slots(self) -> int:
        """How many slots are free now."""
        return self._ledger.free

    @property
    def slots_in_use(self) -> Slots:
        """The slots that are in use now, sorted."""
        return np.array(self._ledger.in_use(), np.int32)

    @property
    def device(self) -> int | str:
        """Number of the GPU, or ``"cpu"``."""
        return "cpu" if self._contents.device == HOST else self._contents.device

    @property
    def bytes_per_slot(self) -> int:
        """What one slot takes in all layers: state (``HV * V * K * 4`` a layer), conv history, rings."""
        return self._geometry.bytes_per_slot

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the pool, slot 0 and verify scratch included, gaps of a wrapped buffer not."""
        return self._geometry.nbytes

    def operands(self, layer: int | None = None) -> dict[str, Any]:
        """The pool's arrays by the names of the operations' operands: views, made anew by each call.

        With ``layer``, what kda_decode_mtp takes; without, what kda_commit takes, all layers together:
        ``recurrent_state``, and where the pool has them ``cs_q``, ``cs_k``, ``cs_v``, ``intermediate_conv_q``,
        ``_k``, ``_v`` (windows that slide over raw inputs), and the four ``replayssm_*`` rings or ``intermediate_ssm``.
        """
        arrays = {"recurrent_state": self.state, **self._scratch}
        inputs = arrays.pop("intermediate_conv", None)
        windows = None if inputs is None else slide(inputs)
        for prefix, array in (("cs", self.conv), ("intermediate_conv", windows)):
            if array is not None:
                arrays |= {f"{prefix}_{letter}": part for letter, part in self._split_channels(array)}
        if layer is None:
            return arrays
        return {name: array[operator.index(layer)] for name, array in arrays.items()}

    def _split_channels(self, array: Any) -> Iterator[tuple[str, Any]]:
        """q, k and v of an array whose last axes are channels and taps."""
        sizes = self._geometry
        first = 0
        for letter, width in (("q", sizes.H * sizes.K), ("k", sizes.H * sizes.K), ("v", sizes.HV * sizes.V)):
            yield letter, array[..., first : first + width, :]
            first += width

    # Slots

    @overload
    def allocate(self) -> int: ...
    @overload
    def allocate(self, n: int) -> Slots: ...
    def allocate(self, n: int | None = None) -> Any:
        """Hand out one slot (an int) or ``n`` of them (an int32 NumPy array that is yours), zeroed in every layer.

        All or nothing: raises PoolExhausted and takes none if fewer are free.
        """
        slots = self._ledger.take(_count(n))
        with self._giving_back(slots):
            self._contents.zero(slots)
        return slots[0] if n is None else np.array(slots, np.int32)

    @contextmanager
    def _giving_back(self, slots: list[int]) -> Iterator[None]:
        """If the block fails, nothing has been taken."""
        try:
            yield
        except BaseException:
            self._ledger.give_back(slots)
            raise

    @contextmanager
    def _overwriting(self, slots: list[int]) -> Iterator[None]:
        """If the block fails (out of memory, a GPU in an error state), the exception says what is lost."""
        try:
            yield
        except BaseException as cause:
            cause.add_note(
                f"StatePool: slots {', '.join(map(str, slots))} were being overwritten, and what is in them is neither "
                f"old nor new; they are still in use, and all other slots are as they were."
            )
            raise

    def release(self, slots: int | Iterable[int]) -> None:
        """Give slots back. All or nothing: raises SlotError and frees none if one is free, reserved or out of range."""
        self._ledger.give_back(slot_numbers(slots))

    @contextmanager
    def slot(self) -> Iterator[int]:
        """``with pool.slot() as s``: a slot for the length of a block, given back however the block ends."""
        slot = self.allocate()
        try:
            yield slot
        finally:
            self.release(slot)

    @overload
    def fork(self, slot: int) -> int: ...
    @overload
    def fork(self, slot: int, n: int) -> Slots: ...
    def fork(self, slot: int, n: int | None = None) -> Any:
        """Hand out one new slot (an int) or ``n`` (an int32 array) that go on from what is in ``slot``.

        State and conv history are copied, in every layer; what a verify has left for its commit is not, so commit
        first. All or nothing: raises SlotError if ``slot`` is not in use, PoolExhausted if too few are free.
        """
        source = slot_number(slot)
        self._ledger.check_in_use([source])
        targets = self._ledger.take(_count(n))
        with self._giving_back(targets):
            self._contents.copy(source, targets)
        return targets[0] if n is None else np.array(targets, np.int32)

    # Copies

    def snapshot(self, slots: int | Iterable[int]) -> Snapshot:
        """Copy slots to memory of their own, on the same device. Raises SlotError unless all are in use."""
        names = slot_numbers(slots)
        self._ledger.check_in_use(names)
        return Snapshot(tuple(names), self._contents.take(names), self.device)

    def restore(self, snapshot: Snapshot, slots: int | Iterable[int] | None = None) -> None:
        """Write a snapshot back to the slots it was taken from, or to as many others (of another pool too).

        Raises SlotError unless all are in use and different, OperandError (KDA-POOL-SNAPSHOT) if the snapshot does not
        fit; nothing is written then.
        """
        names = list(snapshot.slots) if slots is None else slot_numbers(slots)
        self._check_snapshot(snapshot, len(names))
        self._ledger.check_in_use(names, written=True)
        with self._overwriting(names):
            self._contents.put(snapshot.arrays, names)
        bridge.after_launch(self._contents.device, snapshot)  # its memory may have come from another stream

    def _check_snapshot(self, snapshot: Snapshot, n: int) -> None:
        def layout(arrays: Mapping[str, Any]) -> str:
            each = (
                f"{name} {shape_text((len(array), len(snapshot), *array.shape[2:]))} {array.dtype}"
                for name, array in arrays.items()
            )
            return ", ".join(each)

        mine = f"{layout(self._contents.arrays)} on {_place(self.device)}"
        theirs = f"{layout(snapshot.arrays)} on {_place(snapshot.device)}"
        if n != len(snapshot):
            mine, theirs = f"{n} slots", f"a snapshot of {len(snapshot)}"
        if mine != theirs:
            raise error("KDA-POOL-SNAPSHOT", operand="snapshot", got=theirs, wanted_layout=mine)

    def save(self, path: str | os.PathLike[str], slots: int | Iterable[int] | None = None) -> None:
        """Write slots (default: all that are in use) to a safetensors file.

        The file takes the place of an older one only when it is whole and on the disk: a crash leaves one of the two.
        It says which pool it fits. Waits for the GPU; leave the slots alone meanwhile. Raises SlotError unless all
        slots are in use, OSError if the disk refuses.
        """
        names = self._ledger.in_use() if slots is None else slot_numbers(slots)
        self._ledger.check_in_use(names, written=True)
        files.save(path, self._geometry, self._contents, names)

    def load(self, path: str | os.PathLike[str], slots: int | Iterable[int] | None = None) -> Slots:
        """Read slots that :meth:`save` wrote, and return their numbers in the order of the file.

        By default each gets the number that it was saved under, which must be free (in a new pool all are). With
        ``slots``, which are in use, their contents are replaced in the order of the file.

        All or nothing: raises OperandError (KDA-POOL-FILE) for a file that is cut, foreign, or of a pool with other
        sizes, layers, dtypes or layout; SlotError for a number that is not free or a slot that is not in use. Reads the
        data to host memory first.
        """
        if slots is not None:
            names = slot_numbers(slots)
            self._ledger.check_in_use(names, written=True)
            saved = files.load(path, self._geometry, len(names), accept=lambda saved: None)
            with self._overwriting(names):
                files.put(saved, self._contents, names)
            return np.array(names, np.int32)
        saved = files.load(path, self._geometry, None, accept=self._ledger.check_free)
        self._ledger.take_these(saved.slots)
        with self._giving_back(saved.slots):
            files.put(saved, self._contents, saved.slots)
        return np.array(saved.slots, np.int32)

    # Other projects' layouts

    def import_state(
        self,
        array: Any,
        slots: int | Iterable[int] | None = None,
        *,
        layout: str,
        layer: int | None = None,
    ) -> Slots:
        """Copy states from another project into slots, and return the slots.

        ``layout`` says what the last two axes of ``array`` are and is never guessed: "KV" for [n, HV, K, V]
        (flash-linear-attention and its prefill kernels), "VK" for [n, HV, V, K] (this package). float32, or bfloat16 or
        float16, which become float32 exactly; on the pool's device; any strides, any library with DLPack.

        ``slots`` (n of them, in use) are written; by default n new ones are allocated, all or nothing. ``layer``: which
        layer; by default the only one, or all of them from an array with a leading axis [layers, n, ...].
        Nothing but the state of these layers is written; new slots are zero otherwise.
        """
        native = bridge.adopt("array", array)
        layouts.check_layout(layout)
        state = self._of_layers(layer)
        layered = layer is None and self.layers > 1
        source = layouts.check_import(native, layout, state, layered=layered)
        n = source.shape[1]
        names = None if slots is None else slot_numbers(slots)
        if names is None:
            names = self._ledger.take(n)
            with self._giving_back(names):
                self._contents.zero(names)
                self._write_states(state, source, names)
        else:
            if len(names) != n:
                got = f"{n} states for {len(names)} slots"
                raise error("KDA-STATE-LAYOUT", operand="array", got=got, layout=f"[n={len(names)}, HV, ..]")
            self._ledger.check_in_use(names, written=True)
            with self._overwriting(names):
                self._write_states(state, source, names)
        bridge.after_launch(self._contents.device, (array, native))
        return np.array(names, np.int32)

    def _write_states(self, state: Any, source: Any, slots: list[int]) -> None:
        with self._contents.queue():
            layouts.write(state, source, slots)

    def export_state(self, slots: int | Iterable[int], *, layout: str, layer: int | None = None) -> Any:
        """Copy the states of slots to a new float32 array, ``layout`` "KV" or "VK" and ``layer`` as in import_state.

        [n, HV, K, V] or [n, HV, V, K], with a leading axis of layers if the pool has several and ``layer`` is None;
        NumPy or CuPy, contiguous. Raises SlotError unless all slots are in use.
        """
        layouts.check_layout(layout)
        state = self._of_layers(layer)
        names = slot_numbers(slots)
        self._ledger.check_in_use(names)
        with self._contents.queue():
            out = layouts.read(state, layout, names)
        return out if layer is None and self.layers > 1 else out[0]

    def _of_layers(self, layer: int | None) -> Any:
        """The state of one layer or of all, with its leading axis."""
        if layer is None:
            return self.state
        number = operator.index(layer)
        if not 0 <= number < self.layers:
            rule = f"`layer` from 0 to {self.layers - 1}"
            raise error("KDA-POOL-GEOMETRY", operand="layer", got=f"layer={number}", rule=rule)
        return self.state[number : number + 1]

    # Reports

    def check(self) -> None:
        """Raise what launches on the pool's device have recorded: :func:`kda_cupy.check_errors` of that device.

        SlotError for a slot, row, length or count out of range since the last check, in any pool there.
        """
        check_errors(self.device)

    def __repr__(self) -> str:
        sizes = self._geometry
        extras = ""
        if sizes.activation is not None:
            extras = f" + conv [{sizes.channels}, {TAPS}] {sizes.activation}"
        if self._scratch:
            kind = "snapshots" if sizes.snapshots else "rings"
            extras += f" + {kind} of {sizes.verify_tokens} tokens"
        wrapped = ", wrapped" if self._original is not None else ""
        return (
            f"<StatePool {self.capacity - self.free_slots} of {self.capacity} slots in use, {self.layers} layer(s), "
            f"[HV={sizes.HV}, V={sizes.V}, K={sizes.K}] float32{extras}, {self.nbytes / 2**30:.3g} GiB on "
            f"{_place(self.device)}{wrapped}>"
        )


def _count(n: int | None) -> int:
    count = 1 if n is None else operator.index(n)
    if count < 0:
        raise error("KDA-POOL-GEOMETRY", operand="n", got=f"n={n}", rule="`n` >= 0")
    return count


def _place(device: int | str) -> str:
    return device if isinstance(device, str) else f"cuda:{device}"
