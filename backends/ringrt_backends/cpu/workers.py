"""The threads of one backend, and how they share work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ringrt.errors import KernelError
from ringrt.plan.partition import Array

#: Takes what raises if the work is to be broken off.
Task = Callable[[Callable[[], None]], None]

#: Tasks that the caller does itself before it listens to signals again.
_BETWEEN_SIGNALS = 64


class Control:
    """What running work looks at: the number of its next task, and whether to leave off; int64,
    for compiled code."""

    def __init__(self) -> None:
        self.numbers: Array = np.zeros(2, np.int64)

    def stop(self) -> None:
        """Leave off, after the task at hand."""
        self.numbers[1] = 1

    def check(self) -> None:
        """Raises `KernelError` if the work is to be broken off."""
        if self.numbers[1]:
            raise KernelError("backend cpu was broken off while it was computing")


class Workers:
    """`count` threads; a single one is the caller itself. All work is broken off by `close`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, "ringrt-cpu") if count > 1 else None
        self._closed = False
        self._controls: list[Control] = []
        self._lock = threading.Lock()

    def drive(
        self,
        driver: Callable[..., Any],
        tasks: Array,
        *arguments: Any,
        own: Sequence[tuple[Any, ...]] | None = None,
    ) -> None:
        """Run `driver(control, tasks, *arguments)` on all threads, until it has taken all tasks
        `[n, ...]`: compiled code that holds no interpreter lock. `own`: each thread's further
        arguments."""
        own = own or [()] * self.count
        if self._pool is None or len(tasks) <= 1:
            # Between slices the interpreter sees to Ctrl-C.
            for start in range(0, len(tasks), _BETWEEN_SIGNALS):
                with self._control() as control:
                    part = tasks[start : start + _BETWEEN_SIGNALS]
                    driver(control.numbers, part, *arguments, *own[0])
            return
        with self._control() as control:
            calls = [partial(driver, control.numbers, tasks, *arguments, *mine) for mine in own]
            self._together(calls, control)

    def each(self, tasks: Sequence[Task]) -> None:
        """Run all tasks, which ask now and then whether to go on."""
        with self._control() as control:
            if self._pool is None:
                for task in tasks:
                    task(control.check)
                return
            self._together([partial(task, control.check) for task in tasks], control)

    def close(self) -> None:
        """End the threads, also in the midst of their work."""
        with self._lock:
            self._closed = True
            for control in self._controls:
                control.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _together(self, calls: Iterable[Callable[[], None]], control: Control) -> None:
        """If one fails or the caller is interrupted, the others are broken off and waited for:
        nothing goes on in the background."""
        assert self._pool is not None
        futures: list[Future[None]] = []

        def leave_off(done: Future[None]) -> None:
            if done.cancelled() or done.exception() is not None:
                control.stop()

        try:
            for one in calls:
                futures.append(self._pool.submit(one))
                futures[-1].add_done_callback(leave_off)
            for future in futures:
                future.result()
        except BaseException:
            control.stop()
            # One that `close` has cancelled is never reported as done, so it is not waited for.
            wait([future for future in futures if not future.cancel()])
            if self._closed:
                control.check()
            raise

    @contextmanager
    def _control(self) -> Iterator[Control]:
        control = Control()
        with self._lock:
            self._controls.append(control)
            if self._closed:
                control.stop()
        try:
            yield control
        finally:
            with self._lock:
                self._controls.remove(control)
        control.check()
