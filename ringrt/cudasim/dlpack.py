"""`cupy.from_dlpack` and what an array answers to `__dlpack__`, with CuPy's rules for streams.

The capsules are NumPy's, of the same bytes; only the device in them is another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ringrt.cudasim.array import ndarray
from ringrt.cudasim.copies import MemoryPointer
from ringrt.cudasim.core import CHANGED, enter
from ringrt.cudasim.errors import SimulatorError
from ringrt.cudasim.heap import Allocation, find
from ringrt.cudasim.memory import Memory
from ringrt.cudasim.stream import Device, Event, ExternalStream, Stream, get_current_stream
from ringrt.dlpack_capsule import CPU, CUDA, tensor_of

#: In the protocol's numbers: the legacy default stream, and no synchronisation at all.
_LEGACY, _NONE = 1, -1


def export(array: ndarray, stream: int | None, max_version: tuple[int, int] | None) -> Any:
    """A capsule of the array, for a consumer that will use it on `stream`."""
    if array.dtype.name == "bfloat16":
        raise BufferError("bfloat16 arrays are not exported by the simulator, nor by older CuPy")
    if stream == 0:
        raise ValueError("stream 0 is ambiguous, and not allowed on CUDA: pass 1 or 2")
    with Device(array.device):
        current = get_current_stream()
        wanted = 0 if stream in (None, _LEGACY) else stream
        if wanted != _NONE and wanted != current.ptr:
            _stream(wanted).wait_event(_recorded(current))
    capsule = np.asarray(_Bytes(array)).__dlpack__(max_version=max_version)
    tensor = tensor_of(capsule)
    tensor.device_type, tensor.device_id = CUDA, array.device.id
    return capsule


def from_dlpack(x: Any) -> ndarray:
    """An array on memory of the simulator that x hands over, on the current device and stream."""
    device, index = (int(part) for part in x.__dlpack_device__())
    if device != CUDA:
        raise SimulatorError(f"from_dlpack: only arrays of a GPU, not of DLPack device {device}")
    with Device(index):
        capsule = x.__dlpack__(stream=get_current_stream().ptr or _LEGACY)
    tensor = tensor_of(capsule)
    tensor.device_type, tensor.device_id = CPU, 0
    view = np.from_dlpack(_Capsule(capsule))
    with CHANGED:
        enter()
        address = int(view.__array_interface__["data"][0])
        allocation = find(address) if view.nbytes else None
    if allocation is None:
        if view.nbytes:
            raise SimulatorError(f"from_dlpack: {address:#x} is not memory of a simulated device")
        return ndarray(view.shape, view.dtype)
    borrowed = _Borrowed(allocation, view)
    pointer = MemoryPointer(borrowed, address - allocation.address)
    return ndarray(view.shape, view.dtype, pointer, view.strides)


class _Borrowed(Memory):
    """Memory that another array owns, which is kept by `held`."""

    def __init__(self, allocation: Allocation, held: npt.NDArray[Any]) -> None:
        super().__init__(allocation)
        self._held = held

    def __del__(self) -> None:
        """Its owner frees it."""


class _Bytes:
    """The bytes of an array for NumPy, which keeps the array as long as it uses them."""

    def __init__(self, array: ndarray) -> None:
        self._array = array
        self.__array_interface__ = array._view.__array_interface__


class _Capsule:
    """A capsule that says it lies on the host."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **wishes: Any) -> Any:
        return self._capsule


def _stream(ptr: int) -> Any:
    return ExternalStream(ptr) if ptr else Stream.null


def _recorded(stream: Any) -> Event:
    event: Event = stream.record()
    return event
