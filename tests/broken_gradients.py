"""Backends whose backward pass is the reference's but for one thing each; they join the others in
`broken_backends.BROKEN`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from broken_backends import meant_for

from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.tiles import TileTable
from ringrt_backends.reference import ReferenceBackend


class WithGradients(ReferenceBackend):
    """Something else is given to backward."""

    def begin_backward(self, q, dout, lse, delta, problem, stream=None, out=None):
        given = self.changed(q, dout, lse, delta, problem)
        return super().begin_backward(*given, stream, out)


@meant_for("backward-float32", "begin_backward raised AttributeError")
class ClaimsBackward(ReferenceBackend):
    def begin_backward(self, q, dout, lse, delta, problem, stream=None, out=None):
        raise AttributeError("no such kernel")


@meant_for("backward-float32", "dk[")
class IgnoresDelta(WithGradients):
    def changed(self, q, dout, lse, delta, problem):
        return q, dout, lse, 0 * delta, problem


@meant_for("backward-adds", "dk must be added")
class OverwritesSums(ReferenceBackend):
    def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
        dk[...], dv[...] = 0, 0
        super().accumulate_backward(grads, k, v, dk, dv, tiles, stream)


@meant_for("backward-many-shards")
class OwnLse(ReferenceBackend):
    """Each shard's own lse drives its gradients."""

    def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
        state = self.begin(grads.q.transpose(0, 2, 1, 3), grads.problem)
        self.accumulate(state, k, v, tiles)
        grads = replace(grads, lse=self.finish(state)[1].astype(float))
        super().accumulate_backward(grads, k, v, dk, dv, tiles, stream)


@meant_for("backward-bands")
class BackwardIgnoresBounds(ReferenceBackend):
    def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
        table = tiles.table.copy()
        table[:, 5] = UNBOUNDED
        super().accumulate_backward(grads, k, v, dk, dv, TileTable(table), stream)


@meant_for("backward-float16", "dq: expected dtype float32, got float16")
@meant_for("backward-bfloat16", "dq: expected dtype float32, got bfloat16")
class NarrowGradients(ReferenceBackend):
    def begin_backward(self, q, dout, lse, delta, problem, stream=None, out=None):
        self.dtype = q.dtype
        return super().begin_backward(q, dout, lse, delta, problem, stream, out)

    def finish_backward(self, grads, stream=None):
        return super().finish_backward(grads, stream).astype(self.dtype)


@meant_for("backward-float64", "off by")
class SinglePrecisionGradients(ReferenceBackend):
    def finish_backward(self, grads, stream=None):
        dq = super().finish_backward(grads, stream)
        return dq.astype(np.float32).astype(dq.dtype)


@meant_for("backward-softcap")
class BackwardIgnoresSoftcap(WithGradients):
    def changed(self, q, dout, lse, delta, problem):
        return q, dout, lse, delta, replace(problem, softcap=None)


@meant_for("backward-scales")
class ScaleIsLeftOut(ReferenceBackend):
    def finish_backward(self, grads, stream=None):
        return super().finish_backward(grads, stream) / abs(grads.problem.scale or 1)


@meant_for("backward-grouped-heads")
class MeanOfTheGroup(ReferenceBackend):
    def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
        parts = np.zeros_like(dk), np.zeros_like(dv)
        super().accumulate_backward(grads, k, v, *parts, tiles, stream)
        dk += parts[0] / grads.problem.group
        dv += parts[1] / grads.problem.group


@meant_for("backward-dims")
class CutsGradients(WithGradients):
    def changed(self, q, dout, lse, delta, problem):
        dout = dout.copy()
        dout[..., problem.head_dim :] = 0
        return q, dout, lse, delta, problem


@meant_for("backward-lengths", "accumulate_backward raised ValueError")
class BackwardNeedsBatches(ReferenceBackend):
    def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
        if k.shape[0] == 0:
            raise ValueError("zero-size array")
        super().accumulate_backward(grads, k, v, dk, dv, tiles, stream)


@meant_for("backward-sinks")
class SinkIsNoPartOfLse(WithGradients):
    def changed(self, q, dout, lse, delta, problem):
        return q, dout, lse - 0.1 * problem.sink, delta, problem


@meant_for("backward-rows-that-see-nothing", "got nan")
class NanForEmptyInBackward(WithGradients):
    def changed(self, q, dout, lse, delta, problem):
        return q, dout, np.where(np.isneginf(lse), np.nan, lse), delta, problem


@meant_for("backward-unseen-nan")
class BackwardLeaksInShards(ReferenceBackend):
    def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
        super().accumulate_backward(grads, k, v, dk, dv, tiles, stream)
        with np.errstate(invalid="ignore"):
            dv += 0 * grads.dout.sum()


@meant_for("backward-unseen-nan-in-a-tile")
class BackwardLeaksInTiles(ReferenceBackend):
    def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
        super().accumulate_backward(grads, k, v, dk, dv, tiles, stream)
        for tile in tiles:
            with np.errstate(invalid="ignore"):
                dv[:, tile.k0 : tile.k1] += 0 * grads.dout[:, :, tile.q0 : tile.q1].sum()


@meant_for("backward-strided-inputs", "inputs heads first")
class BackwardContiguousOnly(WithGradients):
    def changed(self, q, dout, lse, delta, problem):
        assert dout.flags.c_contiguous, "not contiguous"
        return q, dout, lse, delta, problem


@meant_for("backward-unwritten-inputs", "delta: it was written to")
class WritesDelta(ReferenceBackend):
    def begin_backward(self, q, dout, lse, delta, problem, stream=None, out=None):
        grads = super().begin_backward(q, dout, lse, delta, problem, stream, out)
        delta *= 2
        return grads


@meant_for("backward-unwritten-inputs", "was written to")
class WritesGradients(ReferenceBackend):
    def begin_backward(self, q, dout, lse, delta, problem, stream=None, out=None):
        grads = super().begin_backward(q, dout, lse, delta, problem, stream, out)
        dout[...] = 1
        return grads


@meant_for("backward-overwritten-keys")
class BackwardKeepsKeys(ReferenceBackend):
    """dq is made at the end."""

    def begin_backward(self, q, dout, lse, delta, problem, stream=None, out=None):
        self.later = []
        return super().begin_backward(q, dout, lse, delta, problem, stream, out)

    def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
        before = grads.dq.copy()
        super().accumulate_backward(grads, k, v, dk, dv, tiles, stream)
        grads.dq[...] = before
        self.later.append((k, v, tiles))

    def finish_backward(self, grads, stream=None):
        for k, v, tiles in self.later:
            sums = np.zeros(k.shape), np.zeros(v.shape)
            super().accumulate_backward(grads, k, v, *sums, tiles, stream)
        return super().finish_backward(grads, stream)


@meant_for("backward-same-bits", "different bits")
class UnsteadyGradients(ReferenceBackend):
    passes = 0

    def finish_backward(self, grads, stream=None):
        self.passes += 1
        return super().finish_backward(grads, stream) * (1 + 1e-6 * self.passes)


@meant_for("backward-interleaved")
class ForwardSpoilsBackward(ReferenceBackend):
    grads = None

    def begin_backward(self, q, dout, lse, delta, problem, stream=None, out=None):
        self.grads = super().begin_backward(q, dout, lse, delta, problem, stream, out)
        return self.grads

    def finish(self, state, stream=None):
        if self.grads is not None:
            self.grads.dq[...] = 0
        return super().finish(state, stream)
