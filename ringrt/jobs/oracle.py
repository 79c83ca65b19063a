"""The float64 oracle of jobs: dense attention and its gradients for some rows, by definition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ringrt.jobs.sources import Source
from ringrt.plan.mask import IntArray
from ringrt.plan.partition import Array, Run
from ringrt.plan.problem import Problem

#: Rows of a tensor that are read at a time.
_BLOCK = 1024


class Oracle:
    """Exact out, lse and dq of the queries at some positions, and the largest finite score and
    value that went into them."""

    def __init__(
        self, source: Source, problem: Problem, at: IntArray, sink: Array | None = None
    ) -> None:
        self._source, self._problem, self._at = source, problem, at
        self._visible = problem.mask.visible(at, np.arange(problem.kv_length))
        scores, self._slope = _scores(self._read("q", at), self._blocks("k"), problem)
        scores = np.where(self._visible, scores, -np.inf)
        self.score_size = largest(scores)
        # A sink is one more key in every row, whose value is 0.
        logits = np.full(problem.q_heads, -np.inf) if sink is None else sink.astype(np.float64)
        extra = logits[None, :, None, None]
        top = np.maximum(scores.max(axis=-1, initial=-np.inf, keepdims=True), extra)
        with np.errstate(invalid="ignore"):
            shift = np.where(top == -np.inf, 0, top)
            weights = np.exp(scores - shift)
            total = weights.sum(axis=-1) + np.exp(extra - shift)[..., 0]
        empty = total == 0
        divisor = np.where(empty, 1, total)
        self.lse = np.where(empty, -np.inf, top[..., 0] + np.log(divisor))
        self._p = weights / divisor[..., None]
        self.value_size = 0.0
        self.out = self._weighted(self._p, "v")

    def query_gradient(self, delta: Array | None) -> Array:
        """dq, given the source's dout: ds = p (dp − delta), where delta `[batch, q_heads, rows]`
        is rowsum(dout · out) of a given out, or by default of the exact one."""
        dout = self._read("dout", self._at)
        dp = np.concatenate([dout @ v.swapaxes(-1, -2) for v in self._blocks("v")], axis=-1)
        dp = np.where(self._visible, dp, 0)
        if delta is None:
            delta = (self._p * dp).sum(axis=-1)
        seen = np.asarray(self._visible.any(axis=-1))[:, None]
        ds = np.where(seen, self._p * (dp - delta[..., None]) * self._slope, 0)
        return self._weighted(ds, "k")

    def _weighted(self, weights: Array, name: str) -> Array:
        """weights @ v or k, in which a row that is not seen has no part even if NaN."""
        problem = self._problem
        dim = problem.value_dim if name == "v" else problem.head_dim
        out = np.zeros((*weights.shape[:3], dim))
        begin = 0
        for x in self._blocks(name):
            cut = slice(begin, begin + x.shape[2])
            begin = cut.stop
            if name == "v":
                self.value_size = max(self.value_size, largest(x))
            if np.isfinite(x).all():
                out += weights[..., cut] @ x
                continue
            for row, seen in enumerate(self._visible[:, cut]):
                parts = weights[:, :, row, cut][..., seen], x[:, :, seen]
                out[:, :, row] += np.einsum("bhk,bhkd->bhd", *parts)
        return out.transpose(0, 2, 1, 3)

    def _blocks(self, name: str) -> Iterator[Array]:
        return _blocks(self._source, self._problem, name, self._problem.kv_length)

    def _read(self, name: str, at: IntArray) -> Array:
        return _wide(self._source, self._problem, name, [Run(int(i), 1, 1) for i in at])


def key_gradients(
    source: Source, problem: Problem, at: IntArray, lse: Array, delta: Array
) -> tuple[Array, Array]:
    """Exact dk and dv of the keys at some positions, given lse and delta of all queries
    `[batch, q_heads, q_length]`."""
    runs = [Run(int(i), 1, 1) for i in at]
    k, v = _wide(source, problem, "k", runs), _wide(source, problem, "v", runs)
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)
    begin = 0
    queries = _blocks(source, problem, "q", problem.q_length)
    douts = _blocks(source, problem, "dout", problem.q_length)
    for q, dout in zip(queries, douts, strict=True):
        rows = slice(begin, begin + q.shape[2])
        begin = rows.stop
        scores, slope = _scores(q, [k], problem)
        row_lse, row_delta = lse[:, :, rows, None], delta[:, :, rows, None]
        seen = problem.mask.visible(np.arange(rows.start, rows.stop), at) & (row_lse != -np.inf)
        with np.errstate(invalid="ignore", over="ignore"):
            p = np.where(seen, np.exp(scores - row_lse), 0)
            ds = np.where(seen, p * (dout @ v.swapaxes(-1, -2) - row_delta) * slope, 0)
            # Rows that see none of these keys have no part, whatever they hold.
            quiet = ~seen.any(axis=(0, 1, 3))[None, None, :, None]
            dk += ds.swapaxes(-1, -2) @ np.where(quiet, 0, q)
            dv += p.swapaxes(-1, -2) @ np.where(quiet, 0, dout)
    return _per_kv_head(dk, problem), _per_kv_head(dv, problem)


def sink_gradient(sink: Array, lse: Array, delta: Array) -> tuple[Array, float]:
    """Exact dsink `[q_heads]`, given lse and delta of all queries: the sink's weight in each row
    times (0 − delta). Also the largest sum of the terms' sizes."""
    weights = np.exp(sink.astype(np.float64)[None, :, None] - lse.astype(np.float64))
    terms = weights * delta
    return -terms.sum(axis=(0, 2)), float(abs(terms).sum(axis=(0, 2)).max())


def _scores(q: Array, k_blocks: Iterable[Array], problem: Problem) -> tuple[Array, Array]:
    """`[batch, q_heads, rows, keys]`, before the mask, and their derivative by q·k."""
    blocks = [q @ k.swapaxes(-1, -2) for k in k_blocks]
    empty = np.empty((*q.shape[:3], 0))
    scores = problem.scale * np.concatenate([empty, *blocks], axis=-1)
    if problem.softcap is None:
        return scores, np.full(scores.shape, problem.scale)
    tanh = np.tanh(scores / problem.softcap)
    return problem.softcap * tanh, problem.scale * (1 - tanh * tanh)


def _blocks(source: Source, problem: Problem, name: str, length: int) -> Iterator[Array]:
    """A whole tensor, block by block."""
    starts = range(0, length, _BLOCK)
    for start in starts:
        yield _wide(source, problem, name, [Run(start, 1, min(_BLOCK, length - start))])


def _wide(source: Source, problem: Problem, name: str, runs: list[Run]) -> Array:
    """Rows in float64 as `[batch, q_heads, rows, dim]`, KV heads repeated."""
    x = source.read(name, tuple(runs)).astype(np.float64).transpose(0, 2, 1, 3)
    return np.repeat(x, problem.group, axis=1) if name in "kv" else x


def _per_kv_head(x: Array, problem: Problem) -> Array:
    batch, _, rows, dim = x.shape
    summed = x.reshape(batch, problem.kv_heads, problem.group, rows, dim).sum(axis=2)
    return np.asarray(summed.transpose(0, 2, 1, 3))


def largest(x: Array) -> float:
    """The largest finite number in size."""
    return float(np.max(abs(x), initial=0.0, where=np.isfinite(x)))
