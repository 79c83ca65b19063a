"""How memory grows with the sequence: `python -m ringrt.bench.memory JSON` is a process that makes
one forward and one backward pass, and says by how much it grew at most."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from ringrt.bench.cases import Case, Settings, Shape
from ringrt.bench.check import Wrong
from ringrt.bench.measurement import Measurement
from ringrt.bench.problems import Verbs, backend, inputs

_LIMIT_S = 600
#: Tokens of the warm-up, which compiles, starts threads and fills pools.
_WARM_UP = 256
#: Growth below so many bytes counts as so many: allocators round up.
_NOISE = 4 << 20


def run(case: Case, settings: Settings) -> Iterator[Measurement]:
    """The growth at twice the length over that at the length, both beyond what must be held:
    out, lse, dq, dk, dv, and the state (m, z, y). Times stay empty: nothing is timed."""
    once, twice = (
        _measured(replace(case.shape, length=n * case.shape.length), settings) for n in (1, 2)
    )
    figures = {
        "bytes a token": once / case.shape.length,
        "bytes a token at twice the length": twice / case.shape.length / 2,
    }
    value = max(twice, _NOISE) / max(once, _NOISE)
    yield case.row(value=value, unit="× at twice the length", figures=figures)


def _measured(shape: Shape, settings: Settings) -> int:
    asked = {"shape": asdict(shape), "backend": settings.backend}
    done = subprocess.run(
        [sys.executable, "-m", "ringrt.bench.memory", json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise Wrong(f"a fresh process failed: {last[0]}")
    return int(done.stdout)


def growth(shape: Shape, name: str) -> int:
    """Bytes by which this process grew at most in both passes, beyond results and state."""
    kernel = backend(name, 1)
    _both(Verbs(kernel, inputs(replace(shape, length=min(_WARM_UP, shape.length)))))
    verbs = Verbs(kernel, inputs(shape))
    before = _now()
    _both(verbs)
    return _peak() - before - must_hold(shape)


def must_hold(shape: Shape) -> int:
    """Bytes of out, lse, dq, dk, dv and (m, z, y), all in float32."""
    rows = shape.length * shape.heads
    return 4 * (5 * rows * shape.head_dim + 3 * rows)


def _both(verbs: Verbs) -> None:
    verbs.call("backward")()


def _now() -> int:
    """Bytes that are resident; where the system does not tell, the most that ever were."""
    return _status("VmRSS") or _peak()


def _peak() -> int:
    """The most bytes that ever were resident."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status("VmHWM") or most * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    [line] = [line for line in lines if line.startswith(field)] or ["0 0"]
    return int(line.split()[1]) * 1024


def main() -> None:
    """The program."""
    asked = json.loads(sys.argv[1])
    np.seterr(all="ignore")
    print(growth(Shape(**asked["shape"]), asked["backend"]))


if __name__ == "__main__":
    main()
