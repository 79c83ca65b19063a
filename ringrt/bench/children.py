"""Cases are measured in processes of their own, bound to cores before anything starts a thread.
One that crashes or hangs costs a row, and the rest goes on in a new process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from ringrt.bench.cases import Case, Settings
from ringrt.bench.cores import cores, environment, pinned
from ringrt.bench.measurement import FAILED, Measurement

#: Seconds for one case, from the answer before it; kernels may have to be compiled first.
CASE_LIMIT_S = 900.0
#: Seconds between looks at whether all processes live.
_LOOK_S = 1.0
_CHILD = "ringrt.bench.child"


def measured(
    cases: Sequence[Case], settings: Settings, limit_s: float = CASE_LIMIT_S
) -> Iterator[Measurement]:
    """The rows of cases that want the same processes and cores."""
    left = list(cases)
    while left:
        with _Children(left, settings) as children:
            for answer in children.answers(limit_s):
                if "done" in answer:
                    left.pop(0)
                else:
                    yield Measurement.from_json(answer)
            if left and children.loss is not None:
                yield left.pop(0).row(state=FAILED, why=children.loss)


class _Children:
    """The processes that measure some cases: one, or one for each of two ranks."""

    def __init__(self, cases: Sequence[Case], settings: Settings) -> None:
        #: Why they ended before all was answered.
        self.loss: str | None = None
        self._count = len(cases)
        self._folder = tempfile.TemporaryDirectory()
        self._words = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        asked = {"settings": asdict(settings), "cases": [case.to_json() for case in cases]}
        file = Path(self._folder.name) / "cases.json"
        file.write_text(json.dumps(asked))
        threads = 1 if cases[0].processes == "gloo" else cases[0].cores
        self._processes = [
            subprocess.Popen(
                command,
                env=os.environ | environment(threads),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._words,
                text=True,
                start_new_session=True,
            )
            for command in _commands(cases[0], str(file))
        ]
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._words.close()
        self._folder.cleanup()

    def answers(self, limit_s: float) -> Iterator[dict[str, object]]:
        """As they come, until all cases are done or no more can be; `loss` says why, if no answer
        says so."""
        done = 0
        while done < self._count:
            line = self._next_line(limit_s)
            if line is None:
                return
            answer = json.loads(line)
            done += "done" in answer
            yield answer
            if answer.get("broken"):
                return

    def _next_line(self, limit_s: float) -> str | None:
        """What the first rank says next; None, and `loss`, when it will say nothing more, or
        another one has died, without which it would wait in vain."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=min(limit_s, _LOOK_S))
                if line is None:
                    self.loss = self._how_it_ended(self._processes[0])
                return line
            if dead := [each for each in self._processes[1:] if each.poll()]:
                self.loss = self._how_it_ended(dead[0])
                return None
        self._end()
        self.loss = f"no answer in {limit_s:g} s; the process was ended"
        return None

    def _listen(self) -> None:
        """To the first rank, which speaks for all."""
        pipe = self._processes[0].stdout
        assert pipe is not None
        for line in pipe:
            self._lines.put(line)
        self._lines.put(None)

    def _how_it_ended(self, process: subprocess.Popen[str]) -> str:
        status = process.wait(timeout=30)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        self._words.seek(0)
        said = self._words.read().strip().splitlines()
        return f"the process ended with {how}" + (f": {said[-1].strip()[:200]}" if said else "")

    def _end(self) -> None:
        """With all that they started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)


def _commands(case: Case, file: str) -> list[list[str]]:
    """What starts the processes of a case. Ranks of gloo have a core each; those of MPI share
    theirs, for one of them also computes with as many threads as there are ranks."""
    on = cores(case.cores)
    if case.processes == "one":
        return [pinned(on, _CHILD, file)]
    if case.processes == "mpi":
        return [[str(mpirun()), "-n", str(case.cores), *pinned(on, _CHILD, file, "mpi")]]
    store = f"{file}.store"
    return [
        pinned(on[rank : rank + 1], _CHILD, file, "gloo", str(rank), str(case.cores), store)
        for rank in range(case.cores)
    ]


def mpirun() -> str | None:
    """The one that was installed beside Python, or another."""
    beside = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    return beside or shutil.which("mpirun")
