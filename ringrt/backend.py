"""What an attention backend is: three verbs on band tiles, and the same three for gradients.

A backend never hears of rings, ranks, partitions or masks. It holds one rank's queries and an
online softmax state, and absorbs the tiles of whatever shard is present.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringrt.block_arrays import BlockArrays, KernelArray, NumpyArrays
from ringrt.device import Device, Kind
from ringrt.device.host import HOST
from ringrt.errors import Unsupported
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile, TileTable
from ringrt.softmax_state import SoftmaxState, from_block, module_of

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
        delta = rowsum(dout · out), less the gradient of lse where there is one, `[batch, q_heads,
        rows]` in the state dtype, of the whole row and not of a block. All must stay as they are
        until `finish_backward`. `out` is given where the backend `needs_out`, and then there is no
        gradient of lse."""

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
    allows for it. A function of the dtype's name where it depends on that, or on the machine.
    `contains_nan`: NaN and inf in what a row does not see cannot reach it even inside a tile that
    it sees in part; where that is False, whole tiles still keep them out. `detail()` says in words
    what it uses of this machine, for `ringrt doctor`.
    """

    name: str
    summary: str
    probe: Callable[[], str | None]
    load: Callable[[BackendContext], Backend]
    priority: int | None = None
    device: Kind = "cpu"
    rounds_weights: bool | Callable[[str], bool] = False
    contains_nan: bool = True
    detail: Callable[[], str] | None = None

    def rounds(self, dtype: str) -> bool:
        """Whether weights are rounded for inputs of this dtype; see `rounds_weights`."""
        given = self.rounds_weights
        return given(dtype) if callable(given) else given


class BlockBackend(ABC):
    """Base of backends whose kernel can only finish one block: it gives (out, lse) of one tile by
    itself, and from the whole row's out and lse the gradients of one tile. What is left is done
    here, in `problem.state_dtype`: blocks are merged, gradients added up.

    A subclass implements `supports` and `block`; for gradients `block_backward`; and `parts` where
    its kernel does not take every band. It states the base of its kernel's logarithm in
    `lse_base`, and need not care what the kernel reports for rows that see nothing. Its arrays
    are NumPy's; `ringrt.torch_blocks` is the same for kernels that take tensors.
    """

    backward: bool = False
    needs_out: bool = False

    #: e for natural logarithms, 2 for kernels that work in powers of two.
    lse_base: float = np.e
    #: What the kernel computes on.
    arrays: BlockArrays = NumpyArrays()

    def __init_subclass__(cls) -> None:
        """There is a backward pass if there is a `block_backward`."""
        super().__init_subclass__()
        cls.backward = cls.block_backward is not BlockBackend.block_backward
        cls.needs_out = cls.backward

    @abstractmethod
    def supports(self, problem: Problem) -> str | None:
        """As `Backend.supports`."""

    @abstractmethod
    def block(
        self, q: KernelArray, k: KernelArray, v: KernelArray, tile: Tile, problem: Problem
    ) -> tuple[KernelArray, KernelArray]:
        """out `[batch, rows, q_heads, value_dim]` and lse `[batch, q_heads, rows]` of one
        tile; q, k and v are already cut to it, so that its band runs over their indices."""

    def block_backward(
        self,
        q: KernelArray,
        k: KernelArray,
        v: KernelArray,
        out: KernelArray,
        lse: KernelArray,
        dout: KernelArray,
        tile: Tile,
        problem: Problem,
    ) -> tuple[KernelArray, KernelArray, KernelArray]:
        """dq like q, and dk and dv like k and v (so in KV heads), of one tile.

        out, lse and dout are of the whole row and not of the tile, lse in `lse_base`: the weights
        are p = e^(score − lse). Where a row sees nothing lse is +inf, which makes them 0."""
        raise Unsupported("backward is not implemented")

    def parts(self, tile: Tile, problem: Problem) -> Iterable[Tile]:
        """The tile as tiles that the kernel takes, with each visible pair in one of them: by
        default itself. `ringrt.plan.bands.parts` cuts it for kernels that know no bands."""
        return (tile,)

    def prepare(self, problem: Problem) -> None:  # noqa: B027 - optional
        """See `Backend.prepare`."""

    def begin(
        self, q: Array, problem: Problem, sink: Array | None = None, stream: Stream = None
    ) -> BlockState:
        """See `Backend.begin`."""
        batch, rows = q.shape[:2]
        shape = batch, problem.q_heads, rows, problem.value_dim
        with self.arrays.running(stream):
            softmax = SoftmaxState.empty(*shape, problem.state_dtype, sink, self.arrays.zeros)
            return BlockState(self.arrays.taken(q, problem.dtype), problem, softmax)

    def accumulate(
        self, state: BlockState, k: Array, v: Array, tiles: TileTable, stream: Stream = None
    ) -> None:
        """See `Backend.accumulate`."""
        arrays, problem = self.arrays, state.problem
        with arrays.running(stream):
            k, v = (arrays.taken(x, problem.dtype) for x in (k, v))
            for tile, empty in self._each(tiles, problem):
                rows, cut = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
                out, lse = self.block(state.q[:, rows], k[:, cut], v[:, cut], tile, problem)
                natural = arrays.cast(lse * np.log(self.lse_base), problem.state_dtype)
                state.softmax.rows(tile.q0, tile.q1).absorb(from_block(out, natural, empty))

    def finish(self, state: BlockState, stream: Stream = None) -> tuple[Array, Array]:
        """See `Backend.finish`."""
        given, problem = self.arrays.given, state.problem
        with self.arrays.running(stream):
            out, lse = state.softmax.finish()
            return given(out, problem.dtype), given(lse, problem.state_dtype)

    def begin_backward(
        self,
        q: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        problem: Problem,
        stream: Stream = None,
        out: Array | None = None,
    ) -> BlockGrads:
        """See `Backend.begin_backward`. Block kernels find delta themselves, from out."""
        assert out is not None, "needs_out"
        arrays, sums = self.arrays, problem.state_dtype
        with arrays.running(stream):
            q, dout, out = (arrays.taken(x, problem.dtype) for x in (q, dout, out))
            natural = arrays.taken(lse, sums)
            unseen = natural == -np.inf
            natural = module_of(natural).where(unseen, np.inf, natural)
            rows = arrays.cast(natural / np.log(self.lse_base), sums)
            return BlockGrads(q, dout, out, rows, unseen, arrays.zeros(q.shape, sums), problem)

    def accumulate_backward(
        self,
        grads: BlockGrads,
        k: Array,
        v: Array,
        dk: Array,
        dv: Array,
        tiles: TileTable,
        stream: Stream = None,
    ) -> None:
        """See `Backend.accumulate_backward`."""
        arrays, problem = self.arrays, grads.problem
        with arrays.running(stream):
            k, v = (arrays.taken(x, problem.dtype) for x in (k, v))
            dk, dv = (arrays.taken(x, problem.state_dtype) for x in (dk, dv))
            for tile, empty in self._each(tiles, problem):
                rows, cut = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
                q, out, dout = (x[:, rows] for x in (grads.q, grads.out, grads.dout))
                lse = grads.lse[..., rows]
                if empty is not False:
                    lse = module_of(lse).where(empty, np.inf, lse)
                pair = k[:, cut], v[:, cut]
                dq, *more = self.block_backward(q, *pair, out, lse, dout, tile, problem)
                grads.dq[:, rows] += _cleared(dq, empty)
                for total, part in zip((dk, dv), more, strict=True):
                    total[:, cut] += part

    def finish_backward(self, grads: BlockGrads, stream: Stream = None) -> Array:
        """See `Backend.finish_backward`."""
        with self.arrays.running(stream):
            return self.arrays.given(_cleared(grads.dq, grads.unseen), grads.problem.state_dtype)

    def close(self) -> None:  # noqa: B027 - optional
        """See `Backend.close`."""

    def _each(self, tiles: Iterable[Tile], problem: Problem) -> Iterator[tuple[Tile, KernelArray]]:
        """The parts of the tiles, and which rows of each see none of its keys: bool `[rows]`, or
        False if there are none. No kernel is called where there is no batch."""
        for tile in tiles if problem.batch else ():
            for part in self.parts(tile, problem):
                empty = _empty_rows(part)
                yield part, self.arrays.placed(empty) if empty.any() else False


@dataclass(frozen=True, slots=True)
class BlockState:
    """What a `BlockBackend` carries through a forward pass."""

    q: KernelArray
    problem: Problem
    softmax: SoftmaxState


@dataclass(frozen=True, slots=True)
class BlockGrads:
    """What a `BlockBackend` carries through a backward pass: lse in the kernel's base, +inf for
    the rows that are `unseen`, i.e. see no key at all; dq in the state dtype."""

    q: KernelArray
    dout: KernelArray
    out: KernelArray
    lse: KernelArray
    unseen: KernelArray
    dq: KernelArray
    problem: Problem


def band(tile: Tile) -> Array:
    """The tile's visible pairs, bool `[rows, keys]`."""
    apart = np.arange(tile.q1 - tile.q0)[:, None] - np.arange(tile.k1 - tile.k0)[None, :]
    visible: Array = (tile.lower <= apart) & (apart <= tile.upper)
    return visible


def _cleared(dq: KernelArray, empty: KernelArray) -> KernelArray:
    """dq `[batch, rows, heads, dim]` with 0 in the rows of `empty`, whatever the kernel left
    there: `[batch, heads, rows]`, `[rows]`, or False for none."""
    if empty is False:
        return dq
    flags = empty[:, None] if empty.ndim == 1 else empty.swapaxes(1, 2)
    return module_of(dq).where(flags[..., None], 0, dq)


def _empty_rows(tile: Tile) -> Array:
    """Rows of the tile that see none of its keys, bool `[rows]`: row i sees
    max(0, i − upper) .. min(keys − 1, i − lower)."""
    i = np.arange(tile.q1 - tile.q0)
    first = np.maximum(0, i - tile.upper)
    last = np.minimum(tile.k1 - tile.k0 - 1, i - tile.lower)
    empty: Array = first > last
    return empty
