"""The inside of streams and memory: how an operation is queued, and what is checked then.

A `Lane` is what a `Stream` object stands for. Operations get their place in the graph, their
clock and their check for races in `issue`, all at the call and before any of them runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ringrt.cudasim import core, executor, heap
from ringrt.cudasim.clocks import Access, Clock, conflict, merge, note
from ringrt.cudasim.core import Where, caller, place
from ringrt.cudasim.errors import SimulatorError, StreamRace
from ringrt.cudasim.executor import DONE, FAILED, Call, Op
from ringrt.cudasim.heap import Allocation
from ringrt.cudasim.runtime import CUDARuntimeError

if TYPE_CHECKING:
    from ringrt.cudasim.graph import Capture


class _Host:
    """What all host threads together have waited for; `version` counts the changes. `most_gone`
    is how many destroyed streams may be left in the clocks."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0
        self.most_gone = 64


HOST = _Host()


@dataclass(eq=False, slots=True)
class Lane:
    """A stream. Of a blocking one (`blocking`) the null stream of its device waits for all work,
    and the other way round."""

    id: int
    device: int
    blocking: bool
    null: bool = False
    clock: Clock = field(default_factory=dict)
    tick: int = 0
    last: Op | None = None
    capture: Capture | None = None
    closed: bool = False
    host_seen: int = 0

    @property
    def ptr(self) -> int:
        """The raw handle, 0 for the null stream."""
        return 0 if self.null else 0x5EED0000 + 16 * self.id

    def __str__(self) -> str:
        name = "the null stream" if self.null else f"stream {self.id}"
        return f"{name} of device {self.device}"


class Touch(NamedTuple):
    """Bytes [lo, hi) of an allocation that an operation reads, or writes (and may read)."""

    allocation: Allocation
    lo: int
    hi: int
    write: bool
    name: str


@dataclass(eq=False, slots=True)
class _Device:
    null: Lane
    lanes: dict[int, Lane] = field(default_factory=dict)


_devices: dict[int, _Device] = {}
_lane_ids = iter(range(1, 1 << 62))
#: Notes left by `__del__`.
CLOSED: deque[Lane] = deque()
#: Streams that are destroyed and done, but still in clocks.
_gone: list[Lane] = []


def device_of(device: int) -> _Device:
    """The streams of a device."""
    if device not in _devices:
        null = Lane(next(_lane_ids), device, blocking=False, null=True)
        _devices.setdefault(device, _Device(null))
    return _devices[device]


def new_lane(device: int, blocking: bool) -> Lane:
    """A new stream. The lock is held."""
    lane = Lane(next(_lane_ids), device, blocking)
    device_of(device).lanes[lane.ptr] = lane
    return lane


def find_lane(ptr: int, device: int) -> Lane:
    """The stream with that raw handle; 0 is the null stream of `device`. The lock is held."""
    if ptr in (0, 1):
        return device_of(device).null
    for each in _devices.values():
        if ptr in each.lanes and not each.lanes[ptr].closed:
            return each.lanes[ptr]
    raise SimulatorError(f"{ptr:#x} is no stream, or one that has been destroyed")


def host_learns(clock: Clock) -> None:
    """A host thread has waited for all that is in the clock. The lock is held."""
    merge(HOST.clock, clock)
    HOST.version += 1


def implied(lane: Lane, clock: Clock) -> list[Op]:
    """Add to a clock of the stream what its next operation is ordered after because of the host
    and the null stream. Returns the operations of other streams among that. The lock is held."""
    if lane.host_seen != HOST.version or clock is not lane.clock:
        merge(clock, HOST.clock)
    if clock is lane.clock:
        lane.host_seen = HOST.version
    if not lane.null and not lane.blocking:
        return []
    device = device_of(lane.device)
    others = device.lanes.values() if lane.null else [device.null]
    found = []
    for other in others:
        if other.blocking or other.null:
            merge(clock, other.clock)
            if other.last is not None and other.last.state != FAILED:
                found.append(other.last)
    return found


def issue(
    lane: Lane,
    label: str,
    run: Callable[[], None] | None = None,
    touches: Sequence[Touch] = (),
    *,
    duration: float = 0.0,
    after: Sequence[Op] = (),
    calls: tuple[Call, ...] = (),
    where: Where | None = None,
) -> Op:
    """Queue an operation after all that is on its stream, and after the operations `after`.
    Raises `StreamRace` if it conflicts with an earlier one. The lock is held."""
    thread = core.current()
    thread.raise_sticky(lane.device)
    where = where or caller()
    for touch in touches:
        if touch.allocation.freed:
            raise SimulatorError(f"{label}: {touch.name} has been freed: {touch.allocation}")
    if lane.capture is not None:
        op = Op(lane, 0, label, where, thread, run, duration, calls=calls)
        return lane.capture.add(op, touches, after)
    _refuse_implicit_capture(lane)
    soft = implied(lane, lane.clock)
    # An operation that is refused keeps its number, lest the next one be taken for it.
    lane.tick = lane.clock[lane.id] = tick = lane.tick + 1
    op = Op(lane, tick, label, where, thread, run, duration, calls=calls, start=thread.time)
    record(op, lane.clock, touches, HOST.clock)
    op.soft = soft
    op.deps = [*soft, *after] if lane.last is None else [lane.last, *soft, *after]
    for call in calls:
        call.op = op
    lane.last = op
    executor.made_progress(wake=False)
    return op


def record(
    op: Op,
    clock: Clock,
    touches: Sequence[Touch],
    host: Clock,
    ledgers: dict[Allocation, list[Access]] | None = None,
) -> None:
    """Check an operation's accesses against the earlier ones, and each other where they are of
    several calls; then note them, in `ledgers` for a capture. The lock is held."""
    fresh = [
        (t, Access(t.lo, t.hi, t.write, t.name, op, op.lane.id, op.tick))
        for t in touches
        if t.lo < t.hi
    ]
    for touch, new in fresh:
        if old := conflict(_ledger(touch, ledgers), new, clock):
            raise StreamRace(_race(old, new, touch.allocation))
    if len(op.calls) > 1:
        _check_within(fresh)
    for touch, new in fresh:
        note(_ledger(touch, ledgers), new, clock, host)


def _ledger(touch: Touch, ledgers: dict[Allocation, list[Access]] | None) -> list[Access]:
    if ledgers is None:
        return touch.allocation.ledger
    return ledgers.setdefault(touch.allocation, [])


def _check_within(fresh: Sequence[tuple[Touch, Access]]) -> None:
    """The sends and receives of one NCCL group run at the same time."""
    for i, (touch, new) in enumerate(fresh):
        for other, old in fresh[:i]:
            same = touch.allocation is other.allocation and old.meets(new.lo, new.hi)
            if same and (old.write or new.write):
                raise StreamRace(_race(old, new, touch.allocation))


def _race(old: Access, new: Access, allocation: Allocation) -> str:
    return (
        f"{_said(new)}: it is not ordered after {_said(old)}; they meet in bytes "
        f"{max(old.lo, new.lo)} to {min(old.hi, new.hi)} of {allocation}"
    )


def _said(access: Access) -> str:
    op, verb = access.op, "writes" if access.write else "reads"
    return (
        f"{op.label} on {op.lane}, issued at {place(op.where)}, "
        f"which {verb} {access.name} (bytes {access.lo} to {access.hi})"
    )


def _refuse_implicit_capture(lane: Lane) -> None:
    if lane.null:
        for other in device_of(lane.device).lanes.values():
            if other.capture is not None and other.blocking:
                raise CUDARuntimeError(906, f"work for {lane} while {other} is being captured")


def pending(allocation: Allocation, lo: int, hi: int) -> bool:
    """Whether an operation that touches these bytes has not run yet. The lock is held."""
    return any(a.meets(lo, hi) and a.op.state < DONE for a in allocation.ledger)


def _read_notes() -> None:
    while CLOSED:
        _close(CLOSED.popleft())
    while heap.FREED:
        _free(heap.FREED.popleft())


def _close(lane: Lane) -> None:
    """A destroyed stream still ends its work; until then the null stream must know of it."""
    lane.closed = True
    lanes = device_of(lane.device)
    for old in [x for x in lanes.lanes.values() if x.closed]:
        if old.last is None or old.last.state >= DONE:
            merge(lanes.null.clock, old.clock)
            del lanes.lanes[old.ptr]
            _gone.append(old)
    if len(_gone) >= HOST.most_gone:
        _purge()


def _purge() -> None:
    """Take destroyed streams out of all clocks, once the host has waited for their work."""
    dead = {x.id for x in _gone if HOST.clock.get(x.id, 0) >= x.tick}
    _gone[:] = [x for x in _gone if x.id not in dead]
    HOST.most_gone = 64 + 2 * len(_gone)
    for allocation in heap.live():
        allocation.ledger = [a for a in allocation.ledger if a.lane not in dead]
    lanes = [x for device in _devices.values() for x in (device.null, *device.lanes.values())]
    for clock in (HOST.clock, *(x.clock for x in (*lanes, *_gone))):
        for lane in dead & clock.keys():
            del clock[lane]


def _free(allocation: Allocation) -> None:
    """CuPy hands freed memory to the next allocation on the same stream, which so may use it once
    all that was queued there is done. Pinned memory goes to anyone, at once."""
    heap.forget(allocation)
    lane = allocation.lane
    clock = dict(lane.clock if lane else HOST.clock)
    if lane is not None:
        implied(lane, clock)
    open_accesses = [a for a in allocation.ledger if not a.before(clock)]
    if open_accesses:
        last = open_accesses[-1]
        until = "the host has waited for" if lane is None else f"{lane}, where it was allocated, is"
        text = f"freed too early: {allocation}: {until} not ordered after {_said(last)}"
        if lane is None:
            text = f"freed too early: {allocation}: the host has not waited for {_said(last)}"
        core.report_late(StreamRace(text), {a.op.owner for a in open_accesses})
    if not pending(allocation, 0, allocation.nbytes):
        allocation.raw.fill(0xFF)
        allocation.ledger.clear()


def _forget() -> None:
    for allocation in heap.live():
        allocation.ledger.clear()
    for device in _devices.values():
        for lane in (device.null, *device.lanes.values()):
            host_learns(lane.clock)
            lane.last = lane.capture = None


core.ON_ENTER.append(_read_notes)
core.ON_RESET.append(_forget)
