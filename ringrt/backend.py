"""What an attention backend is: three verbs on band tiles, and the same three for gradients.

A backend never hears of rings, ranks, partitions or masks. It holds one rank's queries and an
online softmax state, and absorbs the tiles of whatever shard is present.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringrt.device import Device, Kind
from ringrt.device.host import HOST
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile, TileTable
from ringrt.softmax_state import SoftmaxState, from_block

#: What a backend computes on: None on the host; a device stream elsewhere.
Stream = Any


class Backend(Protocol):
    """The contract. Arrays are `[batch, rows, heads, dim]`, any strides, in `problem.dtype`, on
    the kind of device that the backend's spec names (see `ringrt.device`).

    A forward pass is `begin`, any number of `accumulate`, `finish`; a backward pass the same
    with `_backward`; all with one stream. The state is the backend's own. q, k and v stay the
    caller's and are never written; k and v may be overwritten as soon as `accumulate` returns (on
    a device: when the stream has come past). What a query row does not see must not reach it, NaN
    and inf included.
    """

    #: Whether the three verbs of the backward pass are implemented.
    backward: bool
    #: Whether `begin_backward` wants out as well. K,V then travel in backward: out does not.
    needs_out: bool

    def supports(self, problem: Problem) -> str | None:
        """None if every part of the problem is implemented; otherwise what is not, in words."""

    def prepare(self, problem: Problem) -> None:
        """Compile or load what the problem needs. Called before data moves, when no other
        rank waits at a short deadline; free when called again."""

    def begin(
        self, q: Array, problem: Problem, sink: Array | None = None, stream: Stream = None
    ) -> Any:
        """The empty state of q's rows, or with sink logits `[q_heads]` (always a NumPy array) the
        one that has absorbed them. q must stay as it is until `finish`."""

    def accumulate(
        self, state: Any, k: Array, v: Array, tiles: TileTable, stream: Stream = None
    ) -> None:
        """Absorb the tiles' visible pairs into the state, in place. Rows of a tile index q,
        keys index k and v."""

    def finish(self, state: Any, stream: Stream = None) -> tuple[Array, Array]:
        """out `[batch, rows, q_heads, value_dim]` in `problem.dtype` and lse
        `[batch, q_heads, rows]` in `problem.state_dtype`, natural logarithm."""

    def begin_backward(
        self,
        q: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        problem: Problem,
        stream: Stream = None,
        out: Array | None = None,
    ) -> Any:
        """The gradients of some query rows, so far none. dout like out; lse and
        delta = rowsum(dout · out) `[batch, q_heads, rows]` in the state dtype, of the whole row
        and not of a block. All must stay as they are until `finish_backward`. `out` is given where
        the backend `needs_out`."""

    def accumulate_backward(
        self,
        grads: Any,
        k: Array,
        v: Array,
        dk: Array,
        dv: Array,
        tiles: TileTable,
        stream: Stream = None,
    ) -> None:
        """Add the tiles' gradients to dq (in `grads`) and to dk and dv, which are like k and v
        in the state dtype, contiguous. The order of addition must not depend on chance."""

    def finish_backward(self, grads: Any, stream: Stream = None) -> Array:
        """dq `[batch, rows, q_heads, head_dim]` in `problem.state_dtype`, contiguous."""

    def close(self) -> None:
        """Release threads and memory. The backend is not used afterwards. May come from another
        thread while it computes, which it then breaks off with a `KernelError`."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend may know of where it runs: CPU threads it should use (>= 1), and the
    device on which its arrays lie, of the kind its spec names."""

    threads: int
    device: Device = HOST


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """How a plugin announces a backend, without importing what it needs.

    `probe()` says in words what is missing and what would mend it, or None if it can run here;
    `load(context)` makes one for one rank. `backend: auto` takes the available one of the
    highest `priority` that supports the problem; None is never taken unasked. `device` is the
    kind of device on which its arrays lie. `rounds_weights`: for 16-bit inputs the softmax
    weights, and in backward their gradients, are rounded to the inputs' dtype before they are
    multiplied, as tensor cores ask for, or a block's results before they are merged; verification
    allows for it. `contains_nan`: NaN and inf in what a row does not see cannot reach it even
    inside a tile that it sees in part; where that is False, whole tiles still keep them out.
    """

    name: str
    summary: str
    probe: Callable[[], str | None]
    load: Callable[[BackendContext], Backend]
    priority: int | None = None
    device: Kind = "cpu"
    rounds_weights: bool = False
    contains_nan: bool = True


class BlockBackend(ABC):
    """Base of backends whose kernel can only finish one block: it gives (out, lse) of one tile
    by itself, and the merging is done here, in `problem.state_dtype`.

    A subclass states the base of its kernel's logarithm in `lse_base`; it need not care what
    the kernel reports for rows that see nothing.
    """

    backward = False
    needs_out = False

    #: e for natural logarithms, 2 for kernels that work in powers of two.
    lse_base: float = np.e

    @abstractmethod
    def supports(self, problem: Problem) -> str | None:
        """As `Backend.supports`."""

    @abstractmethod
    def block(
        self, q: Array, k: Array, v: Array, tile: Tile, problem: Problem
    ) -> tuple[Array, Array]:
        """out `[batch, rows, q_heads, value_dim]` and lse `[batch, q_heads, rows]` of one
        tile; q, k and v are already cut to it, so that its band runs over their indices."""

    def prepare(self, problem: Problem) -> None:  # noqa: B027 - optional
        """See `Backend.prepare`."""

    def begin(
        self, q: Array, problem: Problem, sink: Array | None = None, stream: Stream = None
    ) -> BlockState:
        """See `Backend.begin`."""
        batch, rows = q.shape[:2]
        softmax = SoftmaxState.empty(
            batch, problem.q_heads, rows, problem.value_dim, problem.state_dtype, sink
        )
        return BlockState(q, problem, softmax)

    def accumulate(
        self, state: BlockState, k: Array, v: Array, tiles: TileTable, stream: Stream = None
    ) -> None:
        """See `Backend.accumulate`."""
        for tile in tiles:
            q = state.q[:, tile.q0 : tile.q1]
            cut = slice(tile.k0, tile.k1)
            out, lse = self.block(q, k[:, cut], v[:, cut], tile, state.problem)
            natural = (lse * np.log(self.lse_base)).astype(state.problem.state_dtype)
            block = from_block(out, natural, _empty_rows(tile))
            state.softmax.rows(tile.q0, tile.q1).absorb(block)

    def finish(self, state: BlockState, stream: Stream = None) -> tuple[Array, Array]:
        """See `Backend.finish`."""
        out, lse = state.softmax.finish()
        return out.astype(state.q.dtype), lse

    def close(self) -> None:  # noqa: B027 - optional
        """See `Backend.close`."""


@dataclass(frozen=True, slots=True)
class BlockState:
    """What a `BlockBackend` carries through a pass."""

    q: Array
    problem: Problem
    softmax: SoftmaxState


def band(tile: Tile) -> Array:
    """The tile's visible pairs, bool `[rows, keys]`."""
    apart = np.arange(tile.q1 - tile.q0)[:, None] - np.arange(tile.k1 - tile.k0)[None, :]
    visible: Array = (tile.lower <= apart) & (apart <= tile.upper)
    return visible


def _empty_rows(tile: Tile) -> Array:
    """Rows of the tile that see none of its keys, bool `[rows]`: row i sees
    max(0, i − upper) .. min(keys − 1, i − lower)."""
    i = np.arange(tile.q1 - tile.q0)
    first = np.maximum(0, i - tile.upper)
    last = np.minimum(tile.k1 - tile.k0 - 1, i - tile.lower)
    empty: Array = first > last
    return empty
