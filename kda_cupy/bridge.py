# SPDX-License-Identifier: Apache-2.0
"""Arrays from other libraries, without copies, through DLPack.

Any object with ``__dlpack__`` and ``__dlpack_device__`` (torch, JAX, ...) becomes a CuPy or NumPy view of its own
memory. The capsule is read here rather than by ``cupy.from_dlpack``, which does not see the read-only flag and
refuses bfloat16 in host memory (as NumPy does). It stays unconsumed: the view holds on to it, and when the view
goes, the capsule's own destructor tells the producer.

Streams. The producer is asked for the array on CuPy's current stream, so the work it has queued comes first. Once
the operation is launched, :func:`after_launch` makes the producer's stream wait in turn where we can know it (torch),
and keeps the operands alive until the GPU is done. While a graph is being captured none of this is possible, and
none is done: capture with both libraries on one stream.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from typing import Any, Final

import numpy as np

from kda_cupy.arrays import HOST, is_cupy, is_numpy
from kda_cupy.dtypes import BFLOAT16
from kda_cupy.errors import error

# dlpack.h: DLDeviceType and DLDataTypeCode.
_HOST_TYPES: Final = (1, 3)  # CPU, and pinned CPU memory
_CUDA_TYPES: Final = (2, 13)  # CUDA, and managed memory
_TYPE_LETTERS: Final = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_BFLOAT: Final = 4
_READ_ONLY_FLAG: Final = 1
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


def adopt(name: str, array: Any, *, written: bool = False) -> Any:
    """Return ``array`` as a NumPy or CuPy view of the same memory.

    NumPy and CuPy arrays come back as they are. ``written`` says that the operation writes to it.
    Raises BridgeError (TypeError) for what is no array, for raw capsules and for read-only memory that is to be written.
    """
    if is_native(array):
        return array
    if type(array).__name__ == "PyCapsule":
        raise error("KDA-ARRAY-CAPSULE", operand=name)
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        raise error("KDA-ARRAY-KIND", operand=name, got=f"{type(array).__module__}.{type(array).__qualname__}")
    if getattr(array, "requires_grad", False):
        array = array.detach()
    device_type, device = (int(number) for number in array.__dlpack_device__())
    if device_type in _HOST_TYPES:
        capsule = _export(name, array, None)
    elif device_type in _CUDA_TYPES:
        capsule = _export(name, array, _stream_to_order_on(device))
    else:
        kind = f"{type(array).__qualname__} on DLPack device type {device_type}"
        raise error("KDA-ARRAY-KIND", operand=name, got=kind)
    tensor, read_only = _read(capsule)
    if written and (read_only or _is_immutable(array)):
        raise error("KDA-ARRAY-READ-ONLY", operand=name)
    if device_type in _HOST_TYPES:
        return _host_view(name, tensor, read_only or _is_immutable(array), capsule)
    return _device_view(name, tensor, device, (capsule, array))


def _is_immutable(array: object) -> bool:
    """JAX arrays are immutable, and their older capsules cannot say so."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def _export(name: str, array: Any, stream: int | None) -> Any:
    """Ask for a versioned capsule; producers from before DLPack 1.0 know no ``max_version``."""
    try:
        try:
            return array.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:
            return array.__dlpack__(stream=stream)
    except (BufferError, RuntimeError, TypeError, ValueError) as cause:
        raise error("KDA-ARRAY-KIND", operand=name, got=f"{type(array).__qualname__}, which refused: {cause}") from cause


def _stream_to_order_on(device: int) -> int:
    """CuPy's current stream of the device, as DLPack numbers it."""
    import cupy

    with cupy.cuda.Device(device):
        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing():
            return _NO_ORDERING
        return stream.ptr or _LEGACY_DEFAULT_STREAM


def _read(capsule: Any) -> tuple[_Tensor, bool]:
    name = _capsule_name(capsule)
    address = _capsule_pointer(capsule, name)
    if name == b"dltensor_versioned":
        managed = _Versioned.from_address(address)
        return managed.tensor, bool(managed.flags & _READ_ONLY_FLAG)
    return _Tensor.from_address(address), False


def _layout(name: str, tensor: _Tensor) -> tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any], int]:
    """Shape, strides in bytes, dtype, address."""
    if tensor.lanes != 1 or (tensor.code != _BFLOAT and tensor.code not in _TYPE_LETTERS):
        raise error("KDA-ARRAY-DTYPE", operand=name, got=f"DLPack type code {tensor.code}", wanted_dtype="a number type")
    size = tensor.bits // 8
    dtype = BFLOAT16 if tensor.code == _BFLOAT else np.dtype(f"{_TYPE_LETTERS[tensor.code]}{size}")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[axis] * size for axis in range(tensor.ndim))
    else:  # NULL means C order
        strides = tuple(size * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(tensor.ndim))
    for length, stride in zip(shape, strides, strict=True):
        if length > 1 and stride < 0:
            raise error("KDA-ARRAY-NEGATIVE-STRIDE", operand=name, got=f"strides {list(strides)} bytes")
    return shape, strides, dtype, (tensor.data or 0) + tensor.byte_offset


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
        made = caller.detach().new_empty(shape)
        return made, adopt("out", made, written=True)
    return None, _native_empty(native, shape)


def _native_empty(native: Any, shape: tuple[int, ...]) -> Any:
    if is_numpy(native):
        return np.empty(shape, native.dtype)
    import cupy

    with cupy.cuda.Device(native.data.device_id):
        return cupy.empty(shape, native.dtype)


def hand_back(caller: Any, native: Any) -> Any:
    """Give a finished NumPy or CuPy array to a library that makes its own (JAX); others get it as it is."""
    namespace = getattr(caller, "__array_namespace__", None)
    if namespace is None:
        return native
    library = namespace()
    return library.asarray(native) if is_numpy(native) else library.from_dlpack(native)


_in_flight: deque[tuple[Any, Any]] = deque()
"""Events of launches on foreign memory, and what they work on: not to be freed before."""


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
        done = ours.record()
        while _in_flight and _in_flight[0][0].done:
            _in_flight.popleft()
        _in_flight.append((done, operands))
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            theirs = torch.cuda.current_stream(device).cuda_stream
            if ours.ptr != theirs:
                cupy.cuda.ExternalStream(theirs, device).wait_event(done)
