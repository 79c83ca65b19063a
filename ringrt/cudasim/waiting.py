"""How a host thread waits for the device, asks it, and learns that something has ended."""

from __future__ import annotations

from ringrt.cudasim.clocks import Clock
from ringrt.cudasim.core import HostThread, enter
from ringrt.cudasim.errors import SimulatorError
from ringrt.cudasim.executor import Op, complete
from ringrt.cudasim.lanes import Lane, device_of, host_learns, issue
from ringrt.cudasim.runtime import CUDARuntimeError


def wait(op: Op | None, clock: Clock, device: int) -> None:
    """Wait for an operation, and so for all in the clock. The lock is held."""
    thread = begin_wait(device)
    if op is not None:
        complete(op, block=True)
    _learn(thread, op, clock, device)


def query(op: Op | None, clock: Clock, device: int) -> bool:
    """Whether an operation is complete, after running what can run. The lock is held."""
    thread = enter()
    thread.raise_sticky(device)
    if op is not None and not complete(op, block=False):
        thread.raise_sticky(device)
        return False
    _learn(thread, op, clock, device)
    return True


def wait_for_lane(lane: Lane) -> None:
    """Wait for all that is queued on a stream. The lock is held."""
    refuse_capture(lane, "synchronize")
    wait(*_tail(lane), lane.device)


def query_lane(lane: Lane) -> bool:
    """Whether all that is queued on a stream is complete. The lock is held."""
    refuse_capture(lane, "done")
    return query(*_tail(lane), lane.device)


def wait_for_device(device: int) -> None:
    """Wait for all streams of a device. The lock is held."""
    lanes = [device_of(device).null, *device_of(device).lanes.values()]
    for lane in lanes:
        refuse_capture(lane, "synchronize the device")
    tails = [(lane.last, dict(lane.clock)) for lane in lanes]
    thread = begin_wait(device)
    for op, clock in tails:
        if op is not None:
            complete(op, block=True)
        _learn(thread, op if op is None or op.owner is thread else None, clock, device)


def begin_wait(device: int) -> HostThread:
    """Count a synchronisation, and refuse one that would never end. The lock is held."""
    thread = enter()
    thread.raise_sticky(device)
    thread.synchronisations += 1
    if thread.group_depth:
        raise SimulatorError(
            "this thread waits for the device with an NCCL group open: groupEnd() has not been "
            "called, so what the group holds has not begun"
        )
    return thread


def refuse_capture(lane: Lane, what: str) -> None:
    """Nothing that is being captured runs, so nothing can wait for it. The lock is held."""
    if lane.capture is not None:
        raise CUDARuntimeError(900, f"{what} on {lane}")


def _tail(lane: Lane) -> tuple[Op | None, Clock]:
    """The last operation of a stream. Of the null stream that is one after all blocking streams,
    made for the purpose."""
    if lane.null:
        issue(lane, "synchronize")
    return lane.last, dict(lane.clock)


def _learn(thread: HostThread, op: Op | None, clock: Clock, device: int) -> None:
    if op is not None:
        if op.error is not None:
            raise op.error.with_traceback(None)
        thread.time = max(thread.time, op.end)
    thread.raise_sticky(device)
    host_learns(clock)
