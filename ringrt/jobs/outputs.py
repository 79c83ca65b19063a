"""Where out and lse go: one file that every rank writes its own rows of, and that appears
under its name only when it is whole."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ringrt.engine.agree import agree_ready, gather
from ringrt.errors import ConfigError
from ringrt.jobs.tensorfile import create_tensors, map_for_writing
from ringrt.plan.partition import Array, Runs
from ringrt.plan.problem import Problem
from ringrt.ring import Ring


def check_output(path: Path, inputs: Path | None) -> None:
    """`ConfigError` for an output that cannot be written, or that would replace the job's own
    input, before anything is computed."""
    if inputs is not None and path.exists() and inputs.exists() and path.samefile(inputs):
        raise ConfigError("output.path", "another file than input.path", path)
    if path.suffix != ".safetensors":
        raise ConfigError("output.path", "a name that ends in .safetensors", path.name)
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("output.path", "a folder that can be written to", path.parent)
    if path.is_dir():
        raise ConfigError("output.path", "a file", f"the folder {path}")


def write_output(
    ring: Ring, path: Path, problem: Problem, runs: Runs, out: Array, lse: Array
) -> None:
    """Write this rank's rows (at the runs' positions) of out and lse. Collective. The file is
    made under a temporary name beside `path` and renamed once every rank is done; the ranks
    must share the file system."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    draft = path.with_name(gather(ring.transport, draft.name.encode(), ring.timeout)[0].decode())
    try:
        _together(ring, lambda: _create(draft, problem) if ring.rank == 0 else None)
        _together(ring, lambda: _write_rows(draft, runs, out, lse))
        _together(ring, lambda: draft.replace(path) if ring.rank == 0 else None)
    finally:
        if ring.rank == 0:
            draft.unlink(missing_ok=True)


def _together(ring: Ring, action: object) -> None:
    """Do it on every rank; if it fails on one, all raise."""
    failure: Exception | None = None
    try:
        action()  # type: ignore[operator]
    except OSError as error:
        failure = ConfigError("output.path", "a file that can be written", error.strerror or error)
    agree_ready(ring.transport, {}, failure, ring.timeout)


def _create(draft: Path, problem: Problem) -> None:
    rows = (problem.batch, problem.q_length)
    create_tensors(
        draft,
        {
            "out": ((*rows, problem.q_heads, problem.value_dim), problem.dtype),
            "lse": ((rows[0], problem.q_heads, rows[1]), problem.state_dtype),
        },
    )


def _write_rows(draft: Path, runs: Runs, out: Array, lse: Array) -> None:
    tensors = map_for_writing(draft)
    begin = 0
    for run in runs:
        at = slice(run.start, run.start + run.stride * run.count, run.stride)
        rows = slice(begin, begin + run.count)
        tensors["out"][:, at] = out[:, rows]
        tensors["lse"][:, :, at] = lse[:, :, rows]
        begin += run.count
    for tensor in tensors.values():
        if isinstance(tensor, np.memmap):
            tensor.flush()
