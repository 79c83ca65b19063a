"""Backends that are the reference but for one thing each, and the check that is meant for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ringrt.backend import band
from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.tiles import TileTable
from ringrt_backends.reference import ReferenceBackend

#: (class, the check that must fail, what its line says).
BROKEN: list[tuple[type[ReferenceBackend], str, str]] = []


def meant_for(check, text=""):
    """Adds a class to `BROKEN`."""

    def note(kind):
        BROKEN.append((kind, check, text))
        return kind

    return note


class WithFinish(ReferenceBackend):
    """Something else is made of out and lse at the end."""

    def finish(self, state, stream=None):
        return self.changed(*super().finish(state, stream))


class WithProblem(ReferenceBackend):
    """Another problem than the given one is computed."""

    def begin(self, q, problem, sink=None, stream=None):
        return super().begin(q, self.changed(problem), sink, stream)


class WithTiles(ReferenceBackend):
    """Other tiles than the given ones are computed."""

    def accumulate(self, state, k, v, tiles, stream=None):
        super().accumulate(state, k, v, TileTable(self.changed(tiles.table.copy())), stream)


@meant_for("natural-logarithm", "lse is in base 2")
class BaseTwo(WithFinish):
    def changed(self, out, lse):
        return out, lse / np.log(2).astype(lse.dtype)


@meant_for("results", "lse: expected dtype float32, got float64")
class WideLse(WithFinish):
    def changed(self, out, lse):
        return out, lse.astype(np.float64)


@meant_for("results", "lse: expected shape (2, 4, 9), got (2, 9, 4)")
class RowsFirstLse(WithFinish):
    def changed(self, out, lse):
        return out, lse.transpose(0, 2, 1)


@meant_for("results", "out: expected dtype float16, got float32")
class WideOut(WithFinish):
    def changed(self, out, lse):
        return out.astype(np.float32), lse


@meant_for("results", "out: expected shape")
class HeadsFirstOut(WithFinish):
    def changed(self, out, lse):
        return out.transpose(0, 2, 1, 3), lse


@meant_for("results", "expected a NumPy array, got a list")
class Listed(WithFinish):
    def changed(self, out, lse):
        return out.tolist(), lse


@meant_for("rows-that-see-nothing", "expected -inf, got 0")
class ZeroForEmpty(WithFinish):
    def changed(self, out, lse):
        return out, np.where(np.isneginf(lse), 0, lse).astype(lse.dtype)


@meant_for("rows-that-see-nothing", "expected -inf, got nan")
class NanForEmpty(WithFinish):
    def changed(self, out, lse):
        return out, np.where(np.isneginf(lse), np.nan, lse).astype(lse.dtype)


@meant_for("rows-that-see-nothing", "expected -inf, got inf")
class InfinityForEmpty(WithFinish):
    def changed(self, out, lse):
        return out, np.where(np.isneginf(lse), np.inf, lse).astype(lse.dtype)


@meant_for("no-tiles", "out")
class NanOutForEmpty(WithFinish):
    def changed(self, out, lse):
        empty = np.isneginf(lse).transpose(0, 2, 1)[..., None]
        return np.where(empty, np.nan, out).astype(out.dtype), lse


@meant_for("infinite-scores", "expected -inf")
class FiniteStandIn(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        for tile in tiles:
            cut = slice(tile.k0, tile.k1)
            keys, values = (np.repeat(x[:, cut].astype(float).transpose(0, 2, 1, 3),
                                      state.problem.group, axis=1) for x in (k, v))  # fmt: skip
            softmax = state.softmax.rows(tile.q0, tile.q1)
            scores = state.problem.scale * state.q[:, :, tile.q0 : tile.q1] @ keys.swapaxes(-1, -2)
            scores = np.where(band(tile), scores, -1e4)
            m = np.maximum(softmax.m, scores.max(axis=-1))
            weights, keep = np.exp(scores - m[..., None]), np.exp(softmax.m - m)
            softmax.z[...] = softmax.z * keep + weights.sum(axis=-1)
            softmax.y[...] = softmax.y * keep[..., None] + weights @ values
            softmax.m[...] = m


@meant_for("any-order")
class StartsFull(ReferenceBackend):
    """A row that sees nothing of the first shard is taken for empty."""

    def accumulate(self, state, k, v, tiles, stream=None):
        before = state.softmax.m.copy()
        super().accumulate(state, k, v, tiles, stream)
        if (before > -np.inf).any():
            empty = before == -np.inf
            state.softmax.m[empty], state.softmax.z[empty], state.softmax.y[empty] = -np.inf, 0, 0


@meant_for("many-shards")
class ForgetsEarlierShards(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        state.softmax.m[...], state.softmax.z[...], state.softmax.y[...] = -np.inf, 0, 0
        super().accumulate(state, k, v, tiles, stream)


@meant_for("grown-maximum")
class KeepsTheFirstMaximum(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        old = state.softmax.m.copy()
        super().accumulate(state, k, v, tiles, stream)
        seen = old > -np.inf
        state.softmax.m[...] = np.where(seen, old, state.softmax.m)


@meant_for("lower-bound")
class IgnoresLowerBounds(WithTiles):
    def changed(self, table):
        table[:, 4] = -UNBOUNDED
        return table


@meant_for("upper-bound")
class IgnoresUpperBounds(WithTiles):
    def changed(self, table):
        table[:, 5] = UNBOUNDED
        return table


@meant_for("two-bounds")
class TakesOneBound(WithTiles):
    def changed(self, table):
        both = (table[:, 4] != -UNBOUNDED) & (table[:, 5] != UNBOUNDED)
        table[both, 5] = UNBOUNDED
        return table


@meant_for("keys-nobody-sees")
class StartsAtTheFirstKey(WithTiles):
    def changed(self, table):
        table[:, 2:4] -= table[:, 2:3]
        return table


@meant_for("overlapping-tiles")
class TakesOneTile(WithTiles):
    def changed(self, table):
        return table[:1]


@meant_for("far-bands")
class RoundsBandsToBlocks(WithTiles):
    """Bands of a few pairs in a corner are left out."""

    def changed(self, table):
        return table[TileTable(table).visible_pairs() > 20]


@meant_for("scales")
class IgnoresScale(WithProblem):
    def changed(self, problem):
        return replace(problem, scale=problem.head_dim**-0.5)


@meant_for("softcap")
class IgnoresSoftcap(WithProblem):
    def changed(self, problem):
        return replace(problem, softcap=None)


@meant_for("sinks")
class IgnoresSinks(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        return super().begin(q, problem, None, stream)


@meant_for("sinks")
class SinkInEveryShard(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        self.sink = sink
        return super().begin(q, problem, sink, stream)

    def accumulate(self, state, k, v, tiles, stream=None):
        super().accumulate(state, k, v, tiles, stream)
        if self.sink is not None:
            shape = (*state.softmax.m.shape, state.problem.value_dim)
            state.softmax.absorb(state.softmax.empty(*shape, "float64", self.sink))


@meant_for("sinks-of-no-weight")
class SinkOfZeroForNone(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        sink = None if sink is None else np.where(np.isinf(sink), 0, sink)
        return super().begin(q, problem, sink, stream)


@meant_for("sinks-alone", "expected 1.25, got -inf")
class NoSinkWithoutKeys(WithFinish):
    def changed(self, out, lse):
        empty = ~out.any(axis=-1).transpose(0, 2, 1)
        return out, np.where(empty, -np.inf, lse).astype(lse.dtype)


@meant_for("grouped-heads")
class HeadsInTurn(ReferenceBackend):
    """Query head h reads KV head h % kv_heads."""

    def begin(self, q, problem, sink=None, stream=None):
        return super().begin(q, replace(problem, kv_heads=problem.q_heads), sink, stream)

    def accumulate(self, state, k, v, tiles, stream=None):
        heads = np.arange(state.problem.q_heads) % k.shape[2]
        super().accumulate(state, k[:, :, heads], v[:, :, heads], tiles, stream)


@meant_for("value-dim")
class CutsValues(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        v = v.copy()
        v[..., k.shape[3] :] = 0
        super().accumulate(state, k, v, tiles, stream)


@meant_for("odd-dims")
class WholeVectorsOnly(ReferenceBackend):
    """Elements beyond the last whole vector of 8 are left out, where there is one."""

    def begin(self, q, problem, sink=None, stream=None):
        dim = problem.head_dim
        whole = dim if dim < 8 else dim // 8 * 8
        return super().begin(np.where(np.arange(dim) < whole, q, 0), problem, sink, stream)


@meant_for("odd-lengths")
class WholeBlocksOnly(WithTiles):
    """Keys beyond the last whole block of 16 are left out, where there is one."""

    def changed(self, table):
        width = table[:, 3] - table[:, 2]
        table[:, 3] -= np.where(width > 64, width % 16, 0)
        return table


@meant_for("zero-rows", "begin raised ValueError")
class NeedsRows(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        if q.size == 0:
            raise ValueError("zero-size array")
        return super().begin(q, problem, sink, stream)


@meant_for("batches")
class FirstBatchOnly(WithFinish):
    def changed(self, out, lse):
        out[1:], lse[1:] = out[:1], lse[:1]
        return out, lse


@meant_for("float32", "off by")
class HalfPrecision(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        return super().begin(q.astype(np.float16), problem, sink, stream)


@meant_for("float64", "off by")
class SinglePrecision(WithFinish):
    def changed(self, out, lse):
        return out.astype(np.float32).astype(out.dtype), lse


@meant_for("float16", "off by")
@meant_for("bfloat16", "off by")
class RoundsTwice(ReferenceBackend):
    """The sums are kept in 16 bits."""

    def accumulate(self, state, k, v, tiles, stream=None):
        super().accumulate(state, k, v, tiles, stream)
        state.softmax.y[...] = state.softmax.y.astype(k.dtype)


@meant_for("large-values")
class Clips(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        super().accumulate(state, k, np.clip(v, -900, 900), tiles, stream)


class NeedsOut(ReferenceBackend):
    """Not broken: takes delta from out."""

    needs_out = True

    def begin_backward(self, q, dout, lse, delta, problem, stream=None, out=None):
        own = np.einsum("brhd,brhd->bhr", dout.astype(float), out.astype(float))
        return super().begin_backward(q, dout, lse, own, problem, stream)


class ForwardOnly(ReferenceBackend):
    """Not broken: does little, and says so."""

    backward = False

    def supports(self, problem):
        if problem.dtype not in ("float32", "bfloat16"):
            return f"{problem.dtype} is not implemented"
        for name in ("softcap", "sink"):
            if getattr(problem, name):
                return f"{name} is not implemented"
        return None if problem.head_dim % 8 == 0 else f"head_dim {problem.head_dim}: not 8 n"


class RoundsWeights(ReferenceBackend):
    """Not broken, if it is announced: values of 16 bits are multiplied by weights of 16 bits."""

    def accumulate(self, state, k, v, tiles, stream=None):
        before = state.softmax.y.copy()
        super().accumulate(state, k, v, tiles, stream)
        if v.itemsize == 2:
            added = state.softmax.y - before
            state.softmax.y[...] = before + added.astype(v.dtype)
