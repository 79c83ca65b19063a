"""What a DLPack capsule says of its array, to be read and corrected in place.

NumPy and CuPy make and take capsules themselves, with all that is to be known of lifetimes; but
not for bfloat16. Its elements travel as 16-bit words, and the capsule's dtype is set right here.
The structures are those of DLPack 1.0 (dlpack.h).
"""

from __future__ import annotations

import ctypes
from typing import Any

#: DLDeviceType.
CPU, CUDA, CUDA_HOST, ROCM_HOST, CUDA_MANAGED = 1, 2, 3, 11, 13
#: DLDataTypeCode.
UINT, BFLOAT = 1, 4


class DLTensor(ctypes.Structure):
    """Where an array lies and what its elements are."""

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
    """DLManagedTensorVersioned. The older DLManagedTensor begins with the tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_api = ctypes.pythonapi
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_IsValid.restype = ctypes.c_int
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]


def tensor_of(capsule: Any) -> DLTensor:
    """The tensor inside a capsule that nobody has taken yet; writing to it changes the capsule.
    `TypeError` for anything else."""
    if _api.PyCapsule_IsValid(capsule, b"dltensor"):
        return DLTensor.from_address(_api.PyCapsule_GetPointer(capsule, b"dltensor"))
    if not _api.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        raise TypeError(f"{capsule!r} is not a DLPack capsule")
    address = _api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
    versioned = _Versioned.from_address(address)
    if versioned.major > 1:
        raise BufferError(f"DLPack {versioned.major}.{versioned.minor} is newer than what is known")
    tensor: DLTensor = versioned.tensor
    return tensor
