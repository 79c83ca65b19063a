"""What several test modules need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "mpi_programs"
PARTITIONS = ("contiguous", "striped", "zigzag")
BACKENDS = ("reference", "cpu")

#: Largest absolute error of out and lse for standard normal inputs, by dtype. For the 16-bit
#: dtypes out is rounded, by up to half a unit in the last place of numbers below 4.
TOLERANCE = {
    "float64": (1e-13, 1e-13),
    "float32": (2e-6, 2e-6),
    "float16": (1e-3 + 2e-6, 2e-6),
    "bfloat16": (8e-3 + 2e-6, 2e-6),
}


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def random_qkv(
    length=37,
    *,
    kv_length=None,
    batch=1,
    q_heads=2,
    kv_heads=1,
    head_dim=8,
    value_dim=None,
    dtype="float32",
    seed=0,
):
    """Standard normal q, k, v in the layout [batch, length, heads, dim]."""
    rng = np.random.default_rng(seed)
    kv_length = length if kv_length is None else kv_length
    value_dim = head_dim if value_dim is None else value_dim
    shapes = (
        (batch, length, q_heads, head_dim),
        (batch, kv_length, kv_heads, head_dim),
        (batch, kv_length, kv_heads, value_dim),
    )
    return tuple(rng.standard_normal(shape).astype(numpy_dtype(dtype)) for shape in shapes)


def assert_close(result, expected, dtype="float32", scale=1.0):
    """out and lse within the dtype's tolerance; empty rows exactly empty."""
    for got, want, tolerance in zip(result, expected, TOLERANCE[dtype], strict=True):
        assert got.shape == want.shape
        got = got.astype(np.float64)
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)


def lines_run(function):
    """How many lines of Python a call runs, on this thread. A count of work that does not depend
    on how busy the machine is, as a time does."""
    count = 0

    def see(frame, event, arg):
        nonlocal count
        count += event == "line"
        return see

    before = sys.gettrace()
    sys.settrace(see)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def at_once(functions):
    """Call all, each on a thread; what each returned or raised."""
    results = [None] * len(functions)

    def run(index):
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), "a rank hangs"
    return results


def data(value, count=5):
    """Bytes for a message."""
    return np.full(count, value, np.uint8)


def mpirun(ranks: int, *command: str | Path, timeout: float = 60, env=None):
    """Run Python arguments under mpirun; never longer than `timeout` seconds."""
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    launcher = beside or shutil.which("mpirun")
    assert launcher, "the extra `mpi` installs mpirun"
    return subprocess.run(
        [launcher, "-n", str(ranks), sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | (env or {}),
        cwd=ROOT,
    )


def torchrun(ranks: int, *command: str | Path, timeout: float = 100, env=None):
    """Run a Python program, or `-m` and a module, under torchrun; never longer than `timeout`
    seconds."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(ranks), *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | (env or {}),
        cwd=ROOT,
    )


def ringrt_command(*arguments: str | Path, timeout: float = 100, env=None, cwd=ROOT):
    """Run the `ringrt` command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "ringrt", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | (env or {}),
        cwd=cwd,
    )
