"""Where arrays lie and work is done: the host, or a CUDA GPU.

The engine moves arrays and adds sums through this one interface, so that its loop reads the same
on both. On a GPU everything is queued on one stream and nothing waits for it before the end of a
pass; on the host everything is done when a call returns.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from ringrt.plan.partition import Array

Kind = Literal["cpu", "cuda"]
#: Rows along an axis: a slice of step 1, or int64 indices.
Index = Any
#: A point in a device's time.
Mark = Any


class Device(Protocol):
    """Arrays are NumPy's on the host and CuPy's on a GPU, where bfloat16 lies in uint16 arrays
    (CuPy computes nothing with it, and neither need ringrt: kernels do)."""

    kind: Kind
    #: Whether what is queued now is recorded into a graph, and runs when that is launched.
    capturing: bool
    #: What `Backend` verbs and `Transport.exchange` get as `stream`; None on the host.
    stream: Any

    def running(self) -> AbstractContextManager[None]:
        """A pass: work inside is ordered behind what the caller has queued, and what the caller
        queues later behind it."""

    def prepare(self, dtype: str) -> None:
        """Compile what arrays of that dtype, and sums of them, need; see `Backend.prepare`."""

    def place(self, x: Array) -> Array:
        """x here: itself, or a copy."""

    def to_host(self, x: Array, dtype: str) -> Array:
        """x as a NumPy array of that dtype; waits for what makes it."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """A new array, whose content is undefined."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """A new array of zeros."""

    def take(self, x: Array, index: Index, axis: int) -> Array:
        """Rows of x along an axis, contiguous: a view where they lie so, else a copy."""

    def add_rows(self, total: Array, to: Index, part: Array, rows: Index) -> None:
        """`total[:, to] += part[:, rows]`, both contiguous and of one floating dtype."""

    def rounded(self, x: Array, dtype: str) -> Array:
        """Sums in another dtype, rounded to nearest."""

    def row_delta(self, dout: Array, out: Array, dtype: str, dlse: Array | None = None) -> Array:
        """delta = rowsum(dout · out) `[batch, heads, rows]` of two arrays `[batch, rows, heads,
        dim]` of that dtype, summed in float64, in the dtype of sums; less dlse, which is like
        delta and contiguous."""

    def sink_gradient(self, sink: Array, lse: Array, delta: Array, seen: Array) -> Array:
        """This rank's part of dsink `[heads]`, a float64 NumPy array; see engine/backward.py. sink
        and seen are NumPy arrays."""

    def drain(self, timeout: float) -> None:
        """After a failure: wait a while for what is under way. Never raises."""

    def mark(self) -> Mark | None:
        """This point in what is being done; None while capturing."""

    def seconds_between(self, begin: Mark, end: Mark) -> float:
        """Time from one mark to another, once both have come to pass."""


def kind_of(x: Any) -> Kind | None:
    """Where an array lies; None if it is no array that ringrt takes as it is. Looks for CuPy only
    where somebody has imported it."""
    import numpy as np

    if isinstance(x, np.ndarray):
        return "cpu"
    modules = ("cupy", "ringrt.cudasim.api")
    kinds = tuple(sys.modules[name].ndarray for name in modules if name in sys.modules)
    return "cuda" if isinstance(x, kinds) else None
