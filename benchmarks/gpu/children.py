"""Sections run in processes of their own, so that a case which crashes, hangs or leaves CUDA out
of order is one line, and the rest goes on in a new process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from gpu.child import Result, known

#: The rest is given up when so many processes in a row, or so many seconds, have been lost
#: without one good case.
_MOST_LOST, _MOST_LOST_S = 40, 300.0
_HERE = Path(__file__).parent.parent


def run(
    module: str, cases: list[dict[str, Any]], environment: Mapping[str, str], limit_s: float
) -> Iterator[Result]:
    """The result of every case, in order; each may take `limit_s` seconds."""
    left, lost, since = list(cases), 0, time.monotonic()
    while left and lost < _MOST_LOST and time.monotonic() - since < _MOST_LOST_S:
        lost += 1
        with _Child(module, left, environment) as child:
            answered = 0
            for result in child.results(limit_s):
                answered += 1
                if not result.get("broken"):
                    lost, since = 0, time.monotonic()
                yield result
            left = left[answered:]
            if left and child.loss is not None:
                yield _lost(module, left.pop(0), child.loss)
    if left:
        yield _lost(module, left[0], f"not run, nor {len(left) - 1} cases after it: nothing works")


def _lost(module: str, case: dict[str, Any], why: str) -> Result:
    return known(module, case) | {"wrong": [why], "figures": {}}


class _Child:
    """A process at work on cases."""

    def __init__(
        self, module: str, cases: list[dict[str, Any]], environment: Mapping[str, str]
    ) -> None:
        #: How it was lost before it had answered all.
        self.loss: str | None = None
        self._cases = cases
        self._words = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        reading, writing = os.pipe()
        path = os.pathsep.join(filter(None, (str(_HERE), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu.child", module, str(writing)],
            env=os.environ | environment | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=self._words,
            stderr=self._words,
            pass_fds=[writing],
            start_new_session=True,
            text=True,
        )
        os.close(writing)
        self._lines: queue.Queue[str | None] = queue.Queue()
        for work in (self._tell, lambda: self._listen(os.fdopen(reading))):
            threading.Thread(target=work, daemon=True).start()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._words.close()

    def results(self, limit_s: float) -> Iterator[Result]:
        """As they come, until there are no more; `loss` says why, if that is too early."""
        for _ in self._cases:
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                self._end()
                self.loss = f"no answer in {limit_s:g} s; the process was ended"
                return
            if line is None:
                self.loss = self._how_it_ended()
                return
            result = json.loads(line)
            yield result
            if result.get("broken"):
                return

    def _tell(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as to:
            json.dump(self._cases, to)

    def _listen(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._lines.put(line)
        self._lines.put(None)

    def _how_it_ended(self) -> str:
        status = self._process.wait(timeout=30)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        self._words.seek(0)
        said = self._words.read().strip().splitlines()
        return f"the process ended with {how}" + (f": {said[-1].strip()[:200]}" if said else "")

    def _end(self) -> None:
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
