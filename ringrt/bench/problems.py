"""Inputs, and the kernel's verbs on them as one call: what a rank without peers would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ringrt.backend import Backend, BackendContext
from ringrt.bench.cases import Shape
from ringrt.device.dtypes import numpy_dtype
from ringrt.device.host import HOST
from ringrt.errors import Unsupported
from ringrt.plan import Problem, Run
from ringrt.plan.mask_options import MaskOptions
from ringrt.plan.partition import Array
from ringrt.plan.problem import default_scale
from ringrt.plan.tiles import lower
from ringrt.registry import registry


@dataclass(frozen=True, slots=True)
class Inputs:
    """`[1, rows, heads, head_dim]`, contiguous; dout is the gradient of out."""

    problem: Problem
    q: Array
    k: Array
    v: Array
    dout: Array


def inputs(shape: Shape, kv_heads: int | None = None, **masking: Any) -> Inputs:
    """Standard normal numbers, always the same. `masking` as for `Ring.attention`, besides what
    the shape says."""
    length, dim = shape.length, shape.head_dim
    few = kv_heads or shape.heads
    rng = np.random.default_rng(0)
    arrays = (
        rng.standard_normal((1, length, heads, dim), np.float32).astype(numpy_dtype(shape.dtype))
        for heads in (shape.heads, few, few, shape.heads)
    )
    mask = MaskOptions.of(**({"causal": shape.causal} | masking)).build(length, length)
    sizes = 1, shape.heads, few, dim, dim, length, length
    return Inputs(Problem(*sizes, shape.dtype, mask, default_scale(dim)), *arrays)


@cache
def backend(name: str, threads: int) -> Backend:
    """A backend of this process, loaded once."""
    return registry().load(name, BackendContext(threads))


class Verbs:
    """Passes of a backend over some inputs, K and V handed over in pieces of so many keys, or in
    one. The tiles are made here, outside of what is timed."""

    def __init__(self, kernel: Backend, given: Inputs, piece: int | None = None) -> None:
        problem = given.problem
        if (refusal := kernel.supports(problem)) is not None:
            raise Unsupported(refusal)
        kernel.prepare(problem)
        self.inputs, self._kernel = given, kernel
        self._pieces = list(_pieces(problem, piece or problem.kv_length))
        self._out: tuple[Array, Array] | None = None

    @property
    def result(self) -> tuple[Array, Array]:
        """out and lse, computed when first asked for; backward is of these."""
        if self._out is None:
            self._out = self.forward()
        return self._out

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head."""
        return sum(int(tiles.visible_pairs().sum()) for _, tiles in self._pieces)

    def forward(self) -> tuple[Array, Array]:
        """out and lse."""
        given, kernel = self.inputs, self._kernel
        state = kernel.begin(given.q, given.problem)
        for keys, tiles in self._pieces:
            kernel.accumulate(state, given.k[:, keys], given.v[:, keys], tiles)
        return kernel.finish(state)

    def backward(self) -> tuple[Array, Array, Array]:
        """dq, dk and dv, as the engine makes them: delta, and sums that begin at 0, included."""
        given, kernel, problem = self.inputs, self._kernel, self.inputs.problem
        out, lse = self.result
        delta = HOST.row_delta(given.dout, out, problem.dtype)
        dk, dv = (HOST.zeros(x.shape, problem.state_dtype) for x in (given.k, given.v))
        more = out if kernel.needs_out else None
        grads = kernel.begin_backward(given.q, given.dout, lse, delta, problem, None, more)
        for keys, tiles in self._pieces:
            pair = given.k[:, keys], given.v[:, keys]
            kernel.accumulate_backward(grads, *pair, dk[:, keys], dv[:, keys], tiles)
        return kernel.finish_backward(grads), dk, dv

    def call(self, way: str) -> Any:
        """The pass of that name. What backward is of is computed before."""
        if way == "forward":
            return self.forward
        _ = self.result
        return self.backward


def _pieces(problem: Problem, size: int) -> Any:
    """The keys of each piece, and its tiles."""
    queries = (Run(0, 1, problem.q_length),)
    for begin in range(0, problem.kv_length, size):
        keys = slice(begin, min(begin + size, problem.kv_length))
        run = Run(begin, 1, keys.stop - begin)
        yield keys, lower(problem.mask, queries, (run,))


#: Multiply-adds, counted as two, of a visible pair and an element of head_dim: two products of
#: matrices in forward and five in backward.
_FLOP = {"forward": 4, "backward": 10}


def speed(
    shape: Shape, pairs: int, seconds: float, threads: int, kernel: Any
) -> Mapping[str, float]:
    """GF/s of a core, and the share of the most that its multiply-adds can do, where the backend
    knows that."""
    flop = _FLOP[shape.way] * shape.heads * pairs * shape.head_dim
    rate = flop / seconds / threads
    figures = {"GF/s a core": rate / 1e9}
    limit = flop_limit(kernel, shape.dtype)
    return figures | ({"% of limit": 100 * rate / limit} if limit else {})


@cache
def flop_limit(kernel: Any, dtype: str) -> float | None:
    """FLOP/s of one thread that only multiplies and adds, as the backend measures it; None
    where it does not."""
    measure = getattr(kernel, "flop_limit", None)
    return None if measure is None else measure(dtype)
