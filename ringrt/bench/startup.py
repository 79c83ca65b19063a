"""How long a fresh process takes to its first result, with its kernels compiled before and not."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ringrt.bench.cases import Case, Settings
from ringrt.bench.check import Wrong
from ringrt.bench.cores import environment
from ringrt.bench.interleave import quartiles
from ringrt.bench.measurement import Measurement

_LIMIT_S = 300
#: So many fresh processes, or one where it should be quick.
_PROCESSES = 3

_IMPORT = """
import sys, ringrt
print(*sorted({"numba", "llvmlite"} & sys.modules.keys()))
"""
_CALL = """
import sys, numpy as np, ringrt
rng = np.random.default_rng(0)
q, k, v, dout = (rng.standard_normal((1, 64, 8, 64), np.float32) for _ in range(4))
options = {"ranks": 1, "backend": sys.argv[1], "causal": True}
out, lse = ringrt.attention(q, k, v, **options)
ringrt.attention_backward(dout, q, k, v, out, lse, **options)
"""


def run(case: Case, settings: Settings) -> Iterator[Measurement]:
    """Seconds from the start of Python to its end."""
    count = 1 if settings.quick else _PROCESSES
    with tempfile.TemporaryDirectory() as folder:
        if case.kind == "import":
            times = [_import(folder) for _ in range(count)]
        else:
            times = _calls(case, settings, Path(folder), count)
    value = statistics.median(times)
    measured = {"value": value, "best": min(times), "quartiles": quartiles(times)}
    yield case.row(unit="s", times={"process": times}, **measured)


def _import(folder: str) -> float:
    """`Wrong` if what compiles kernels has been imported as well."""
    seconds, said = _process([sys.executable, "-c", _IMPORT], folder)
    if said.strip():
        raise Wrong(f"import ringrt imports {said.strip()}")
    return seconds


def _calls(case: Case, settings: Settings, folder: Path, count: int) -> list[float]:
    """A first call, forward and backward. A warm cache is one that a process has filled."""
    command = [sys.executable, "-c", _CALL, settings.backend]
    if case.detail["cache"] == "empty":
        return [_process(command, str(folder / str(turn)))[0] for turn in range(count)]
    _process(command, str(folder))
    return [_process(command, str(folder))[0] for _ in range(count)]


def _process(command: list[str], cache: str) -> tuple[float, str]:
    """Seconds, and what was said. Numba keeps what it compiles in the folder `cache`."""
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        env={**os.environ, **environment(1), "NUMBA_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise Wrong(f"a fresh process failed: {last[0]}")
    return seconds, done.stdout
