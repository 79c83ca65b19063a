"""Blocks that the compiled kernels are not for: with NaN or inf, which must not reach a row that
does not see it, or with numbers so large that products overflow float32. The reference backend
takes them, in float64, head by head: slow, and rare."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import TileTable, trim
from ringrt.softmax_state import SoftmaxState
from ringrt_backends.cpu.backward import Rows
from ringrt_backends.cpu.layout import Blocks, subtracted
from ringrt_backends.reference import ReferenceBackend, ReferenceGrads, ReferenceState

_REFERENCE = ReferenceBackend()


@dataclass(frozen=True, slots=True)
class Shard:
    """K and V of a shard, its tiles cut at blocks of `size` rows, and the keys [begin, end) that
    are at hand, in parts of `part` keys of which `ordinary` `[KV lanes, parts]` says what they
    are. KV lane n of these is the shard's `first_lane` + n."""

    k: Array
    v: Array
    blocks: Blocks
    size: int
    begin: int
    end: int
    part: int
    ordinary: Array
    first_lane: int = 0

    def all_ordinary(self, q_ordinary: Array) -> bool:
        """Whether nothing is left out."""
        return bool(q_ordinary.all() and self.ordinary.all())

    def head(self, lane: int, problem: Problem) -> tuple[Array, Array, Array]:
        """K and V of a KV lane, `[1, keys, 1, dim]`, and its parts."""
        batch, head = divmod(lane, problem.kv_heads)
        k, v = (x[batch : batch + 1, :, head : head + 1] for x in (self.k, self.v))
        return k, v, self.ordinary[lane - self.first_lane].astype(bool)

    def tiles(self, block: int, begin: int, end: int) -> TileTable:
        """What a block of rows sees of the keys [begin, end), rows counted from its first."""
        return self._within(self._of(block), block, begin, end)

    def touched(self, block: int, ordinary: Array) -> TileTable:
        """The same for the tiles that touch any key which is not ordinary: all of each that is at
        hand, for the driver leaves out whole tiles."""
        table = self._of(block)
        first = np.maximum(table[:, 2] - self.begin, 0) // self.part
        last = -(-(np.minimum(table[:, 3], self.end) - self.begin) // self.part)
        strange = np.concatenate(([0], np.cumsum(~ordinary)))
        held = first < last
        first, last = first * held, last * held
        return self._within(table[strange[last] > strange[first]], block, self.begin, self.end)

    def _of(self, block: int) -> Array:
        return self.blocks.table[self.blocks.starts[block] : self.blocks.starts[block + 1]]

    def _within(self, table: Array, block: int, begin: int, end: int) -> TileTable:
        table = table.copy()
        first, last = np.maximum(table[:, 2], begin), np.minimum(table[:, 3], end)
        # The band is counted from a tile's first key; an absent bound stays absent.
        bounded = abs(table[:, 4:]) != UNBOUNDED
        table[:, 4:] += np.where(bounded, (first - table[:, 2])[:, None], 0)
        table[:, 2], table[:, 3] = first, last
        table[:, :2] -= block * self.size
        return TileTable(trim(table))


def absorb(
    shard: Shard,
    problem: Problem,
    unit: float,
    q: Array,
    q_ordinary: Array,
    fresh: Array,
    state: SoftmaxState,
) -> None:
    """Absorb what the forward driver left out. The state is `[lanes, rows]`, m in units, and y
    `[lanes, rows, >= value_dim]`, unset where blocks are `fresh`."""
    if shard.all_ordinary(q_ordinary):
        return
    single = replace(problem, batch=1, q_heads=1, kv_heads=1)
    group, lanes = problem.group, len(shard.ordinary)
    for lane in range(shard.first_lane * group, (shard.first_lane + lanes) * group):
        k, v, ordinary = shard.head(lane // group, problem)
        batch, head = divmod(lane, problem.q_heads)
        for block in shard.blocks.order:
            if q_ordinary[lane, block] and ordinary.all():
                continue
            if q_ordinary[lane, block]:
                tiles = shard.touched(block, ordinary)
            else:
                tiles = shard.tiles(block, shard.begin, shard.end)
            if fresh[lane, block]:
                state.y[lane, block * shard.size : (block + 1) * shard.size] = 0
                fresh[lane, block] = 0
            rows = slice(block * shard.size, min((block + 1) * shard.size, q.shape[1]))
            wide = q[batch, rows, head].astype(np.float64)[None, None]
            part = (x[None, None, lane, rows] for x in (state.m, state.z, state.y))
            _absorb_rows(wide, k, v, tiles, single, unit, SoftmaxState(*part))


def _absorb_rows(
    q: Array,
    k: Array,
    v: Array,
    tiles: TileTable,
    problem: Problem,
    unit: float,
    part: SoftmaxState,
) -> None:
    """Some rows of one head. Their maximum is put back in units."""
    y = part.y[..., : problem.value_dim]
    with np.errstate(invalid="ignore", over="ignore"):
        natural = SoftmaxState(part.m * unit, part.z.copy(), y.copy())
        _REFERENCE.accumulate(ReferenceState(q, problem, natural), k, v, tiles)
        exact = natural.m / unit
        near = subtracted(exact)
        factor = np.where(exact == near, 1.0, np.exp((exact - near) * unit))
        part.m[...], part.z[...] = near, natural.z * factor
        y[...] = natural.y * factor[..., None]


def absorb_backward(
    shard: Shard,
    problem: Problem,
    packed: Rows,
    given: tuple[Array, Array, Array, Array],
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Add the gradients that the backward driver left out. `given`: q and dout, lse and delta
    `[lanes, rows]` float64; dq `[lanes, rows, >= head_dim]`, without the scale."""
    q_ordinary, fresh = packed.ordinary, packed.fresh
    if shard.all_ordinary(q_ordinary):
        return
    single, group = replace(problem, batch=1, q_heads=1, kv_heads=1), problem.group
    for lane, block in np.ndindex(q_ordinary.shape):
        k, v, ordinary = shard.head(lane // group, problem)
        batch, head = divmod(lane, problem.q_heads)
        rows = slice(block * shard.size, (block + 1) * shard.size)
        q, dout = (x[batch, rows, head].astype(np.float64)[None, None] for x in given[:2])
        lse, delta = (x[None, None, lane, rows] for x in given[2:])
        kv = slice(lane // group % problem.kv_heads, lane // group % problem.kv_heads + 1)
        for number in range(len(ordinary)):
            if q_ordinary[lane, block] and ordinary[number]:
                continue
            if fresh[lane, block]:
                dq[lane, rows], fresh[lane, block] = 0, 0
            begin = shard.begin + number * shard.part
            tiles = shard.tiles(block, begin, min(begin + shard.part, shard.end))
            grads = ReferenceGrads(q, dout, lse, delta, np.zeros(q.shape), single)
            to_dk, to_dv = (x[batch : batch + 1, :, kv] for x in (dk, dv))
            _REFERENCE.accumulate_backward(grads, k, v, to_dk, to_dv, tiles)
            with np.errstate(invalid="ignore", over="ignore"):
                at = dq[lane, block * shard.size :][: q.shape[2], : problem.head_dim]
                at += grads.dq[0, 0] / problem.scale
