"""Rings of the ranks under test: threads of this process, or the processes that a launcher started,
of which this is one."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ringrt.conformance.checks import Check, Failed, Outcome, Refused
from ringrt.conformance.ranks import Rank
from ringrt.device.driver import cupy, simulated
from ringrt.errors import TransportUnavailable
from ringrt.plugins import one_line
from ringrt.registry import registry
from ringrt.transport import Launch, Transport, TransportSpec

#: How long a rank may take for a check before it is said to hang, in seconds.
PATIENCE = 60.0
#: How long a process waits for MPI to let it go.
_GOODBYE = 3.0
#: The setting by which NCCL lets several ranks share a GPU.
_SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(slots=True)
class _Run:
    """A check on the ranks of this process, and what befell them, in the order in which it
    happened."""

    check: Check[Rank]
    errors: list[tuple[int, BaseException]] = field(default_factory=list)

    def on_rank(self, rank: Rank) -> None:
        try:
            rank.attach()
            self.check.body(rank)
        except Refused as refusal:
            self.errors.append((rank.rank, refusal))
        except BaseException as error:
            self.errors.append((rank.rank, error))
            with contextlib.suppress(Exception):
                rank.end.abort(f"the check failed on rank {rank.rank}")

    def outcome(self, size: int) -> Outcome:
        """That of the rank which failed by itself, rather than for another's failure."""
        own = [each for each in self.errors if isinstance(each[1], Failed | Refused)]
        for rank, error in own or self.errors:
            if isinstance(error, Refused):
                return Outcome(self.check.name, "refused", str(error))
            text = str(error) if isinstance(error, Failed) else one_line(error)
            return Outcome(self.check.name, "failed", f"rank {rank} of {size}: {text}", error)
        return Outcome(self.check.name, "passed")


def run_ranks(
    ends: Sequence[Transport], check: Check[Rank], together: Callable[[], None] = lambda: None
) -> Outcome:
    """Run a check on every end that is this process's, each in a thread of its own. `together`
    waits until all other processes have come as far: nobody leaves before."""
    run = _Run(check)
    try:
        ranks = [Rank(end) for end in ends]
    except AttributeError as error:
        return Outcome(check.name, "failed", one_line(error), error)
    threads = {
        rank: threading.Thread(target=run.on_rank, args=(rank,), daemon=True) for rank in ranks
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + PATIENCE
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, thread in threads.items() if thread.is_alive()]
    for rank in hanging:
        text = f"it hangs: it did not come back in {PATIENCE:g} s"
        run.errors.append((rank.rank, Failed(text)))
    together()
    for rank in ranks:
        if rank not in hanging:
            _leave(rank, run)
    return run.outcome(ends[0].size)


def _leave(rank: Rank, run: _Run) -> None:
    """Leave the ring; what goes wrong there is a failure too."""
    try:
        rank.close()
    except Exception as error:
        run.errors.append((rank.rank, Failed(f"close raised {one_line(error)}")))


class ThreadRings:
    """New rings of thread ranks in this process."""

    def __init__(self, spec: TransportSpec) -> None:
        self._name = spec.name
        [end] = registry().group(spec.name, 1)
        self._most = _most_ranks(end)
        end.close()

    def sizes(self, wanted: Sequence[int]) -> Sequence[int]:
        """Those sizes, as far as there can be such rings; none if they were all of several ranks
        and there can be none of two."""
        sizes = sorted({min(size, self._most) for size in wanted})
        return sizes if sizes[-1] >= min(2, *wanted) else []

    def run(self, check: Check[Rank], size: int) -> Outcome:
        """The check on a new ring of that size."""
        return run_ranks(registry().group(self._name, size), check)

    def leave(self, code: int) -> NoReturn:
        """End the process."""
        sys.exit(code)


class ProcessRings:
    """New rings of all processes. The outcome of a check is that of the first rank on which it
    failed, and the same everywhere."""

    def __init__(self, spec: TransportSpec, launcher: str, launch: Launch) -> None:
        self._name, self._size = spec.name, launch.size
        self._control = registry().connect(launcher)

    def sizes(self, wanted: Sequence[int]) -> Sequence[int]:
        """All processes; none if the sizes were all of several ranks and this is one alone."""
        return [self._size] if self._size >= min(2, *wanted) else []

    def run(self, check: Check[Rank], size: int) -> Outcome:
        """This process's part of the check on a new ring of all."""
        patience = 2 * PATIENCE
        end = registry().connect(self._name)
        mine = run_ranks([end], check, lambda: self._control.barrier(patience))
        own = isinstance(mine.error, Failed)
        raw = self._control.all_gather_bytes(
            json.dumps([mine.state, own, mine.detail]).encode(), patience
        )
        told = [json.loads(each) for each in raw]
        for wanted in (["failed", True], ["failed", False], ["refused", False]):
            for *how, detail in told:
                if how == wanted:
                    return Outcome(check.name, how[0], detail, mine.error or Failed(detail))
        return mine

    def leave(self, code: int) -> NoReturn:
        """End the process, all with the same code. Not by way of the interpreter's exit: a
        transport may have planned to end the whole job there, since some check aborted it."""
        sys.stdout.flush()
        with contextlib.suppress(Exception):
            self._control.barrier(PATIENCE)
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None:
            os._exit(code)
        # Launchers take a process that does not say goodbye to MPI, or leaves without the exit
        # handlers of C, for one that broke down, and end the others.
        watchdog = threading.Timer(_GOODBYE, os._exit, (code,))
        watchdog.daemon = True
        watchdog.start()
        with contextlib.suppress(Exception):
            mpi.Finalize()
        ctypes.CDLL(None).exit(code)
        raise AssertionError("exit does not return")


def rings_of(spec: TransportSpec, processes: bool) -> ThreadRings | ProcessRings:
    """How to make rings of a transport here: of `processes`, if a launcher started this one, or of
    threads. `TransportUnavailable` that says how to start where neither can be."""
    launch = spec.launched() if spec.launched is not None and processes else None
    if launch is not None:
        return ProcessRings(spec, spec.name, launch)
    launched = registry().launched() if processes else None
    if spec.over is not None and launched is not None:
        return ProcessRings(spec, launched[0].name, launched[1])
    if spec.group is not None or spec.over is not None:
        return ThreadRings(spec)
    raise TransportUnavailable(
        f"transport {spec.name}: its ranks are processes, which run the checks together: start "
        f"`ringrt check-transport {spec.name}` by its launcher, "
        + spec.start(f"ringrt check-transport {spec.name}")
    )


def _most_ranks(end: Transport) -> int:
    """How many thread ranks there can be: on GPUs one each, unless they can be shared."""
    if end.device == "cpu" or simulated() or os.environ.get(_SHARED_GPU) == "1":
        return sys.maxsize
    return int(cupy().cuda.runtime.getDeviceCount())
