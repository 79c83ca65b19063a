"""Which cores are measured on, and what keeps libraries to as many threads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ringrt.calls import available_cores
from ringrt.errors import ConfigError

_TOPOLOGY = Path("/sys/devices/system/cpu")


def can_pin() -> bool:
    """Whether a process can be bound to cores here; macOS cannot."""
    return hasattr(os, "sched_setaffinity")


def check_threads(threads: tuple[int, ...]) -> None:
    """`ConfigError` if the machine has fewer cores than asked for."""
    found = available_cores()
    for count in threads:
        if not 1 <= count <= found:
            expected = f"from 1 to {found}, the cores this process may use"
            raise ConfigError("--threads", expected, count)


def cores(count: int) -> list[int]:
    """The cores for so many threads: of two that are one core with two threads of its own, the
    second comes last. Empty where processes cannot be bound."""
    if not can_pin():
        return []
    free = sorted(os.sched_getaffinity(0))
    first = [core for core in free if core == min(_siblings(core) & set(free))]
    return (first + [core for core in free if core not in first])[:count]


def _siblings(core: int) -> set[int]:
    """The hardware threads of a core's own core, itself included."""
    try:
        text = (_TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return {core}
    found = {core}
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def environment(threads: int) -> dict[str, str]:
    """For a child whose libraries may use so many threads.

    OMP_PROC_BIND must not be true: PyTorch's OpenMP would bind the main thread to one core as it
    is imported, and every thread that is started later, ours included, would share that core. The
    process's own cores bind all of them alike."""
    names = ("OMP", "MKL", "OPENBLAS", "VECLIB_MAXIMUM")
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    told = {f"{name}_NUM_THREADS": str(threads) for name in names}
    return told | {"OMP_PROC_BIND": "false", "PYTHONPATH": path}


def pinned(on: list[int], module: str, *arguments: str) -> list[str]:
    """The command that runs a module of Python bound to some cores from its first moment."""
    launcher = str(Path(__file__).with_name("pinned.py"))
    return [sys.executable, "-P", launcher, ",".join(map(str, on)), module, *arguments]
