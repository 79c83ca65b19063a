"""Copies and fills. Between device and pinned memory they are queued; with memory of the host that
is not pinned they are over when the call returns, and count as a synchronisation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ringrt.cudasim import core, waiting
from ringrt.cudasim.core import CHANGED
from ringrt.cudasim.errors import SimulatorError
from ringrt.cudasim.heap import Allocation, Span, find, span
from ringrt.cudasim.lanes import Lane, Touch, issue, pending
from ringrt.cudasim.memory import Memory
from ringrt.cudasim.runtime import CUDARuntimeError
from ringrt.cudasim.stream import BaseStream, get_current_stream
from ringrt.cudasim.waiting import refuse_capture

Bytes = npt.NDArray[np.uint8]

#: Simulated time of a copy: latency, and bytes per second.
LATENCY, BANDWIDTH = 5e-6, 100e9

#: For each kind of memcpyAsync whether destination and source are on a device; None: either.
KINDS: tuple[tuple[bool | None, bool | None], ...] = (
    (False, False),
    (True, False),
    (False, True),
    (True, True),
    (None, None),
)
_NAMES = {
    (True, False): "copy to device",
    (False, True): "copy to host",
    (True, True): "copy on device",
    (False, False): "copy on host",
}


def duration(nbytes: int) -> float:
    """The simulated time of a copy or message."""
    return LATENCY + nbytes / BANDWIDTH


def copy(dst: int, src: int, size: int, lane: Lane, sides: tuple[bool | None, bool | None]) -> None:
    """Copy between raw addresses. `sides`: see `KINDS`."""
    if size == 0:
        return
    with CHANGED:
        core.enter()
        ends = [_end(dst, size, sides[0], "destination"), _end(src, size, sides[1], "source")]
        on_device = tuple(end is not None and end.allocation.device >= 0 for end in ends)
        label = _NAMES[on_device[0], on_device[1]]
        for end, side in zip(ends, ("the destination", "the source"), strict=True):
            if end is not None:
                check_current(end.allocation, label, side)
        target, source = ends
        if source is None and lane.capture is None:
            payload = np.frombuffer(ctypes.string_at(src, size), np.uint8)
        else:
            payload = source.bytes if source else np.empty(0, np.uint8)
        into = target.bytes if target else _raw(dst, size)
        if target is not None and not on_device[0]:
            poison(target, lane)
        touches = [
            Touch(*end, write=write, name=name)
            for end, write, name in ((target, True, "destination"), (source, False, "source"))
            if end is not None
        ]
        wait = target is None or source is None
        queue(lane, label, partial(np.copyto, into, payload), touches, size, wait=wait)


def queue(
    lane: Lane,
    label: str,
    run: Callable[[], Any],
    touches: list[Touch],
    size: int,
    *,
    wait: bool,
) -> None:
    """Queue a copy; with `wait` see it done, which a stream that is being captured refuses. The
    lock is held."""
    if wait:
        refuse_capture(lane, f"{label} with memory of the host that is not pinned")
    op = issue(lane, label, run, touches, duration=duration(size))
    if wait:
        waiting.wait(op, dict(lane.clock), lane.device)


def fill(memory: Memory, lo: int, hi: int, lane: Lane, run: Callable[[], Any], name: str) -> None:
    """Queue a fill of bytes [lo, hi) of an allocation."""
    with CHANGED:
        core.enter()
        check_current(memory._allocation, name, "the destination")
        touch = Touch(memory._allocation, lo, hi, True, "destination")
        issue(lane, name, run, [touch], duration=duration(hi - lo))


def check_current(allocation: Allocation, label: str, name: str) -> None:
    """There is no peer access: an array is used while its own device is current."""
    device = core.current().device
    if allocation.device not in (-1, device):
        raise CUDARuntimeError(
            1,
            f"{label}: device {device} is current, but {name} is in {allocation}, and there is "
            f"no peer access",
        )


def poison(target: Span, lane: Lane) -> None:
    """A copy into pinned memory is under way: until it is waited for, the host must expect
    anything there. Left alone while earlier operations have still to use what is there."""
    if lane.capture is None and not pending(*target):
        target.bytes.fill(0xFF)


def _end(address: int, size: int, on_device: bool | None, side: str) -> Span | None:
    """The allocation at one end of a copy; None for memory of the host that is not pinned."""
    allocation = find(address)
    if allocation is None:
        if on_device:
            raise SimulatorError(f"copy: the {side} {address:#x} is in no live allocation")
        return None
    if on_device is not None and on_device != (allocation.device >= 0):
        where = "on a device" if on_device else "on the host"
        raise CUDARuntimeError(1, f"copy: the {side} is not {where} but in {allocation}")
    return span(address, size, f"copy, {side}")


def _raw(address: int, size: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class MemoryPointer:
    """A place in device memory, as CuPy's; arrays have one as `data`."""

    __slots__ = ("mem", "ptr")

    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    @property
    def device_id(self) -> int:
        """The device whose memory it is."""
        return self.mem.device_id

    def __int__(self) -> int:
        return self.ptr

    def copy_from_host_async(self, mem: Any, size: int, stream: BaseStream | None = None) -> None:
        """Copy from an address of the host."""
        copy(self.ptr, address_of(mem), size, lane_of(stream), (True, False))

    def copy_to_host_async(self, mem: Any, size: int, stream: BaseStream | None = None) -> None:
        """Copy to an address of the host."""
        copy(address_of(mem), self.ptr, size, lane_of(stream), (False, True))

    def copy_from_device_async(
        self, src: MemoryPointer, size: int, stream: BaseStream | None = None
    ) -> None:
        """Copy from device memory."""
        copy(self.ptr, src.ptr, size, lane_of(stream), (True, True))

    def memset_async(self, value: int, size: int, stream: BaseStream | None = None) -> None:
        """Set each byte."""
        if not 0 <= value < 256:
            raise CUDARuntimeError(1, f"memset_async: {value} is no byte")
        lane = lane_of(stream)
        if size:
            with CHANGED:
                end = span(self.ptr, size, "memset")
            run = partial(end.bytes.fill, value)
            fill(self.mem, end.lo, end.hi, lane, run, "memset")


def address_of(mem: Any) -> int:
    """The address that CuPy would take: an int, or a ctypes pointer."""
    address = getattr(mem, "value", mem)
    if not isinstance(address, int):
        raise TypeError(f"expected an address as int or ctypes.c_void_p, got {type(mem).__name__}")
    return address


def lane_of(stream: BaseStream | None) -> Lane:
    """The stream given, or the current one."""
    return (get_current_stream() if stream is None else stream)._lane()
