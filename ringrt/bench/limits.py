"""What this machine can do at most: products of matrices, and multiply-adds alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringrt.bench.cases import Case, Settings
from ringrt.bench.interleave import Contender, interleave, quartiles, timed
from ringrt.bench.measurement import Measurement
from ringrt.bench.problems import backend, flop_limit


def run(case: Case, settings: Settings) -> Iterator[Measurement]:
    """A rate in GF/s, of all threads together."""
    if case.kind == "flop limit":
        yield _multiply_adds(case, settings)
        return
    size = case.detail["size"]
    call = _numpy(size) if case.kind == "sgemm" else _torch(size, case.shape.dtype, case.cores)
    times = interleave([Contender(case.kind, timed(call))], settings.repeats)
    rates = [2e-9 * size**3 / each for each in times[case.kind]]
    value = statistics.median(rates)
    figures = {"GF/s a core": value / case.cores}
    measured = {"value": value, "best": max(rates), "quartiles": quartiles(rates)}
    yield case.row(unit="GF/s", times=times, figures=figures, **measured)


def _multiply_adds(case: Case, settings: Settings) -> Measurement:
    kernel: Any = backend(settings.backend, 1)
    limit = flop_limit(kernel, case.shape.dtype)
    if limit is None:
        return case.row(unit="GF/s", why=f"backend {settings.backend} does not say")
    return case.row(unit="GF/s", value=limit / 1e9, figures={"GF/s a core": limit / 1e9})


def _numpy(size: int) -> Callable[[], object]:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), np.float32) for _ in range(2))
    c = np.empty_like(a)
    return lambda: np.matmul(a, b, out=c)


def _torch(size: int, dtype: str, threads: int) -> Callable[[], object]:
    import torch

    torch.set_num_threads(threads)
    a, b = (torch.randn(size, size, dtype=getattr(torch, dtype)) for _ in range(2))
    product: Any = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=product)
