"""Ranks that are told what to do, all at the same moment: threads of this process, or this process
and its peers. A time is that of the slowest rank, from when all begin."""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from ringrt.launch import run_threads
from ringrt.ring import Ring

T = TypeVar("T")
Work = Callable[[Ring], T]

#: Seconds for one call. Kernels may have to be compiled, and slow ones have long sequences.
TIMEOUT_S = 600.0


class Ranks(Protocol):
    """What both kinds have in common."""

    def do(self, work: Work[T]) -> T:
        """Have every rank do it; what rank 0, or in a process its own, gives."""

    def seconds(self, work: Work[object]) -> float:
        """Have every rank do it; the time of the slowest."""

    def alone(self, call: Callable[[], object]) -> float:
        """Make a call without a ring, while no rank does anything; its time."""


class _Done(NamedTuple):
    rank: int
    value: Any
    begin: float
    end: float


class Team:
    """Thread ranks of one thread each, that wait for work without using a core. `options` as for
    `Ring`. Use it as a context manager."""

    def __init__(self, ranks: int, **options: Any) -> None:
        self._tasks: list[queue.SimpleQueue[Work[Any] | None]] = [
            queue.SimpleQueue() for _ in range(ranks)
        ]
        self._done: queue.SimpleQueue[_Done | BaseException] = queue.SimpleQueue()
        self._gate = threading.Barrier(ranks)
        self._options = {"threads": 1, "timeout": TIMEOUT_S} | options
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def do(self, work: Work[T]) -> T:
        """See `Ranks.do`."""
        first: T = min(self._each(work)).value
        return first

    def seconds(self, work: Work[object]) -> float:
        """See `Ranks.seconds`."""
        done = self._each(work)
        return max(each.end for each in done) - min(each.begin for each in done)

    def alone(self, call: Callable[[], object]) -> float:
        """See `Ranks.alone`."""
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tasks in self._tasks:
            tasks.put(None)
        self._thread.join(10)

    def _each(self, work: Work[Any]) -> list[_Done]:
        for tasks in self._tasks:
            tasks.put(work)
        found = []
        for _ in self._tasks:
            done = self._done.get(timeout=TIMEOUT_S)
            if isinstance(done, BaseException):
                raise done
            found.append(done)
        return found

    def _run(self) -> None:
        try:
            run_threads(self._rank, len(self._tasks), **self._options)
        except BaseException as error:
            self._done.put(error)

    def _rank(self, ring: Ring) -> None:
        """What goes wrong is told at once: the others may be waiting for work, and not for this
        rank."""
        try:
            while (work := self._tasks[ring.rank].get()) is not None:
                self._gate.wait(TIMEOUT_S)
                begin = time.perf_counter()
                value = work(ring)
                self._done.put(_Done(ring.rank, value, begin, time.perf_counter()))
        except BaseException as error:
            self._done.put(error)
            raise


class Process:
    """This process's rank of a ring of processes, which all make the same calls."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def do(self, work: Work[T]) -> T:
        """See `Ranks.do`."""
        return work(self._ring)

    def seconds(self, work: Work[object]) -> float:
        """See `Ranks.seconds`. The same on every rank, so that all repeat alike."""
        transport = self._ring.transport
        transport.barrier(TIMEOUT_S)
        begin = time.perf_counter()
        work(self._ring)
        own = struct.pack("d", time.perf_counter() - begin)
        every = transport.all_gather_bytes(own, TIMEOUT_S)
        return float(max(struct.unpack("d", each)[0] for each in every))

    def alone(self, call: Callable[[], object]) -> float:
        """See `Ranks.alone`. Rank 0 makes the call."""
        return self.seconds(lambda ring: call() if ring.rank == 0 else None)
