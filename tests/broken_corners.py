"""Backends that are wrong only where two things meet, or where there is much of one; see
tests/broken_backends.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from broken_backends import meant_for

from ringrt_backends.reference import ReferenceBackend


@meant_for("sinks")
class SinksInAnotherOrder(ReferenceBackend):
    """As if q_heads were [group, kv_heads]."""

    def begin(self, q, problem, sink=None, stream=None):
        if sink is not None:
            sink = sink.reshape(problem.group, problem.kv_heads).T.ravel()
        return super().begin(q, problem, sink, stream)


@meant_for("sinks")
class SinkOfTheFirstBatch(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        state = super().begin(q, problem, sink, stream)
        state.softmax.m[1:], state.softmax.z[1:] = -np.inf, 0
        return state


@meant_for("sinks")
class CappedSink(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        if sink is not None and problem.softcap is not None:
            sink = problem.softcap * np.tanh(sink / problem.softcap)
        return super().begin(q, problem, sink, stream)


@meant_for("grouped-heads")
class BatchesMixedUp(ReferenceBackend):
    """Where heads are grouped."""

    def accumulate(self, state, k, v, tiles, stream=None):
        turned = [x[::-1] if state.problem.group > 1 else x for x in (k, v)]
        super().accumulate(state, *turned, tiles, stream)


@meant_for("grouped-heads")
class ValuesOfAnotherHead(ReferenceBackend):
    """Where heads are grouped and value_dim is another."""

    def accumulate(self, state, k, v, tiles, stream=None):
        problem = state.problem
        odd = problem.group > 1 and problem.value_dim != problem.head_dim
        super().accumulate(state, k, v[:, :, ::-1] if odd else v, tiles, stream)


@meant_for("backward-grouped-heads")
class GradientsOfAnotherBatch(ReferenceBackend):
    def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
        part = np.zeros_like(dk)
        super().accumulate_backward(grads, k, v, part, dv, tiles, stream)
        dk += part[::-1] if grads.problem.group > 1 else part


@meant_for("odd-lengths")
class BlocksOf256Only(ReferenceBackend):
    """Keys beyond the last multiple of 256, where there is one."""

    def accumulate(self, state, k, v, tiles, stream=None):
        whole = k.shape[1] // 256 * 256
        if whole:
            k = k.copy()
            k[:, whole:] = 0
        super().accumulate(state, k, v, tiles, stream)


@meant_for("overlapping-tiles")
class FewTilesOnly(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        super().accumulate(state, k, v, list(tiles)[:64], stream)


@meant_for("interleaved-states")
class ScaleOfTheLastPass(ReferenceBackend):
    def begin(self, q, problem, sink=None, stream=None):
        self.scale = problem.scale
        return super().begin(q, problem, sink, stream)

    def accumulate(self, state, k, v, tiles, stream=None):
        problem = replace(state.problem, scale=self.scale)
        super().accumulate(replace(state, problem=problem), k, v, tiles, stream)


@meant_for("kept-results")
class ResultsInOneBuffer(ReferenceBackend):
    def __init__(self):
        self.buffers = {}

    def finish(self, state, stream=None):
        results = super().finish(state, stream)
        for name, x in zip(("out", "lse"), results, strict=True):
            self.buffers.setdefault((name, x.shape, x.dtype), np.empty_like(x))[...] = x
        return tuple(
            self.buffers[name, x.shape, x.dtype]
            for name, x in zip(("out", "lse"), results, strict=True)
        )


@meant_for("does-something", "SystemExit")
class EndsTheProcess(ReferenceBackend):
    def finish(self, state, stream=None):
        raise SystemExit(0)
