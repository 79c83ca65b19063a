"""Capture of streams into graphs.

While a stream is being captured its operations are checked and recorded, not queued. Streams that
wait for an event of the capture join it, and must be joined back by another event before it ends.
A launch queues the recorded operations again, with their order, and checks them like any others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ringrt.cudasim.clocks import Access, Clock, merge
from ringrt.cudasim.copies import lane_of, poison
from ringrt.cudasim.core import CHANGED, HostThread, enter
from ringrt.cudasim.errors import SimulatorError
from ringrt.cudasim.executor import Op
from ringrt.cudasim.heap import Allocation, Span
from ringrt.cudasim.lanes import CLOSED, Lane, Touch, issue, new_lane, record
from ringrt.cudasim.matching import again, post_all
from ringrt.cudasim.runtime import CUDARuntimeError
from ringrt.cudasim.stream import BaseStream


@dataclass(eq=False, slots=True)
class _Node:
    """A recorded operation, which itself never runs; `after` are such operations too."""

    op: Op
    touches: Sequence[Touch]
    after: Sequence[Op]


@dataclass(eq=False, slots=True)
class Capture:
    """A capture under way. Its clocks know only of the capture itself."""

    origin: Lane
    thread: HostThread
    nodes: list[_Node] = field(default_factory=list)
    clocks: dict[Lane, Clock] = field(default_factory=dict)
    ledgers: dict[Allocation, list[Access]] = field(default_factory=dict)
    over: bool = False

    def clock_of(self, lane: Lane) -> Clock:
        """What the next operation on a captured stream is ordered after."""
        return self.clocks[lane]

    def join(self, lane: Lane, clock: Clock) -> None:
        """A stream waits for an event of this capture. The lock is held."""
        if self.over:
            raise CUDARuntimeError(907, "the event's capture has ended")
        if lane.capture not in (None, self) or lane.null:
            raise CUDARuntimeError(905, f"{lane} waits for an event of a capture it is not part of")
        lane.capture = self
        merge(self.clocks.setdefault(lane, {}), clock)

    def add(self, op: Op, touches: Sequence[Touch], after: Sequence[Op]) -> Op:
        """Record an operation. The lock is held."""
        clock = self.clocks[op.lane]
        op.tick = clock[op.lane.id] = clock.get(op.lane.id, 0) + 1
        record(op, clock, touches, {}, self.ledgers)
        self.nodes.append(_Node(op, touches, after))
        return op


def begin(lane: Lane, mode: int | None) -> None:
    """Begin to capture a stream."""
    if lane.null:
        raise RuntimeError("cannot capture on the default (legacy) stream")
    if mode not in (None, 0, 1, 2):
        raise CUDARuntimeError(1, f"begin_capture: mode {mode}")
    with CHANGED:
        thread = enter()
        if lane.capture is not None:
            raise CUDARuntimeError(401, f"{lane} is being captured already")
        lane.capture = Capture(lane, thread)
        lane.capture.clocks[lane] = {}
        thread.captures.append(lane)


def end(lane: Lane) -> Graph:
    """End the capture that began on a stream."""
    with CHANGED:
        enter()
        capture = lane.capture
        if capture is None:
            raise CUDARuntimeError(401, f"{lane} is not being captured")
        if capture.origin is not lane:
            raise CUDARuntimeError(903, f"the capture began on {capture.origin}, not on {lane}")
        capture.over = True
        capture.thread.captures.remove(lane)
        for each in capture.clocks:
            each.capture = None
        known = capture.clocks[lane]
        for each, clock in capture.clocks.items():
            if known.get(each.id, 0) < clock.get(each.id, 0):
                text = f"{lane} has not waited for the last work captured on {each}"
                raise CUDARuntimeError(904, text)
        return Graph(capture)


class Graph:
    """Captured work. It keeps the memory that it uses from vanishing, but an array that was
    captured must still be there when it is launched."""

    def __init__(self, capture: Capture) -> None:
        self._nodes, self._origin = capture.nodes, capture.origin
        self._forks = [lane for lane in capture.clocks if lane is not capture.origin]
        self._awaited = {op for node in capture.nodes for op in node.after}
        #: Streams of its own, for what was captured on streams other than the first.
        self._lanes: dict[Lane, Lane] = {}
        self._last: tuple[Op, Clock] | None = None

    def launch(self, stream: BaseStream | None = None) -> None:
        """Queue the work on a stream, by default the current one, after its last launch."""
        lane = lane_of(stream)
        with CHANGED:
            enter()
            self._check(lane)
            begun = self._mark(lane, "graph launch", self._last)
            for fork in self._forks:
                if fork not in self._lanes:
                    self._lanes[fork] = new_lane(lane.device, blocking=False)
                self._mark(self._lanes[fork], "graph launch", begun)
            made: dict[Op, tuple[Op, Clock]] = {}
            for node in self._nodes:
                target = self._lanes.get(node.op.lane, lane)
                op = _replay(node, target, [made[old] for old in node.after])
                if node.op in self._awaited:
                    made[node.op] = op, dict(target.clock)
            self._last = self._mark(lane, "graph end", None)

    def upload(self, stream: BaseStream | None = None) -> None:
        """Prepare the launch: there is nothing to be prepared."""
        with CHANGED:
            enter()

    def _check(self, lane: Lane) -> None:
        if lane.capture is not None:
            raise SimulatorError(f"launching a graph on {lane}, which is captured: not simulated")
        if lane.device != self._origin.device:
            raise CUDARuntimeError(400, f"graph of device {self._origin.device}, launch on {lane}")
        for node in self._nodes:
            for touch in node.touches:
                if touch.allocation.freed:
                    raise SimulatorError(
                        f"graph launch: {touch.name} of {node.op.label} has been freed since the "
                        f"capture: {touch.allocation}"
                    )

    def _mark(self, lane: Lane, label: str, after: tuple[Op, Clock] | None) -> tuple[Op, Clock]:
        if after is not None:
            merge(lane.clock, after[1])
        op = issue(lane, label, after=[after[0]] if after is not None else [])
        return op, dict(lane.clock)

    def __del__(self) -> None:
        CLOSED.extend(self._lanes.values())


def _replay(node: _Node, lane: Lane, after: Sequence[tuple[Op, Clock]]) -> Op:
    for _, clock in after:
        merge(lane.clock, clock)
    for touch in node.touches:
        if touch.write and touch.allocation.device < 0:
            poison(Span(*touch[:3]), lane)
    old = node.op
    op = issue(
        lane,
        old.label,
        old.run,
        node.touches,
        duration=old.duration,
        after=[earlier for earlier, _ in after],
        calls=tuple(map(again, old.calls)),
        where=old.where,
    )
    post_all(op)
    return op
