# SPDX-License-Identifier: Apache-2.0
"""A library of our own that exports arrays through DLPack, and does whatever dlpack.h allows."""

import ctypes

import ml_dtypes

# The structures are those of dlpack.h, written down a second time.


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 2),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter))


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


NAMES = {
    b"dltensor": DLManagedTensor,
    b"dltensor_versioned": DLManagedTensorVersioned,
    b"used_dltensor": DLManagedTensor,
    b"used_dltensor_versioned": DLManagedTensorVersioned,
    b"something_else": DLManagedTensor,
}
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}

python = ctypes.pythonapi
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", python))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", python)
)
alive = {}
"""What the capsules that exist point to, by address."""


_HeldDeleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


@Deleter
def _delete(address):
    _, deleted = alive.pop(address)  # a second deletion would be a KeyError
    deleted.append(address)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule):
    """Destructor of a capsule: one that nobody has consumed still owns its tensor."""
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):
            address = _pointer(capsule, name)
            deleter = NAMES[name].from_address(address).deleter
            if deleter:  # called with the GIL held: the collector may be at work, and must not be interrupted
                ctypes.cast(deleter, _HeldDeleter)(address)


class Producer:
    """Exports a NumPy array through DLPack; every field of the capsule can be set to something else."""

    def __init__(self, array, capsule_name=b"dltensor_versioned", **fields):
        self.array = array
        self.capsule_name = capsule_name
        self.fields = fields
        self.exported = 0
        self.deleted = []

    def __dlpack_device__(self):
        return self.fields.get("device", (1, 0))

    def __dlpack__(self, *, stream=None, max_version=None):
        assert stream is None or self.__dlpack_device__()[0] != 1
        self.exported += 1
        array, fields = self.array, self.fields
        n = array.ndim
        code = 4 if array.dtype == ml_dtypes.bfloat16 else CODES[array.dtype.kind]
        integers = ctypes.c_int64 * n
        shape = integers(*fields.get("shape", array.shape))
        steps = fields.get("strides", [stride // array.itemsize for stride in array.strides])
        strides = None if steps is None else integers(*steps)
        tensor = DLTensor(
            fields.get("data", array.__array_interface__["data"][0]),
            self.__dlpack_device__(),
            n,
            (fields.get("code", code), fields.get("bits", 8 * array.itemsize)),
            fields.get("lanes", 1),
            shape,
            strides,
            fields.get("byte_offset", 0),
        )
        if b"versioned" in self.capsule_name:
            version, flags = fields.get("version", (1, 0)), fields.get("flags", 0)
            managed = DLManagedTensorVersioned(version, None, _delete, flags, tensor)
        else:
            managed = DLManagedTensor(tensor, None, _delete)
        address = ctypes.addressof(managed)
        alive[address] = ((managed, shape, strides, array), self.deleted)
        destructor = ctypes.cast(_destroy, ctypes.c_void_p)
        return python.PyCapsule_New(address, self.capsule_name, destructor)


class OnlyStream(Producer):
    """From before DLPack 1.0: a plain capsule, and no keyword besides the stream."""

    def __init__(self, array, **fields):
        super().__init__(array, b"dltensor", **fields)

    def __dlpack__(self, stream=None):
        return super().__dlpack__(stream=stream)
