"""View the memory of another library's array on the host as a NumPy array, through DLPack.

An exporter (an array of another library) returns a capsule, a Python object that describes its memory. NumPy's own
`from_dlpack` refuses bfloat16 and the 8-bit floats, so this module reads the capsule itself. dlpack.h (DLPack 1.x)
defines the structures, and the Python array API standard defines the protocol.

A consumer may rename the capsule, and then must free the memory itself. This module does not rename capsules. The
arrays that it returns refer to the capsule, which frees the memory when it is garbage collected. So the exporter's
memory lives exactly as long as the last view of it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

# {(DLDataTypeCode, bits, lanes): NumPy dtype}
DTYPES: dict[tuple[int, int, int], np.dtype[Any]] = {
    **{(0, 8 * n, 1): np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{(1, 8 * n, 1): np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{(2, 8 * n, 1): np.dtype(f"f{n}") for n in (2, 4, 8)},
    (4, 16, 1): np.dtype(ml_dtypes.bfloat16),
    **{(5, 8 * n, 1): np.dtype(f"c{n}") for n in (8, 16)},
    (6, 8, 1): np.dtype(np.bool_),
    (10, 8, 1): np.dtype(ml_dtypes.float8_e4m3fn),
    (12, 8, 1): np.dtype(ml_dtypes.float8_e5m2),
    (14, 8, 1): np.dtype(ml_dtypes.float8_e8m0fnu),
    (17, 4, 2): np.dtype(np.uint8),  # two E2M1 codes per byte
}

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_VERSION = (1, 0)  # the newest DLPack version whose structures are declared below


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; NULL: row-major without gaps
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _ExportedMemory:
    """An object that describes the memory in a DLPack capsule by NumPy's array interface.

    np.asarray(object) makes an array of plain bytes on this memory, which the caller then views in the right dtype. The
    object refers to the capsule, which keeps the memory alive as long as such an array exists.
    """

    def __init__(self, capsule: object, tensor: _DLTensor, dtype: np.dtype[Any], read_only: bool) -> None:
        self.capsule = capsule
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{dtype.itemsize}",  # plain bytes: NumPy has no type string for bfloat16
            "shape": _shape(tensor),
            "strides": _byte_strides(tensor, dtype.itemsize),
            "data": ((tensor.data or 0) + tensor.byte_offset, read_only),
        }


def read(x: Any, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a NumPy array that shares the memory of x, an array in host memory that exports DLPack."""
    return _from_capsule(_export(x), name)


def _export(x: Any) -> object:
    """Return the DLPack capsule of x: versioned (DLPack 1.0) if x knows the argument max_version, else unversioned."""
    try:
        return x.__dlpack__(max_version=_VERSION)
    except TypeError:  # an exporter of DLPack before 1.0 does not know the keyword
        return x.__dlpack__()


def _from_capsule(capsule: object, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a NumPy array on the memory that a DLPack capsule describes; a new, empty array if it has no elements."""
    tensor, read_only = _read(capsule, name)
    dtype = _dtype(tensor.dtype, name)
    if 0 in _shape(tensor):  # the exporter's data pointer may be NULL
        return np.empty(_shape(tensor), dtype)
    if not tensor.data:
        raise BufferError(
            f"{name} exports no memory, only a shape, as a tensor does while it is traced; needs an array of values"
        )
    return np.asarray(_ExportedMemory(capsule, tensor, dtype, read_only)).view(dtype)


def _read(capsule: object, name: str) -> tuple[_DLTensor, bool]:
    """Return the DLTensor structure in a capsule, and whether its memory is read-only."""
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        pointer = _capsule_pointer(capsule, b"dltensor_versioned")
        versioned = _DLManagedTensorVersioned.from_address(pointer)
        if versioned.major != _VERSION[0]:
            argument = name.rpartition(" ")[2]
            raise BufferError(
                f"{name} exports DLPack {versioned.major}.{versioned.minor}; needs 1.x or earlier; "
                f"pass a copy made by its library, such as np.asarray({argument})"
            )
        return versioned.dl_tensor, bool(versioned.flags & _READ_ONLY)
    if _capsule_is_valid(capsule, b"dltensor"):
        return _DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor")).dl_tensor, True
    raise BufferError(f"{name}.__dlpack__() gave {capsule!r}; needs an unconsumed DLPack capsule; export it again")


def _dtype(dtype: _DLDataType, name: str) -> np.dtype[Any]:
    """Return the NumPy or ml_dtypes dtype for a DLPack dtype."""
    key = (dtype.code, dtype.bits, dtype.lanes)
    if key not in DTYPES:
        raise TypeError(
            f"{name} has the DLPack dtype (code, bits, lanes) = {key}; needs float32, float16, bfloat16 or "
            "another dtype that NumPy or ml_dtypes has; convert it first"
        )
    return DTYPES[key]


def _shape(tensor: _DLTensor) -> tuple[int, ...]:
    """Return the shape of a DLTensor (DLPack's description of an array) as a tuple; () if it has no dimensions."""
    return tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()


def _byte_strides(tensor: _DLTensor, itemsize: int) -> tuple[int, ...] | None:
    """Return the strides of a DLTensor in bytes; None for an array whose elements lie in row-major order without
    gaps.
    """
    return tuple(itemsize * step for step in tensor.strides[: tensor.ndim]) if tensor.ndim and tensor.strides else None
