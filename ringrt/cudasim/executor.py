"""Running operations: as late as possible, and no more of them than somebody waits for.

Operations form a graph, each after the one before it on its stream and after the events that the
stream has waited for. `complete` walks from the operation that is needed back to what can run. An
NCCL operation is active once all before it is done, and done once each of its calls has met its
counterpart in an operation that is active too. So walking may lead over to other ranks' streams,
and a circle on the way is a deadlock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ringrt.cudasim import core
from ringrt.cudasim.core import CHANGED, HostThread, Where, place
from ringrt.cudasim.errors import SimulatorError
from ringrt.errors import name_ranks

if TYPE_CHECKING:
    from ringrt.cudasim.heap import Span
    from ringrt.cudasim.lanes import Lane
    from ringrt.cudasim.matching import Member

#: The states of an operation. From DONE on nothing remains to be done.
QUEUED, ACTIVE, RUNNING, DONE, FAILED = range(5)


@dataclass(eq=False, slots=True)
class Call:
    """One send or receive of an NCCL operation, on a stream, of the bytes `memory`."""

    member: Member
    verb: str
    peer: int
    memory: Span
    lane: Lane
    where: Where
    op: Op | None = None
    partner: Call | None = None
    moved: bool = False
    #: The simulated time from which both sides were there.
    begin: float = 0.0
    #: Why the counterpart will never come, if that is known.
    lost: str = ""

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.memory.hi - self.memory.lo

    def __str__(self) -> str:
        link = "to" if self.verb == "send" else "from"
        return f"{self.verb} {self.nbytes} bytes {link} rank {self.peer}"


@dataclass(eq=False, slots=True)
class Op:
    """One operation on a stream. `owner` is the thread that issued it. `start` is, once nothing
    before it is open, the simulated time from which it may run."""

    lane: Lane
    tick: int
    label: str
    where: Where
    owner: HostThread
    run: Callable[[], None] | None = None
    duration: float = 0.0
    deps: list[Op] = field(default_factory=list)
    #: Those of `deps` whose failure is not passed on: other streams before the null stream, and
    #: the null stream before others.
    soft: list[Op] = field(default_factory=list)
    calls: tuple[Call, ...] = ()
    start: float = 0.0
    end: float = 0.0
    state: int = QUEUED
    error: Exception | None = None

    def __str__(self) -> str:
        return f"{self.label} on {self.lane}, issued at {place(self.where)}"


#: An operation, and whether it is to be complete or only to become active.
_Need = tuple[Op, bool]


class _Progress:
    """`count` grows with everything that may let a waiting thread go on; `running` operations
    are under way in some thread."""

    count = 0
    running = 0


_progress = _Progress()


def made_progress(wake: bool = True) -> None:
    """Something happened that waiting threads should look at. The lock is held."""
    _progress.count += 1
    if wake:
        CHANGED.notify_all()


def _changed(seen: int) -> bool:
    return _progress.count != seen


def complete(op: Op, block: bool) -> bool:
    """Run what `op` needs; with `block` wait for other ranks until it is complete, else say
    whether it is. The lock is held, and released while waiting and while kernels run."""
    deadline = None
    while True:
        seen = _progress.count
        blame = _advance(op)
        if op.state >= DONE:
            return True
        if _progress.count == seen:
            if not block:
                return False
            now = time.monotonic()
            deadline = now + core.timeout() if deadline is None else deadline
            moved = CHANGED.wait_for(partial(_changed, seen), deadline - now)
            if not moved and not _progress.running:
                raise SimulatorError(_unmatched(op, blame))
        deadline = None


def _advance(root: Op) -> list[Call]:
    """Run all that `root` needs and that can run now. Returns the calls that hold it up."""
    stack: list[_Need] = [(root, True)]
    stuck: set[_Need] = set()
    blame: list[Call] = []
    on_stack = {stack[0]}
    while stack:
        need = _step(*stack[-1], stuck, blame)
        if need is None:
            on_stack.discard(stack.pop())
        elif need in on_stack:
            circle = stack[stack.index(need) :]
            done = [i for i, (op, whole) in enumerate(circle) if _satisfied(op, whole)]
            if not done:
                raise SimulatorError(_deadlock(circle))
            del stack[stack.index(need) + done[0] + 1 :]
            on_stack = set(stack)
        else:
            stack.append(need)
            on_stack.add(need)
    return blame


def _satisfied(op: Op, whole: bool) -> bool:
    return op.state >= DONE or (not whole and op.state != QUEUED)


def _step(op: Op, whole: bool, stuck: set[_Need], blame: list[Call]) -> _Need | None:
    """One step towards `op`: the next thing that it needs first, or None if it has come as far
    as it can."""
    if op.state == QUEUED:
        open_deps = []
        for dep in op.deps:
            if dep.state == FAILED and dep not in op.soft:
                _fail(op, dep.error)
                return None
            if dep.state >= DONE:
                op.start = max(op.start, dep.end)
            else:
                open_deps.append(dep)
        op.deps = open_deps
        op.soft = op.soft and [dep for dep in op.soft if dep.state < DONE]
        for dep in open_deps:
            if (dep, True) not in stuck:
                return dep, True
        if open_deps:
            stuck.add((op, whole))
            return None
        if not op.calls:
            _run(op)
            return None
        _activate(op)
    if op.state == RUNNING:
        stuck.add((op, whole))
    return _meet(op, stuck, blame) if op.state == ACTIVE and whole else None


def _meet(op: Op, stuck: set[_Need], blame: list[Call]) -> _Need | None:
    """One step towards the counterparts of an active operation's calls."""
    for call in op.calls:
        other = call.partner
        if call.moved:
            continue
        if other is None or other.op is None:
            blame.append(call)
        elif other.nbytes != call.nbytes:
            _mismatch(call, other)
            return None
        elif other.op.state == ACTIVE:
            _move(call, other)
        elif other.op.state == QUEUED and (other.op, False) not in stuck:
            return other.op, False
        elif other.op.state == FAILED:
            call.lost = f"rank {call.peer} failed before: {other.op.error}"
            blame.append(call)
    if op.state == ACTIVE:
        stuck.add((op, True))
    return None


def _run(op: Op) -> None:
    """Run an operation without calls, outside the lock."""
    run, op.run = op.run, None
    if run is not None:
        op.state = RUNNING
        _progress.running += 1
        CHANGED.release()
        error: BaseException | None = None
        try:
            run()
        except BaseException as caught:
            error = caught
        finally:
            CHANGED.acquire()
            _progress.running -= 1
        if error is not None:
            fault = error if isinstance(error, Exception) else SimulatorError("interrupted")
            _fail(op, _described(op, fault))
            if fault is not error:
                raise error
            return
    op.end = op.start + op.duration
    op.state = DONE
    made_progress(wake=run is not None)


def _described(op: Op, fault: Exception) -> Exception:
    if isinstance(fault, SimulatorError):
        return type(fault)(f"{op}: {fault}")
    return SimulatorError(f"{op}: {type(fault).__name__}: {fault}")


def _fail(op: Op, error: Exception | None) -> None:
    """The stream is broken from here on, for the thread that issued the operation."""
    assert error is not None
    op.state, op.error, op.run, op.deps, op.soft = FAILED, error, None, [], []
    op.owner.sticky.setdefault(op.lane.device, error)
    made_progress()


def _activate(op: Op) -> None:
    op.state = ACTIVE
    for call in op.calls:
        if call.verb == "recv":
            call.memory.bytes.fill(0xFF)
    made_progress()


def _move(call: Call, other: Call) -> None:
    send, recv = (call, other) if call.verb == "send" else (other, call)
    np.copyto(recv.memory.bytes, send.memory.bytes)
    ops = [side.op for side in (send, recv) if side.op is not None]
    send.moved = recv.moved = True
    send.begin = recv.begin = max(op.start for op in ops)
    send.partner = recv.partner = None
    for op in ops:
        if op.state == ACTIVE and all(each.moved for each in op.calls):
            _finish(op)
    made_progress()


def _finish(op: Op) -> None:
    """All calls of an active operation have met their counterparts: it took until the last of
    them was there, and then as long as the busier direction takes."""
    op.end = max(call.begin for call in op.calls) + op.duration
    op.state, op.calls = DONE, ()


def drop(op: Op) -> None:
    """Abandon the calls of an operation: it ends without them, its receive buffers undefined.
    The lock is held."""
    buffers = [call.memory.bytes for call in op.calls if call.verb == "recv" and not call.moved]
    op.calls = ()
    if op.state == ACTIVE:
        op.end, op.state = op.start, DONE
    elif op.state == QUEUED:
        op.run = partial(_undefine, buffers)


def _undefine(buffers: list[npt.NDArray[np.uint8]]) -> None:
    for buffer in buffers:
        buffer.fill(0xFF)


def _mismatch(call: Call, other: Call) -> None:
    send, recv = (call, other) if call.verb == "send" else (other, call)
    text = (
        f"rank {send.member.rank} sends {send.nbytes} bytes ({place(send.where)}), "
        f"rank {recv.member.rank} expects {recv.nbytes} ({place(recv.where)})"
    )
    for side in (call, other):
        if side.op is not None and side.op.state < DONE:
            error = side.member.mismatch(text)
            _fail(side.op, error)


def _unmatched(op: Op, blame: list[Call]) -> str:
    if not blame:
        return f"waited {core.timeout():g} s for {op}, which another thread does not finish"
    call = blame[0]
    why = call.lost or call.member.clique.why_missing(call)
    return (
        f"rank {call.member.rank} waited {core.timeout():g} s to {call} "
        f"(issued at {place(call.where)}): {why}"
    )


def _deadlock(circle: list[_Need]) -> str:
    ops = list(dict.fromkeys(op for op, _ in circle if op.calls))
    ranks = {op.calls[0].member.rank for op in ops}
    parts = "; ".join(f"rank {op.calls[0].member.rank}: {op}" for op in ops)
    return f"{name_ranks(ranks)} wait for each other, each behind its own stream: {parts}"
