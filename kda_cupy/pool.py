# SPDX-License-Identifier: Apache-2.0
"""``StatePool``: the memory that states live in between tokens, and who owns which slot of it."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, overload

import numpy as np

from kda_cupy import bridge
from kda_cupy.arrays import ArrayInfo, describe, is_numpy
from kda_cupy.checks import MAX_K, STATE_AXES, check_state, shape_text, strides_text
from kda_cupy.errors import error
from kda_cupy.gpu import require_gpu

RESERVED = 0
"""Slot 0 is never handed out, so that engines can point padding at it."""
_SIZES = f"layers >= 1, capacity >= 1 (P >= 2), HV >= 1, V >= 1 and K = 4, 8, .., {MAX_K}"
_ALIGNMENT = 256


class StatePool:
    """Recurrent states of many sequences in one allocation, and the slots that are free.

    ``state`` is float32 ``[layers, P, HV, V, K]`` (rows are values V, columns are keys K), on one GPU (CuPy) or in host
    memory (NumPy, ``device="cpu"``); ``pool[layer]`` is the ``[P, HV, V, K]`` array that the operations take.
    P is ``capacity + 1``: slot 0 is reserved, never handed out and zero as long as no row names it (operations
    take ``null_index=0``, which makes it padding); user slots are 1 to ``capacity``.

    Slots are plain ints. They come back zeroed, on CuPy's current stream of the pool's device; whoever uses another
    stream orders it behind that one. All methods may be called from several threads.

    >>> pool = StatePool(64, num_value_heads=32, head_k_dim=128, device="cpu")
    >>> with pool.slot() as slot:
    ...     slot, pool.free_slots
    (1, 63)
    """

    def __init__(
        self,
        capacity: int,
        num_value_heads: int,
        head_k_dim: int = 128,
        head_v_dim: int | None = None,
        *,
        layers: int = 1,
        device: int | str | None = None,
    ) -> None:
        """Allocate and zero a pool.

        capacity: slots to hand out. num_value_heads: HV. head_k_dim: K, a multiple of 4 up to 512. head_v_dim: V,
        default K. layers: leading axis of ``state``. device: number of the GPU, ``"cpu"`` for NumPy, default CuPy's
        current GPU. Raises OperandError (KDA-POOL-GEOMETRY) for sizes that make no pool, NoGpuError without a GPU.
        """
        head_v_dim = head_k_dim if head_v_dim is None else head_v_dim
        sizes = (layers, capacity, num_value_heads, head_v_dim, head_k_dim)
        whole = all(isinstance(size, Integral) and size > 0 for size in sizes)
        if not whole or head_k_dim % 4 or head_k_dim > MAX_K:
            raise error(
                "KDA-POOL-GEOMETRY", got=f"layers, capacity, HV, V, K = {shape_text(sizes)}", rule=_SIZES
            )
        L, slots, HV, V, K = map(int, sizes)
        self._adopt(_zeros((L, slots + 1, HV, V, K), device), None)

    def _adopt(self, state: Any, original: Any) -> None:
        self.state = state
        self._original = original  # keeps foreign memory alive
        self._lock = threading.Lock()
        self._free = list(range(self.capacity, RESERVED, -1))  # the end is handed out first
        self._in_use: set[int] = set()

    @classmethod
    def wrap(cls, array: Any) -> StatePool:
        """Make a pool of somebody else's buffer ``[P, HV, V, K]`` or ``[layers, P, HV, V, K]``, without copying.

        NumPy, CuPy, or any writable array with DLPack (torch); slots and layers may be padded or interleaved (free
        strides, multiples of 4 elements, as long as no two slots share memory). Nothing is written until a slot is
        allocated; updates are visible in the original. Slot 0 is not handed out here either. ``pool[layer]`` is a NumPy
        or CuPy array: work on it is ordered on CuPy's current stream, and no longer on that of the original's library.
        Raises what :func:`kda_cupy.check_state` raises, BridgeError for what is no array, and OperandError
        (KDA-POOL-GEOMETRY) without a slot besides slot 0.
        """
        native = bridge.adopt("array", array, written=True)
        if native.ndim not in (4, 5):
            raise error(
                "KDA-STATE-RANK",
                operand="array",
                got=f"shape {shape_text(native.shape)}",
                rank=native.ndim,
                axes=f"{STATE_AXES} or [layers, {STATE_AXES[1:]}",
            )
        layers = native if native.ndim == 5 else native[None]
        if not layers.shape[0]:
            raise error("KDA-POOL-GEOMETRY", operand="array", got="no layers", rule=_SIZES)
        for layer in layers[:2]:  # the others follow the same stride
            check_state(layer, layer.shape[1])
        _check_slots_apart(describe(layers)[0])
        if layers.shape[1] < 2:
            got = f"P={layers.shape[1]}, and slot 0 is reserved"
            raise error("KDA-POOL-GEOMETRY", operand="array", got=got, rule=_SIZES)
        pool = cls.__new__(cls)
        pool._adopt(layers, array)
        return pool

    def __getitem__(self, layer: int) -> Any:
        """The ``[P, HV, V, K]`` state of one layer (a view)."""
        return self.state[operator.index(layer)]

    def __len__(self) -> int:
        """``capacity``, whatever is in use."""
        return self.capacity

    @property
    def capacity(self) -> int:
        """Number of slots that can be handed out in all: 1 to ``capacity``."""
        return int(self.state.shape[1]) - 1

    @property
    def layers(self) -> int:
        """Length of the leading axis of ``state``."""
        return int(self.state.shape[0])

    @property
    def free_slots(self) -> int:
        """How many slots are free now."""
        return len(self._free)

    @property
    def device(self) -> int | str:
        """Number of the GPU, or ``"cpu"``."""
        return "cpu" if is_numpy(self.state) else int(self.state.device.id)

    @property
    def bytes_per_slot(self) -> int:
        """State bytes of one slot, all layers: ``layers * HV * V * K * 4``."""
        layers, _, HV, V, K = self.state.shape
        return int(layers * HV * V * K * self.state.itemsize)

    @overload
    def allocate(self) -> int: ...
    @overload
    def allocate(self, n: int) -> np.ndarray[Any, np.dtype[np.int32]]: ...
    def allocate(self, n: int | None = None) -> Any:
        """Hand out one slot (an int) or ``n`` of them (an int32 NumPy array that is yours), zeroed in every layer.

        All or nothing: raises PoolExhausted and takes none if fewer are free.
        """
        count = 1 if n is None else operator.index(n)
        if count < 0:
            raise error("KDA-POOL-GEOMETRY", operand="n", got=f"allocate({n})", rule="`n` >= 0")
        with self._lock:
            if count > len(self._free):
                raise error(
                    "KDA-POOL-EXHAUSTED",
                    operand="n",
                    got=f"a request for {count}",
                    free=len(self._free),
                    capacity=self.capacity,
                )
            slots = [self._free.pop() for _ in range(count)]
            self._in_use.update(slots)
        try:
            self._zero(slots)
        except BaseException:
            self.release(slots)
            raise
        return slots[0] if n is None else np.array(slots, np.int32)

    def _zero(self, slots: list[int]) -> None:
        """Written, not multiplied: a NaN must not survive."""
        if is_numpy(self.state):
            self.state[:, slots] = 0
            return
        with self.state.device:
            for first, end in _runs(slots):
                self.state[:, first:end].fill(0)

    def release(self, slots: int | Iterable[int]) -> None:
        """Give slots back. All or nothing: raises SlotError and frees none if one is free, reserved or out of range."""
        one = hasattr(slots, "__index__") and not getattr(slots, "ndim", 0)
        names: Any = [slots] if one else slots
        wanted = [operator.index(slot) for slot in names]
        with self._lock:
            seen: set[int] = set()
            for row, slot in enumerate(wanted):
                if slot == RESERVED:
                    raise error("KDA-POOL-RESERVED", operand="slots", got=f"slots[{row}] = {slot}")
                if not 0 < slot <= self.capacity:
                    place, allowed = f"slots[{row}]", f"a slot from 1 to {self.capacity}"
                    got = f"slot {slot}"
                    raise error(
                        "KDA-VALUE-SLOT-RANGE", operand="slots", got=got, place=place, allowed=allowed
                    )
                if slot not in self._in_use or slot in seen:
                    raise error("KDA-POOL-DOUBLE-RELEASE", operand="slots", got=f"slot {slot}")
                seen.add(slot)
            self._in_use -= seen
            self._free.extend(reversed(wanted))

    @contextmanager
    def slot(self) -> Iterator[int]:
        """``with pool.slot() as s``: a slot for the length of a block, given back however the block ends."""
        slot = self.allocate()
        try:
            yield slot
        finally:
            self.release(slot)

    def __repr__(self) -> str:
        layers, _, HV, V, K = self.state.shape
        gib = self.state.nbytes / 2**30
        where = self.device if self.device == "cpu" else f"cuda:{self.device}"
        wrapped = ", wrapped" if self._original is not None else ""
        return (
            f"<StatePool {self.capacity - self.free_slots} of {self.capacity} slots in use, {layers} layer(s), "
            f"[HV={HV}, V={V}, K={K}] float32, {gib:.3g} GiB on {where}{wrapped}>"
        )


def _zeros(shape: tuple[int, ...], device: int | str | None) -> Any:
    if device == "cpu":
        return _aligned_host_zeros(shape)
    rule = '`device` to be "cpu", None or the number of a GPU'
    if isinstance(device, str):
        raise error("KDA-POOL-GEOMETRY", operand="device", got=f"device={device!r}", rule=rule)
    cupy = require_gpu()
    gpus = cupy.cuda.runtime.getDeviceCount()
    if device is not None and not 0 <= device < gpus:
        raise error(
            "KDA-POOL-GEOMETRY", operand="device", got=f"device={device!r}, with {gpus} here", rule=rule
        )
    with cupy.cuda.Device(device):
        return cupy.zeros(shape, np.float32)  # CuPy allocates in units of 512 bytes


def _aligned_host_zeros(shape: tuple[int, ...]) -> Any:
    size = math.prod(shape) * 4
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(np.float32).reshape(shape)


def _check_slots_apart(info: ArrayInfo) -> None:
    """No two slots of any layers overlap: of slots and layers, one nests in the other's stride."""
    taken = math.prod(info.shape[2:]) * info.dtype.itemsize
    for stride, length in sorted(zip(info.strides[:2], info.shape[:2], strict=True)):
        if length > 1:
            if stride < taken:
                raise error("KDA-STATE-STRIDES", operand="array", got=strides_text(info))
            taken += (length - 1) * stride


def _runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """The slots as half-open ranges, as few as can be: each becomes one fill."""
    ordered = sorted(slots)
    breaks = [i for i in range(1, len(ordered)) if ordered[i] != ordered[i - 1] + 1]
    for start, stop in zip([0, *breaks], [*breaks, len(ordered)], strict=True):
        if start < stop:
            yield ordered[start], ordered[stop - 1] + 1
