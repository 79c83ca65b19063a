"""What every part of the simulator shares: one lock, and what belongs to each host thread.

`CHANGED` guards all state. Each public function takes it once; functions whose text says "the
lock is held" expect to be called inside. The simulator's own `__del__` methods do not take it,
since they run at any moment, in the middle of a change too: they leave a note that the next call
reads. Those of the program under test may, so that it can be taken twice.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringrt.cudasim.errors import SimulatorError, StreamRace

#: A place in the program under test: file and line.
Where = tuple[str, int]

CHANGED = threading.Condition(threading.RLock())

_HERE = os.path.dirname(__file__) + os.sep


@dataclass(eq=False, slots=True)
class Late:
    """An error found after the call that caused it, until some thread has been told."""

    error: StreamRace
    told: bool = False


@dataclass(eq=False, slots=True)
class HostThread:
    """What CUDA, CuPy and NCCL keep for each thread of the host."""

    device: int = 0
    #: The current stream of each device, where it is not the null stream.
    streams: dict[int, Any] = field(default_factory=dict)
    stream_stack: list[tuple[int, Any]] = field(default_factory=list)
    device_stack: list[int] = field(default_factory=list)
    #: Simulated time at which the last thing that this thread waited for had ended, in seconds.
    time: float = 0.0
    synchronisations: int = 0
    #: The first fault of an operation that this thread issued, by device.
    sticky: dict[int, Exception] = field(default_factory=dict)
    late: list[Late] = field(default_factory=list)
    #: How many NCCL groups are open, and the calls made since the outermost began.
    group_depth: int = 0
    group_calls: list[Any] = field(default_factory=list)
    #: Captures begun by this thread and not yet ended.
    captures: list[Any] = field(default_factory=list)
    name: str = ""

    def raise_sticky(self, device: int) -> None:
        """CUDA reports a fault again and again, at every later call on that device."""
        if self.sticky and device in self.sticky:
            raise self.sticky[device].with_traceback(None)


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = HostThread(name=threading.current_thread().name)


class _Shared:
    """Global state that is no container of its own."""

    late: list[Late]
    seed: int

    def __init__(self) -> None:
        self.late, self.seed = [], 0


SHARED = _Shared()
_local = _Local()
#: What to do at the beginning of every call: `lanes` adds the reading of notes left by `__del__`.
ON_ENTER: list[Callable[[], None]] = []
#: What `reset` does besides, from the modules that have something to forget.
ON_RESET: list[Callable[[], None]] = []


def current() -> HostThread:
    """The calling thread."""
    return _local.thread


def enter() -> HostThread:
    """Begin a call: the calling thread, after raising what was found out since its last call.
    The lock is held."""
    for action in ON_ENTER:
        action()
    thread = _local.thread
    while thread.late:
        late = thread.late.pop(0)
        if not late.told:
            late.told = True
            raise late.error
    return thread


def report_late(error: StreamRace, threads: set[HostThread]) -> None:
    """Keep an error for the next call of any of the threads, and for `check`. The lock is held."""
    late = Late(error)
    SHARED.late = [*(old for old in SHARED.late if not old.told), late]
    for thread in threads:
        thread.late.append(late)


def caller() -> Where:
    """The nearest place outside the simulator that led to this call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def place(where: Where) -> str:
    """A place as text, short enough for an error's line."""
    folder, file = os.path.split(where[0])
    return f"{os.path.join(os.path.basename(folder), file)}:{where[1]}"


def timeout() -> float:
    """How long a host thread waits for other ranks, in seconds."""
    text = os.environ.get("RINGRT_CUDASIM_TIMEOUT", "10")
    try:
        return float(text)
    except ValueError:
        raise SimulatorError(f"RINGRT_CUDASIM_TIMEOUT: expected seconds, got {text!r}") from None


def synchronisations() -> int:
    """How often the calling thread has waited for the device so far. Queries do not count."""
    return _local.thread.synchronisations


def set_seed(seed: int) -> None:
    """Choose the order in which the threads of kernels run from now on. A right kernel gives the
    same result for every seed."""
    with CHANGED:
        SHARED.seed = seed


def check() -> None:
    """Raise what has been found out and not been reported to any thread yet."""
    with CHANGED:
        for action in ON_ENTER:
            action()
        for late in SHARED.late:
            if not late.told:
                late.told = True
                raise late.error


def reset() -> None:
    """Forget queued work, accesses, open groups and captures, and what went wrong in the calling
    thread. For the time between two tests: arrays and streams stay valid, communicators do not.
    """
    with CHANGED:
        for action in (*ON_ENTER, *ON_RESET):
            action()
        thread = current()
        thread.sticky.clear()
        thread.late.clear()
        thread.group_calls.clear()
        thread.captures.clear()
        thread.group_depth = 0
        SHARED.late.clear()
