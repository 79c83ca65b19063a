"""What one rank did in one pass, counted and timed as it happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ringrt.device import Device, Mark

What = Literal["compute", "exchange", "wait"]


class Span(NamedTuple):
    """What went on in a ring step (−1 before the first, or after the last), in seconds from the
    pass's beginning. `wait` is a wait for the exchange after the compute of the step."""

    step: int
    what: What
    begin: float
    end: float


@dataclass(slots=True)
class PassStats:
    """Counts and seconds of one pass on one rank.

    `peak_kv_bytes` is what the buffers of travelling tensors hold that were really made: the
    home shard, the slots, and what had to be packed to be sent. `seconds` is the pass from its
    first step to its result, of which `compute_s` was spent in the backend and `wait_s` waiting
    for peers after the compute of a step; all by the clock of the device that computes, and in
    `timeline` one by one.
    """

    rank: int
    backend: str
    operation: str = "forward"
    travel: str = "kv"
    tokens: int = 0
    steps: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    peak_kv_bytes: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    seconds: float = 0.0
    timeline: list[Span] = field(default_factory=list)


class Recorder:
    """Notes marks while a pass runs, and turns them into times when it is over: a device's marks
    say nothing before that."""

    def __init__(self, device: Device) -> None:
        self._device, self._begin = device, device.mark()
        self._noted: list[tuple[int, What, Mark, Mark]] = []

    def note(self, step: int, what: What, begin: Mark, end: Mark) -> None:
        """Something took place between two marks, unless there are none."""
        if begin is not None and end is not None:
            self._noted.append((step, what, begin, end))

    def resolve(self, stats: PassStats, end: Mark) -> None:
        """Fill in the times of a pass that ended at a mark."""
        between, start = self._device.seconds_between, self._begin
        total = {"compute": 0.0, "exchange": 0.0, "wait": 0.0}
        stats.timeline = []
        for step, what, first, last in self._noted:
            span = Span(step, what, between(start, first), between(start, last))
            stats.timeline.append(span)
            total[what] += span.end - span.begin
        stats.seconds = between(start, end)
        stats.compute_s, stats.wait_s = total["compute"], total["wait"]
