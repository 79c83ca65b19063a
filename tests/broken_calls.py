"""Backends that compute right and behave wrong in their calls; see tests/broken_backends.py."""

from __future__ import annotations

import threading
import time

import numpy as np
from broken_backends import WithFinish, meant_for

from ringrt.errors import Unsupported
from ringrt_backends.reference import ReferenceBackend


@meant_for("unwritten-inputs", "was written to")
class WritesQueries(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        state = super().begin(q, problem, sink, stream)
        q[...] = 0
        return state


@meant_for("unwritten-inputs", "the sink was written to")
class WritesSinks(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        state = super().begin(q, problem, sink, stream)
        if sink is not None:
            sink *= 2
        return state


@meant_for("overwritten-keys")
class KeepsKeys(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        self.later = []
        return super().begin(q, problem, sink, stream)

    def accumulate(self, state, k, v, tiles, stream=None):
        self.later.append((k, v, tiles))

    def finish(self, state, stream=None):
        for k, v, tiles in self.later:
            super().accumulate(state, k, v, tiles, stream)
        return super().finish(state, stream)


@meant_for("strided-inputs", "inputs heads first")
class ContiguousOnly(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        assert q.flags.c_contiguous, "not contiguous"
        return super().begin(q, problem, sink, stream)


@meant_for("strided-inputs", "inputs read-only")
class WriteableOnly(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        assert q.flags.writeable, "read-only"
        return super().begin(q, problem, sink, stream)


@meant_for("strided-inputs", "inputs backwards")
class PositiveStridesOnly(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        assert min(q.strides) > 0, "negative strides"
        return super().begin(q, problem, sink, stream)


@meant_for("unseen-nan-in-a-tile")
class LeaksInTiles(ReferenceBackend):
    """As a plain product of weights and values would: 0 · NaN is NaN."""

    def accumulate(self, state, k, v, tiles, stream=None):
        super().accumulate(state, k, v, tiles, stream)
        for tile in tiles:
            cut = slice(tile.k0, tile.k1)
            nothing = 0 * v[:, cut].astype(float).sum(axis=1)
            heads = np.repeat(nothing, state.problem.group, axis=1)
            state.softmax.y[:, :, tile.q0 : tile.q1] += heads[:, :, None]


@meant_for("unseen-nan")
class LeaksInShards(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        super().accumulate(state, k, v, tiles, stream)
        with np.errstate(invalid="ignore"):
            nothing = np.repeat(0 * v.astype(float).sum(axis=1), state.problem.group, axis=1)
        state.softmax.y[...] += nothing[:, :, None]


@meant_for("seen-nan")
class SwallowsNan(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        v = np.where(np.isnan(v), 0, v).astype(v.dtype)
        super().accumulate(state, k, v, tiles, stream)


@meant_for("infinite-scores", "+inf must give an out of NaN")
class SwallowsInfinity(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        k = np.where(np.isposinf(k), 1e30, k).astype(k.dtype)
        super().accumulate(state, k, v, tiles, stream)


@meant_for("same-bits", "different bits")
class Unsteady(WithFinish):
    passes = 0

    def changed(self, out, lse):
        self.passes += 1
        return out * (1 + 1e-6 * self.passes), lse


@meant_for("prepare-twice", "prepare raised RuntimeError")
class PreparesOnce(ReferenceBackend):
    def prepare(self, problem):
        if getattr(self, "prepared", False):
            raise RuntimeError("prepared already")
        self.prepared = True


@meant_for("interleaved-states")
class OneStateForAll(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        self.state = super().begin(q, problem, sink, stream)
        return self.state

    def accumulate(self, state, k, v, tiles, stream=None):
        if self.state.q.shape == state.q.shape:
            super().accumulate(self.state, k, v, tiles, stream)

    def finish(self, state, stream=None):
        return super().finish(self.state, stream)


@meant_for("two-threads")
class OneStateForAllInstances(ReferenceBackend):
    state = None

    def begin(self, q, problem, sink=None, stream=None):
        type(self).state = super().begin(q, problem, sink, stream)
        return self.state

    def accumulate(self, state, k, v, tiles, stream=None):
        time.sleep(0.05)
        super().accumulate(type(self).state, k, v, tiles, stream)

    def finish(self, state, stream=None):
        return super().finish(type(self).state, stream)


@meant_for("close-twice", "close raised RuntimeError")
class ClosesOnce(ReferenceBackend):
    def close(self):
        if getattr(self, "closed", False):
            raise RuntimeError("closed already")
        self.closed = True


@meant_for("attributes", "needs_out is True where backward is False")
class OutForNothing(ReferenceBackend):
    backward, needs_out = False, True


@meant_for("does-something", "plain full attention is refused in every dtype: not today")
class RefusesEverything(ReferenceBackend):
    def supports(self, problem):
        return "not today"


@meant_for("refusals-in-words", "supports returned ''")
class RefusesWithoutWords(ReferenceBackend):
    def supports(self, problem):
        return "" if problem.softcap else None


@meant_for("softcap", "supports returned False")
class RefusesByFalse(ReferenceBackend):
    def supports(self, problem):
        return False if problem.softcap else None


@meant_for("refusals-in-words", "a refusal must name sink, got 'not implemented'")
class RefusesVaguely(ReferenceBackend):
    def supports(self, problem):
        return "not implemented" if problem.sink else None


@meant_for("refusals-in-words", "now this, now that")
class ChangesItsMind(ReferenceBackend):
    asked = 0

    def supports(self, problem):
        self.asked += 1
        return "scale < 0 today" if problem.scale < 0 and self.asked % 2 else None


@meant_for("softcap", "a refusal comes from `supports` or `prepare`")
class RefusesLate(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        if state.problem.softcap is not None:
            raise Unsupported("softcap is not implemented")
        super().accumulate(state, k, v, tiles, stream)


@meant_for("ring-refusals", "must refuse 'softcap is not implemented'")
class RefusesInOneThreadOnly(ReferenceBackend):
    def supports(self, problem):
        refused = problem.softcap and threading.current_thread() is threading.main_thread()
        return "softcap is not implemented" if refused else None


@meant_for("ring-contiguous", "1 ranks, contiguous")
@meant_for("ring-striped", "1 ranks, striped")
@meant_for("ring-zigzag", "1 ranks, zigzag")
@meant_for("ring-options", "3 ranks, striped")
class WrongInThreads(WithFinish):
    def changed(self, out, lse):
        return out, lse + (threading.current_thread() is not threading.main_thread())
