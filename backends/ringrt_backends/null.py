"""Computes nothing: what remains is the ring itself, for plans, traces and transport tests."""

from __future__ import annotations

import numpy as np

from ringrt.backend import Stream
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import TileTable


class NullBackend:
    """See `ringrt.backend.Backend`. Its answer is that of rows which saw no key."""

    backward = True
    needs_out = False

    def supports(self, problem: Problem) -> str | None:
        """Everything: it ignores the problem, openly, which is why `auto` never takes it."""
        return None

    def prepare(self, problem: Problem) -> None:
        """Nothing."""

    def begin(
        self, q: Array, problem: Problem, sink: Array | None = None, stream: Stream = None
    ) -> tuple[Array, Problem]:
        """Remembers the shapes."""
        return q, problem

    def accumulate(
        self, state: object, k: Array, v: Array, tiles: TileTable, stream: Stream = None
    ) -> None:
        """Nothing."""

    def finish(self, state: tuple[Array, Problem], stream: Stream = None) -> tuple[Array, Array]:
        """out 0 and lse −inf."""
        q, problem = state
        batch, rows, heads, _ = q.shape
        out = np.zeros((batch, rows, heads, problem.value_dim), dtype=q.dtype)
        return out, np.full((batch, heads, rows), -np.inf, dtype=problem.state_dtype)

    def begin_backward(
        self,
        q: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        problem: Problem,
        stream: Stream = None,
        out: Array | None = None,
    ) -> tuple[Array, Problem]:
        """Remembers the shapes."""
        return q, problem

    def accumulate_backward(
        self,
        grads: object,
        k: Array,
        v: Array,
        dk: Array,
        dv: Array,
        tiles: TileTable,
        stream: Stream = None,
    ) -> None:
        """Nothing."""

    def finish_backward(self, grads: tuple[Array, Problem], stream: Stream = None) -> Array:
        """dq 0."""
        q, problem = grads
        return np.zeros(q.shape, dtype=problem.state_dtype)

    def close(self) -> None:
        """Nothing is held."""
