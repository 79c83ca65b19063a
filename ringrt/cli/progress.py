"""A progress bar on long work, on a terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

#: Work that is over sooner shows no bar.
_PATIENCE_S = 0.5


class LiveProgress:
    """Shows how far rank 0 has come. `ringrt.jobs.run.Progress`; also a context manager."""

    def __init__(self, hidden: bool) -> None:
        console = Console(stderr=True)
        self._hidden = hidden or not console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._began = time.monotonic()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._hidden or time.monotonic() - self._began < _PATIENCE_S:
            return
        if not self._tasks:
            self._bar.start()
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total)
        self._bar.update(self._tasks[phase], completed=done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks:
            self._bar.stop()
