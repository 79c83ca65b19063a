"""A rank checks its own rows against a float64 oracle that shares no code with what it checks:
plain softmax over all keys, no online state, no tiles, the mask by its definition.

K and V are read in blocks through the source, so no rank holds the whole sequence; of the
scores, one chunk of rows over all keys is held at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ringrt.jobs.sources import Source
from ringrt.plan.mask import IntArray
from ringrt.plan.partition import Array, Run
from ringrt.plan.problem import Problem

#: Keys read at a time, and float64 scores held at a time.
_KEY_BLOCK, _SCORES = 1024, 8_000_000

#: Bound of the absolute error that is not rounding of the result's dtype, where values are at
#: most _VALUE and scores at most _SCORE in size (real models are); it grows in proportion to
#: either beyond that. Stated in docs/accuracy.md.
_BOUND = {"float32": 2e-6, "float64": 1e-14}
_VALUE, _SCORE = 8.0, 32.0


@dataclass(slots=True)
class Verdict:
    """Largest absolute errors over the rows checked, and the bounds they were held to.

    `out_excess` is the error of out beyond half a unit in the last place of its dtype; it is
    what is held to the bound. NaN where exactly one of result and oracle is NaN."""

    rows: int = 0
    out_error: float = 0.0
    out_excess: float = 0.0
    lse_error: float = 0.0
    out_bound: float = 0.0
    lse_bound: float = 0.0

    @property
    def passed(self) -> bool:
        """Every error within its bound."""
        return self.out_excess <= self.out_bound and self.lse_error <= self.lse_bound


def verify(
    source: Source,
    problem: Problem,
    out: Array,
    lse: Array,
    indices: IntArray,
    rows: IntArray,
    on_progress: Callable[[int, int], None],
) -> Verdict:
    """Check some rows of a rank's out `[batch, rows, q_heads, value_dim]` and lse
    `[batch, q_heads, rows]`. `rows` are local, `indices` their positions in the sequence."""
    verdict = Verdict(rows=len(rows))
    chunk = max(1, _SCORES // max(1, problem.batch * problem.q_heads * problem.kv_length))
    value_size = score_size = 0.0
    for begin in range(0, len(rows), chunk):
        at = indices[begin : begin + chunk]
        oracle = _Oracle(source, problem, at)
        local = rows[begin : begin + chunk]
        error = _distance(out[:, local], oracle.out)
        rounding = _half_ulp(np.maximum(abs(oracle.out), abs(out[:, local].astype(float))), out)
        verdict.out_error = _worst(verdict.out_error, error)
        verdict.out_excess = _worst(verdict.out_excess, error - rounding)
        verdict.lse_error = _worst(verdict.lse_error, _distance(lse[:, :, local], oracle.lse))
        value_size = max(value_size, oracle.value_size)
        score_size = max(score_size, oracle.score_size)
        on_progress(min(begin + chunk, len(rows)), len(rows))
    base = _BOUND[problem.state_dtype] * max(1.0, score_size / _SCORE)
    verdict.lse_bound = base
    verdict.out_bound = base * max(1.0, value_size / _VALUE)
    return verdict


class _Oracle:
    """Exact out and lse of the queries at some positions, and the largest finite score and
    value that went into them."""

    def __init__(self, source: Source, problem: Problem, at: IntArray) -> None:
        self._source, self._problem = source, problem
        visible = problem.mask.visible(at, np.arange(problem.kv_length))
        scores = np.where(visible, self._scores(at), -np.inf)
        self.score_size = _largest(scores)
        top = scores.max(axis=-1, initial=-np.inf, keepdims=True)
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - np.where(top == -np.inf, 0, top))
        total = weights.sum(axis=-1)
        empty = total == 0
        divisor = np.where(empty, 1, total)
        self.lse = np.where(empty, -np.inf, top[..., 0] + np.log(divisor))
        self.value_size = 0.0
        self.out = self._weighted(weights / divisor[..., None], visible).transpose(0, 2, 1, 3)

    def _scores(self, at: IntArray) -> Array:
        """`[batch, q_heads, rows, keys]`, before the mask."""
        problem = self._problem
        q = self._wide("q", [Run(int(i), 1, 1) for i in at])
        blocks = [q @ self._wide("k", [run]).swapaxes(-1, -2) for run in self._blocks()]
        shape = (problem.batch, problem.q_heads, len(at), 0)
        scores = problem.scale * np.concatenate([np.empty(shape), *blocks], axis=-1)
        if problem.softcap is not None:
            scores = problem.softcap * np.tanh(scores / problem.softcap)
        return np.asarray(scores)

    def _weighted(self, weights: Array, visible: Array) -> Array:
        """weights @ v, in which a value that a row does not see has no part even if NaN."""
        problem = self._problem
        out = np.zeros((*weights.shape[:3], problem.value_dim))
        for run in self._blocks():
            cut = slice(run.start, run.start + run.count)
            v = self._wide("v", [run])
            self.value_size = max(self.value_size, _largest(v))
            if np.isfinite(v).all():
                out += weights[..., cut] @ v
            else:
                for row, seen in enumerate(visible[:, cut]):
                    out[:, :, row] += np.einsum(
                        "bhk,bhkd->bhd", weights[:, :, row, cut][..., seen], v[:, :, seen]
                    )
        return out

    def _wide(self, name: str, runs: list[Run]) -> Array:
        """Rows in float64 as `[batch, q_heads, rows, dim]`, KV heads repeated."""
        x = self._source.read(name, tuple(runs)).astype(np.float64).transpose(0, 2, 1, 3)
        return x if name == "q" else np.repeat(x, self._problem.group, axis=1)

    def _blocks(self) -> list[Run]:
        length = self._problem.kv_length
        starts = range(0, length, _KEY_BLOCK)
        return [Run(start, 1, min(_KEY_BLOCK, length - start)) for start in starts]


def _distance(result: Array, oracle: Array) -> Array:
    """Absolute difference in float64; 0 where both are NaN or the same infinity."""
    result = result.astype(np.float64)
    same = (result == oracle) | (np.isnan(result) & np.isnan(oracle))
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(same, 0, abs(result - oracle)))


def _half_ulp(size: Array, like: Array) -> Array:
    """Half a unit in the last place of like's dtype at numbers of that size."""
    info = ml_dtypes.finfo(like.dtype)  # type: ignore[no-untyped-call]
    exponent = np.frexp(np.where(np.isfinite(size), size, 0))[1] - 1
    return np.asarray(np.exp2(np.maximum(exponent, info.minexp) - info.nmant - 1.0))


def _worst(so_far: float, errors: Array) -> float:
    """The larger; NaN wins, for it must not pass."""
    return float(np.maximum(so_far, errors.max(initial=0.0)))


def _largest(x: Array) -> float:
    finite = np.isfinite(x)
    return float(np.max(abs(x), initial=0.0, where=finite))
