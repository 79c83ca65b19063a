"""The host: NumPy, at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ringrt.device import Index, Kind
from ringrt.device.dtypes import numpy_dtype
from ringrt.plan.partition import Array


class HostDevice:
    """See `ringrt.device.Device`."""

    kind: Kind = "cpu"
    capturing = False
    stream: Any = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Nothing is ever left queued."""
        yield

    def prepare(self, dtype: str) -> None:
        """Nothing."""

    def place(self, x: Array) -> Array:
        """Itself."""
        return x

    def to_host(self, x: Array, dtype: str) -> Array:
        """Itself."""
        return x

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """As NumPy."""
        return np.empty(shape, numpy_dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """As NumPy."""
        return np.zeros(shape, numpy_dtype(dtype))

    def take(self, x: Array, index: Index, axis: int) -> Array:
        """A view where it is contiguous."""
        return np.ascontiguousarray(x[(*(slice(None),) * axis, index)])

    def add_rows(self, total: Array, to: Index, part: Array, rows: Index) -> None:
        """NaN and inf are the caller's to see."""
        with np.errstate(invalid="ignore", over="ignore"):
            total[:, to] += part[:, rows]

    def rounded(self, x: Array, dtype: str) -> Array:
        """x itself if it has the dtype already."""
        with np.errstate(over="ignore"):
            return x.astype(numpy_dtype(dtype), copy=False)

    def row_delta(self, dout: Array, out: Array, dtype: str, dlse: Array | None = None) -> Array:
        """In float64, rounded once."""
        sums = np.float64 if dtype == "float64" else np.float32
        with np.errstate(invalid="ignore", over="ignore"):
            product = np.einsum("brhd,brhd->bhr", dout, out, dtype=np.float64)
            product = product if dlse is None else product - dlse
            return np.ascontiguousarray(product.astype(sums))

    def sink_gradient(self, sink: Array, lse: Array, delta: Array, seen: Array) -> Array:
        """In float64."""
        shift = sink.astype(np.float64)[None, :, None] - lse[..., seen].astype(np.float64)
        part: Array = -(np.exp(shift) * delta[..., seen].astype(np.float64)).sum(axis=(0, 2))
        return np.where(sink == -np.inf, 0, part)

    def drain(self, timeout: float) -> None:
        """Nothing is ever left queued."""

    def mark(self) -> float:
        """The clock."""
        return time.perf_counter()

    def seconds_between(self, begin: float, end: float) -> float:
        """Their difference."""
        return end - begin


HOST = HostDevice()
