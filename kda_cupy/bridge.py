# SPDX-License-Identifier: Apache-2.0
"""Arrays from other libraries, without copies, through DLPack.

Any object with ``__dlpack__`` and ``__dlpack_device__`` (torch, JAX, ...) becomes a CuPy or NumPy view of its own
memory. The capsule is read here rather than by ``cupy.from_dlpack``, which does not see the read-only flag and
refuses bfloat16 in host memory (as NumPy does). It stays unconsumed: the view holds on to it, and when the view
goes, the capsule's own destructor tells the producer.

Streams. The producer is asked for the array on CuPy's current stream, so the work it has queued comes first. Once
the operation is launched, :func:`after_launch` makes the producer's stream wait in turn where we can know it (torch),
and keeps the operands alive until the GPU is done (and, since only a later launch looks, the last ones until then).
While a graph is being captured none of this is possible, and none is done: capture with both libraries on one stream.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
from collections import deque
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

import numpy as np

from kda_cupy.arrays import HOST, is_cupy, is_numpy
from kda_cupy.dtypes import BFLOAT16
from kda_cupy.errors import KdaError, error
from kda_cupy.gpu import require_gpu

# dlpack.h: DLDeviceType and DLDataTypeCode.
_HOST_TYPES: Final = (1, 3)  # CPU, and pinned CPU memory
_CUDA_TYPES: Final = (2, 13)  # CUDA, and managed memory
_DTYPES: Final = {
    (code, 8 * size): np.dtype(f"{letter}{size}")
    for code, letter, sizes in (
        (0, "i", (1, 2, 4, 8)),
        (1, "u", (1, 2, 4, 8)),
        (2, "f", (2, 4, 8)),
        (5, "c", (8, 16)),
        (6, "b", (1,)),
    )
    for size in sizes
} | {(4, 16): BFLOAT16}
"""By type code and bits."""
_READ_ONLY_FLAG: Final = 1
_COPIED_FLAG: Final = 2
_MAJOR_VERSION: Final = 1
_WISHES: Final[tuple[dict[str, Any], ...]] = (
    {"max_version": (_MAJOR_VERSION, 0), "copy": False},
    {"max_version": (_MAJOR_VERSION, 0)},  # early producers of DLPack 1.0; those from before it know neither
)
_NO_ORDERING: Final = -1
_LEGACY_DEFAULT_STREAM: Final = 1


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned; the older DLManagedTensor begins with the tensor itself."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def is_native(array: object) -> bool:
    """True for what the rest of the package works on: NumPy and CuPy arrays."""
    return is_numpy(array) or is_cupy(array)


def all_native(arrays: Iterable[object]) -> bool:
    """True if every array is NumPy's, CuPy's or None. Looks at each type once: this is a hot path."""
    one_of_each = {type(array): array for array in arrays}
    return all(array is None or is_native(array) for array in one_of_each.values())


def adopt(name: str, array: Any, *, written: bool = False) -> Any:
    """Return ``array`` as a NumPy or CuPy view of the same memory.

    NumPy and CuPy arrays come back as they are. ``written`` says that the operation writes to it.
    Raises BridgeError (TypeError) for what is no array and for raw capsules, OperandError for element types that
    NumPy does not know, for negative strides and for read-only memory that is to be written, NoGpuError.
    """
    return _adopt(name, array, _place(name, array), written)


def adopt_all(operands: Mapping[str, Any], written: Container[str] = ()) -> dict[str, Any]:
    """:func:`adopt` for the operands of one call; None stays None.

    A mixture of host and device memory is refused by name (DeviceError) before the first array is exported.
    """
    places = {name: _place(name, array) for name, array in operands.items() if array is not None}
    in_host = [name for name, place in places.items() if place == HOST]
    on_gpu = [name for name, place in places.items() if place != HOST]
    if in_host and on_gpu:
        got = f"`{in_host[0]}` in host memory and `{on_gpu[0]}` on cuda:{places[on_gpu[0]]}"
        raise error("KDA-ARRAY-HOST-ON-DEVICE", operand=in_host[0], got=got, other=on_gpu[0])
    return {
        name: None if array is None else _adopt(name, array, places[name], name in written)
        for name, array in operands.items()
    }


def _place(name: str, array: Any) -> int:
    """Number of the GPU that an array lives on, or HOST. Refuses what is no array."""
    if isinstance(array, np.ma.MaskedArray):
        raise error("KDA-ARRAY-KIND", operand=name, got="a masked array, whose mask would be lost")
    if isinstance(array, np.ndarray):
        return HOST
    if is_cupy(array):
        return int(array.data.device_id)
    if type(array).__name__ == "PyCapsule":
        raise error("KDA-ARRAY-CAPSULE", operand=name, got="a PyCapsule")
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        kind = f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")
        raise error("KDA-ARRAY-KIND", operand=name, got=kind)
    try:
        device_type, device = (int(number) for number in array.__dlpack_device__())
    except Exception as cause:  # whatever a producer raises is its way to refuse
        raise _refusal(name, array, cause) from cause
    if device_type in _HOST_TYPES:
        return HOST
    if device_type in _CUDA_TYPES:
        return device
    kind = f"{type(array).__qualname__} on DLPack device type {device_type}"
    raise error("KDA-ARRAY-KIND", operand=name, got=kind)


def _adopt(name: str, array: Any, place: int, written: bool) -> Any:
    if is_native(array):
        return array
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    if getattr(array, "requires_grad", False):
        array = array.detach()
    if hasattr(array, "is_neg") and array.is_neg():
        # torch negates such a view whenever it reads it, which DLPack cannot say.
        kind = f"{type(array).__qualname__} with its negative bit set"
        raise error("KDA-ARRAY-KIND", operand=name, got=kind)
    capsule = _export(name, array) if place == HOST else _export_on_gpu(name, array, place)
    tensor, flags = _read(name, capsule)
    read_only = bool(flags) or _is_immutable(array)
    if flags & _COPIED_FLAG and not written:
        kind = f"{type(array).__qualname__}, which hands out a copy of itself"
        raise error("KDA-ARRAY-KIND", operand=name, got=kind)
    if written and read_only:
        raise error(
            "KDA-ARRAY-READ-ONLY", operand=name, got=f"{type(array).__qualname__} in read-only memory"
        )
    if place == HOST:
        return _host_view(name, tensor, read_only, capsule)
    return _device_view(name, tensor, place, (capsule, array))


def _is_immutable(array: object) -> bool:
    """JAX arrays are immutable, and their older capsules cannot say so."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def _refusal(name: str, array: Any, cause: Exception) -> KdaError:
    return error("KDA-ARRAY-KIND", operand=name, got=f"{type(array).__qualname__}, which refused: {cause}")


def _export(name: str, array: Any, stream: int | None = None) -> Any:
    """Ask for a versioned capsule of the array's own memory, and older producers for what they know to give.

    A copy would be made on every call, and a bound call would never see what is written to the original later.
    """
    ordering = {} if stream is None else {"stream": stream}
    try:
        for wish in _WISHES:
            try:
                return array.__dlpack__(**ordering, **wish)
            except TypeError:
                continue
        return array.__dlpack__(**ordering)
    except Exception as cause:  # whatever a producer raises is its way to refuse
        raise _refusal(name, array, cause) from cause


def _export_on_gpu(name: str, array: Any, device: int) -> Any:
    """Ask for the array on CuPy's current stream of its device, as DLPack numbers streams."""
    cuda = _cupy().cuda
    with cuda.Device(device):  # torch exports from the current device only
        stream = cuda.get_current_stream()
        if not stream.is_capturing():
            return _export(name, array, stream.ptr or _LEGACY_DEFAULT_STREAM)
        # JAX takes "no ordering" for a stream of that number, and crashes.
        return _export(name, array, None if _is_immutable(array) else _NO_ORDERING)


@functools.cache
def _cupy() -> Any:
    return require_gpu()


def _read(name: str, capsule: Any) -> tuple[_Tensor, int]:
    """The tensor in a capsule, and the flags that keep it from being written to: read-only, copied."""
    kind = _capsule_name(capsule) if type(capsule).__name__ == "PyCapsule" else None
    if kind == b"dltensor":
        return _Tensor.from_address(_capsule_pointer(capsule, kind)), 0
    if kind == b"dltensor_versioned":
        managed = _Versioned.from_address(_capsule_pointer(capsule, kind))
        if managed.major == _MAJOR_VERSION:
            return managed.tensor, managed.flags & (_READ_ONLY_FLAG | _COPIED_FLAG)
        raise error("KDA-ARRAY-KIND", operand=name, got=f"DLPack version {managed.major}.{managed.minor}")
    # Used capsules end here too: their memory belongs to somebody else by now.
    handed_out = f"a capsule named {kind.decode()}" if kind else type(capsule).__name__
    raise error("KDA-ARRAY-KIND", operand=name, got=f"a producer that hands out {handed_out}")


def _layout(name: str, tensor: _Tensor) -> tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any], int]:
    """Shape, strides in bytes, dtype, address."""
    dtype = _dtype(name, tensor)
    size = dtype.itemsize
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[axis] * size for axis in range(tensor.ndim))
    else:  # NULL means C order
        strides = tuple(size * math.prod(shape[axis + 1 :]) for axis in range(tensor.ndim))
    # Producers write anything, 2**62 included, as the stride of an axis that is never stepped along.
    strides = tuple(stride if length > 1 else size for length, stride in zip(shape, strides, strict=True))
    if min(strides, default=0) < 0:
        raise error("KDA-ARRAY-NEGATIVE-STRIDE", operand=name, got=f"strides {list(strides)} bytes")
    if not tensor.data and 0 not in shape:
        raise error("KDA-ARRAY-KIND", operand=name, got="an array without memory")
    return shape, strides, dtype, (tensor.data or 0) + tensor.byte_offset


def _dtype(name: str, tensor: _Tensor) -> np.dtype[Any]:
    dtype: np.dtype[Any] | None = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        got = f"DLPack type code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lane(s)"
        raise error("KDA-ARRAY-DTYPE", operand=name, got=got, wanted_dtype="of a number type that NumPy has")
    return dtype


class _HostMemory:
    """Array interface of a capsule in host memory; NumPy keeps it as the base of the view."""

    def __init__(self, interface: dict[str, Any], capsule: Any) -> None:
        self.__array_interface__ = interface
        self.capsule = capsule


def _host_view(name: str, tensor: _Tensor, read_only: bool, capsule: Any) -> Any:
    shape, strides, dtype, address = _layout(name, tensor)
    if 0 in shape:
        return np.empty(shape, dtype)
    letter = "u" if dtype == BFLOAT16 else dtype.kind
    interface = {
        "version": 3,
        "shape": shape,
        "strides": strides,
        "typestr": f"<{letter}{dtype.itemsize}",
        "data": (address, read_only),
    }
    return np.asarray(_HostMemory(interface, capsule)).view(dtype)


def _device_view(name: str, tensor: _Tensor, device: int, owner: Any) -> Any:
    import cupy

    shape, strides, dtype, address = _layout(name, tensor)
    steps = ((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    size = 0 if 0 in shape else sum(steps) + dtype.itemsize
    memory = cupy.cuda.UnownedMemory(address, size, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def empty_like_caller(caller: Any, native: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Allocate an output of the caller's own array type.

    ``caller`` is an operand as it was passed, ``native`` the NumPy or CuPy view of it that decides dtype and
    device. Returns ``(what to hand back, what to write to)``, which share memory. Libraries whose arrays cannot be
    written to (JAX) get None as the first; :func:`hand_back` makes theirs from the finished array.
    """
    if is_native(caller):
        made = _native_empty(native, shape)
        return made, made
    if hasattr(caller, "new_empty"):  # torch
        made = caller.new_empty(shape)
        return made, adopt("out", made, written=True)
    return None, _native_empty(native, shape)


def _native_empty(native: Any, shape: tuple[int, ...]) -> Any:
    if is_numpy(native):
        return np.empty(shape, native.dtype)
    import cupy

    if cupy.cuda.runtime.getDevice() == native.data.device_id:  # entering a device context costs microseconds
        return cupy.ndarray(shape, native.dtype)
    with cupy.cuda.Device(native.data.device_id):
        return cupy.ndarray(shape, native.dtype)


def hand_back(caller: Any, native: Any) -> Any:
    """Give a finished NumPy or CuPy array to a library that makes its own (JAX); others get it as it is."""
    namespace = getattr(caller, "__array_namespace__", None)
    if namespace is None:
        return native
    library = namespace()
    if is_numpy(native):
        return library.asarray(native, device=caller.device)  # JAX's default device may be a GPU
    with native.device:
        return library.from_dlpack(native)


_in_flight: dict[int, deque[tuple[Any, Any]]] = {}
"""By device: events of launches on foreign memory, and what they work on, which is not to be freed before."""
_in_flight_lock = threading.Lock()


def after_launch(device: int, operands: Any) -> None:
    """Close a launch that used foreign arrays.

    ``operands`` stay alive until the GPU is done with them, since their owners know nothing of our stream. torch's
    current stream is made to wait, so that what torch queues next sees the results.
    """
    if device == HOST:
        return
    import cupy

    with cupy.cuda.Device(device):
        ours = cupy.cuda.get_current_stream()
        if ours.is_capturing():
            return
        done = ours.record(cupy.cuda.Event(disable_timing=True))
        finished = []  # freed outside the lock
        with _in_flight_lock:
            waiting = _in_flight.setdefault(device, deque())
            while waiting and waiting[0][0].done:
                finished.append(waiting.popleft())
            waiting.append((done, operands))
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            theirs = torch.cuda.current_stream(device).cuda_stream
            if ours.ptr != theirs:
                cupy.cuda.runtime.streamWaitEvent(theirs, done.ptr)
