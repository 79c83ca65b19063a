"""Memory of devices and pinned memory of the host, as CuPy's pools hand them out."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ringrt.cudasim import core
from ringrt.cudasim.core import CHANGED
from ringrt.cudasim.errors import SimulatorError
from ringrt.cudasim.heap import ALIGNMENT, FREED, Allocation, allocate, live


class Memory:
    """Owner of an allocation: when the last array on it is gone, it is freed."""

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation

    @property
    def ptr(self) -> int:
        """Its address."""
        return self._allocation.address

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self._allocation.nbytes

    @property
    def device_id(self) -> int:
        """The device whose memory it is."""
        return self._allocation.device

    def __del__(self) -> None:
        FREED.append(self._allocation)


class MemoryPool:
    """What CuPy's pool would say. Nothing is pooled here: that memory may be handed out again at
    once is checked where it is freed instead."""

    def used_bytes(self) -> int:
        """Bytes in use on the current device, in the units of CuPy's pool."""
        with CHANGED:
            device = core.enter().device
            sizes = [x.nbytes for x in live() if x.device == device]
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    def free_all_blocks(self, stream: Any = None) -> None:
        """There are no free blocks to be released."""
        if stream is not None:
            raise SimulatorError("free_all_blocks: the simulator's pool takes no stream")
        with CHANGED:
            core.enter()


_pool = MemoryPool()


def get_default_memory_pool() -> MemoryPool:
    """The pool that arrays come from."""
    return _pool


class PinnedMemoryPointer:
    """Pinned memory. It has the buffer protocol: `numpy.frombuffer(pointer, dtype, count)` is an
    array on it, and keeps it. As with CuPy there may be more bytes than were asked for."""

    mem: Memory

    @property
    def ptr(self) -> int:
        """Its address."""
        return self.mem.ptr

    def size(self) -> int:
        """Its size in bytes."""
        return self.mem.size


@cache
def _pinned_class(nbytes: int) -> Any:
    array: Any = ctypes.c_byte * nbytes
    return type(array)("PinnedMemoryPointer", (PinnedMemoryPointer, array), {})


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    """Pinned memory of the host, as long as the result, or an array on it, is kept."""
    if size < 0:
        raise SimulatorError(f"alloc_pinned_memory: {size} bytes")
    with CHANGED:
        core.enter()
        made = allocate(-(-size // ALIGNMENT) * ALIGNMENT, -1, None)
    pointer: PinnedMemoryPointer = _pinned_class(made.nbytes).from_buffer(made.raw)
    pointer.mem = Memory(made)
    return pointer
