"""`cupy.cuda`: the part of it that is stood in for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ringrt.cudasim import nccl, runtime
from ringrt.cudasim.copies import MemoryPointer
from ringrt.cudasim.graph import Graph
from ringrt.cudasim.memory import (
    Memory,
    MemoryPool,
    PinnedMemoryPointer,
    alloc_pinned_memory,
)
from ringrt.cudasim.stream import (
    Device,
    Event,
    ExternalStream,
    Stream,
    get_current_stream,
    get_elapsed_time,
)

__all__ = [
    "Device",
    "Event",
    "ExternalStream",
    "Graph",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemoryPointer",
    "Stream",
    "alloc_pinned_memory",
    "get_current_stream",
    "get_elapsed_time",
    "is_available",
    "nccl",
    "runtime",
]


def is_available() -> bool:
    """Whether there is a device: there is."""
    return True


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(f"the CUDA simulator does not implement cupy.cuda.{name}")
