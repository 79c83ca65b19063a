"""`cupy.cuda.Stream`, `Event` and `Device`."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ringrt.cudasim import runtime, waiting
from ringrt.cudasim.clocks import Clock, merge
from ringrt.cudasim.core import CHANGED, current, enter
from ringrt.cudasim.errors import KernelFault, SimulatorError
from ringrt.cudasim.executor import DONE, Op
from ringrt.cudasim.lanes import CLOSED, Lane, device_of, find_lane, issue, new_lane
from ringrt.cudasim.runtime import CUDARuntimeError

if TYPE_CHECKING:
    from ringrt.cudasim.graph import Capture, Graph


_numbers = itertools.count(1 << 20)
_EVENTS: WeakValueDictionary[int, Event] = WeakValueDictionary()


class Event:
    """A point in the work of a stream: what was queued there when it was recorded. `block` is
    about how a thread waits, which makes no difference here."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        if interprocess:
            raise SimulatorError("Event: interprocess events are not simulated")
        self._timing, self._device = not disable_timing, current().device
        self._op: Op | None = None
        self._clock: Clock = {}
        self._capture: Capture | None = None
        self.ptr = next(_numbers)
        _EVENTS[self.ptr] = self

    def record(self, stream: BaseStream | None = None) -> None:
        """Record it on a stream, by default the current one, anew if it was recorded before."""
        lane = (get_current_stream() if stream is None else stream)._lane()
        if lane.device != self._device:
            raise CUDARuntimeError(400, f"event of device {self._device} recorded on {lane}")
        with CHANGED:
            enter()
            self._op = issue(lane, "event record")
            self._capture = lane.capture
            self._clock = dict(lane.capture.clock_of(lane) if lane.capture else lane.clock)

    def synchronize(self) -> None:
        """Wait for it."""
        with CHANGED:
            self._refuse_captured()
            waiting.wait(self._op, self._clock, self._device)

    @property
    def done(self) -> bool:
        """Whether it has been reached, or was never recorded. As with CuPy it is False for ever
        after a fault: `runtime.eventQuery` tells."""
        try:
            return self._query()
        except KernelFault:
            return False

    def _query(self) -> bool:
        with CHANGED:
            self._refuse_captured()
            return waiting.query(self._op, self._clock, self._device)

    def _order(self, lane: Lane) -> None:
        """Let all further work of a stream come after this event. The lock is held."""
        if self._op is None:
            return
        if self._capture is not None:
            self._capture.join(lane, self._clock)
        elif lane.capture is not None:
            raise CUDARuntimeError(905, f"{lane} waits for {self._op}")
        else:
            merge(lane.clock, self._clock)
        issue(lane, "event wait", after=[self._op])

    def _ended(self) -> float:
        """The simulated time at which it was reached, in seconds. The lock is held."""
        self._refuse_captured()
        if self._op is None or not self._timing:
            raise CUDARuntimeError(400, "the event was not recorded, or has no timing")
        if self._op.state != DONE:
            raise CUDARuntimeError(600, f"nothing has waited for {self._op}")
        return self._op.end

    def _refuse_captured(self) -> None:
        if self._capture is not None:
            raise CUDARuntimeError(907, "it waits until the event is recorded outside a capture")


def query_event(ptr: int) -> bool:
    """Whether the event of that `ptr` has been reached; raises what went wrong before it."""
    found = _EVENTS.get(ptr)
    if found is None:
        raise CUDARuntimeError(400, f"there is no event {ptr}")
    return found._query()


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Simulated time between two events, in ms. It shows what overlap the order of operations
    permits, not how fast a GPU is."""
    with CHANGED:
        enter()
        return (end_event._ended() - start_event._ended()) * 1e3


class BaseStream(ABC):
    """What `Stream` and `ExternalStream` have in common. `device_id` is -1 for the null stream,
    which is that of the current device."""

    ptr: int
    device_id: int

    @abstractmethod
    def _lane(self) -> Lane:
        """The stream's inside."""

    def use(self) -> BaseStream:
        """Make it the calling thread's current stream."""
        current().streams[self._check_device()] = self
        return self

    def __enter__(self) -> BaseStream:
        device, thread = self._check_device(), current()
        thread.stream_stack.append((device, thread.streams.get(device)))
        thread.streams[device] = self
        return self

    def __exit__(self, *exc: object) -> None:
        device, before = current().stream_stack.pop()
        current().streams[device] = before

    def record(self, event: Event | None = None) -> Event:
        """Record an event, a new one by default, on this stream."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let all further work on this stream come after the event."""
        lane = self._lane()
        with CHANGED:
            enter()
            event._order(lane)

    def synchronize(self) -> None:
        """Wait for all work on this stream."""
        lane = self._lane()
        with CHANGED:
            waiting.wait_for_lane(lane)

    @property
    def done(self) -> bool:
        """Whether all work on this stream has been done."""
        lane = self._lane()
        with CHANGED:
            return waiting.query_lane(lane)

    @property
    def is_non_blocking(self) -> bool:
        """Whether it has nothing to do with the null stream."""
        lane = self._lane()
        return not lane.blocking and not lane.null

    def begin_capture(self, mode: int | None = None) -> None:
        """From now on record work instead of queueing it, until `end_capture`. As to `mode`: the
        simulator refuses during a capture whatever any mode refuses."""
        from ringrt.cudasim import graph

        graph.begin(self._lane(), mode)

    def end_capture(self) -> Graph:
        """The work since `begin_capture`."""
        from ringrt.cudasim import graph

        return graph.end(self._lane())

    def is_capturing(self) -> bool:
        """Whether work on this stream is being captured."""
        return self._lane().capture is not None

    def _check_device(self) -> int:
        device = current().device
        if self.device_id not in (-1, device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id})"
                f" does not match with the current device ({device})"
            )
        return device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"


class Stream(BaseStream):
    """A queue of work for a device. Work on a stream runs in order; work on two streams only as
    events order it, but for the null stream, which waits for all streams that are not
    `non_blocking`, as these wait for it."""

    null: Stream

    def __init__(
        self,
        null: bool = False,
        non_blocking: bool = False,
        ptds: bool = False,
        priority: int | None = None,
    ) -> None:
        if ptds:
            raise SimulatorError("Stream: per-thread default streams are not simulated")
        self.ptr, self.device_id = 0, -1
        self._own: Lane | None = None
        #: Kept to be looked at: all streams run as soon as they can.
        self.priority = priority or 0
        if not null:
            with CHANGED:
                device = enter().device
                self._own = lane = new_lane(device, blocking=not non_blocking)
                self.ptr, self.device_id = lane.ptr, device

    def _lane(self) -> Lane:
        """The stream's inside: of the null stream that of the current device."""
        return self._own or device_of(current().device).null

    def __del__(self) -> None:
        if lane := getattr(self, "_own", None):
            CLOSED.append(lane)


Stream.null = Stream(null=True)


class ExternalStream(BaseStream):
    """A stream known by its raw handle. It must exist as long as this is used."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self.ptr, self.device_id = ptr, device_id
        self._lane()

    def _lane(self) -> Lane:
        """The stream's inside, as long as there is one."""
        with CHANGED:
            return find_lane(self.ptr, enter().device)


def get_current_stream(device_id: int = -1) -> BaseStream:
    """The calling thread's current stream for a device, by default the current one."""
    thread = current()
    found: BaseStream | None = thread.streams.get(thread.device if device_id < 0 else device_id)
    return found or Stream.null


def current_lane() -> Lane:
    """The inside of the current stream."""
    return get_current_stream()._lane()


def synchronize_device(device: int) -> None:
    """Wait for all work of a device."""
    with CHANGED:
        waiting.wait_for_device(device)


class Device:
    """A device, by default the current one. As a context manager it makes it current."""

    def __init__(self, device: int | Device | None = None) -> None:
        self.id = current().device if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def use(self) -> None:
        """Make it the calling thread's current device."""
        runtime.setDevice(self.id)

    def __enter__(self) -> Device:
        runtime.check_device(self.id)
        thread = current()
        thread.device_stack.append(thread.device)
        thread.device = self.id
        return self

    def __exit__(self, *exc: object) -> None:
        current().device = current().device_stack.pop()

    def synchronize(self) -> None:
        """Wait for all its work."""
        synchronize_device(runtime.check_device(self.id))

    @property
    def compute_capability(self) -> str:
        """The simulated GPU's, without the dot."""
        return "90"

    @property
    def attributes(self) -> dict[str, Any]:
        """The limits that the simulator holds a kernel to, by CuPy's names."""
        return {
            "ComputeCapabilityMajor": 9,
            "ComputeCapabilityMinor": 0,
            "MaxSharedMemoryPerBlock": runtime.SHARED_BYTES,
            "MaxSharedMemoryPerBlockOptin": runtime.MAX_SHARED_BYTES,
            "MaxThreadsPerBlock": 1024,
            "MultiProcessorCount": runtime.getDeviceProperties(self.id)["multiProcessorCount"],
            "WarpSize": 32,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"
