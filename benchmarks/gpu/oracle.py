"""Attention in float64 by its definition, row block by row block, and for every element how far
a kernel may be from it. Shares no code with ringrt.

A kernel's error has two sources. Weights (p, ds) that enter a product on tensor cores are first
rounded to the inputs' dtype: each by at most u·|w|, or half the smallest subnormal. The sum of
such errors times |x| is at most Σ e·|x|, and, since they are independent, far below 8·√Σ (e·x)².
Scores and sums are made in the state's dtype: that is `sums`, in proportion to Σ |w|·|x|, and to
the size of the scores beyond 16. On top comes half a unit in the last place of the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

#: Query rows whose scores are held at a time.
_ROWS = 512
#: Standard deviations of a sum of independent roundings, and more.
_SPREAD = 8.0
_SCORE = 16.0


class Rounding(NamedTuple):
    """Of weights, relative and at least; of scores and sums, relative. Tensor cores may cut sums
    off where they do not round them, so a sum of 4096 terms (256 steps) may be 256 · 2^-24 off."""

    weight: float
    least: float
    sums: float


ROUNDING = {
    "float64": Rounding(0.0, 0.0, 2e-14),
    "float32": Rounding(0.0, 0.0, 2e-6),
    "float16": Rounding(2.0**-11, 2.0**-25, 2e-5),
    "bfloat16": Rounding(2.0**-8, 0.0, 2e-5),
}


class Expected(NamedTuple):
    """A tensor, and the largest error of each element before it is rounded to its own dtype."""

    value: np.ndarray
    bound: np.ndarray


@dataclass(frozen=True)
class Attention:
    """What is to be computed: q, k, v `[batch, rows, heads, dim]` in float64, who sees whom, bool
    `[q_length, kv_length]`, and the dtype of the kernel."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    seen: np.ndarray
    dtype: str
    scale: float
    softcap: float | None = None
    sink: np.ndarray | None = None

    def forward(self) -> dict[str, Expected]:
        """out and lse."""
        (batch, rows, heads, _), dim = self.q.shape, self.v.shape[3]
        out = _Sum.of(batch, rows, heads, dim)
        lse, lse_bound = np.empty((batch, heads, rows)), np.empty((batch, heads, rows))
        for at in self._blocks():
            b, cut, h, g = at
            scores, _ = self._scores(at)
            drift = self._drift(scores)
            total = scores if self.sink is None else np.pad(scores, ((0, 0), (0, 1)))
            if self.sink is not None:
                total[:, -1] = self.sink[h]
            lse[b, h, cut], lse_bound[b, h, cut] = _log_sum(total), drift[:, 0]
            weights = _exp(scores, lse[b, h, cut])
            out.add((b, cut, h), weights, 2 * drift * weights, self.v[b, :, g], self.dtype)
        return {"out": out.expected(), "lse": Expected(lse, lse_bound)}

    def backward(self, dout: np.ndarray, out: np.ndarray, lse: np.ndarray) -> dict[str, Expected]:
        """dq, dk, dv, and dsink where there is a sink, given out and lse as the kernel has them."""
        dout, out, lse = (np.asarray(x).astype(np.float64) for x in (dout, out, lse))
        products = dout * out
        delta = products.sum(3).transpose(0, 2, 1)
        dq, dk, dv = (_Sum.of(*x.shape) for x in (self.q, self.k, self.v))
        for at in self._blocks():
            b, cut, h, g = at
            scores, slope = self._scores(at)
            drift, d = self._drift(scores), delta[b, h, cut, None]
            p = _exp(scores, lse[b, h, cut])
            k, v, rows = self.k[b, :, g], self.v[b, :, g], dout[b, cut, h]
            ds = p * (rows @ v.T - d) * slope
            off = 2 * drift * p * (abs(rows) @ abs(v).T + abs(d))
            dv.add((b, slice(None), g), p.T, 2 * (drift * p).T, rows, self.dtype)
            dq.add((b, cut, h), ds, off, k, self.dtype)
            dk.add((b, slice(None), g), ds.T, off.T, self.q[b, cut, h], self.dtype)
        result = {"dq": dq.expected(self.scale), "dk": dk.expected(self.scale)}
        result["dv"] = dv.expected()
        if self.sink is not None:
            weights = np.exp(self.sink[:, None] - lse)
            sums = ROUNDING[self.dtype].sums * (weights * abs(products).sum(3).transpose(0, 2, 1))
            result["dsink"] = Expected(-(weights * delta).sum((0, 2)), 2 * sums.sum((0, 2)))
        return result

    def _blocks(self) -> Iterator[tuple[int, slice, int, int]]:
        """batch, rows, query head and KV head."""
        batch, rows, heads, _ = self.q.shape
        for b, first, h in itertools.product(range(batch), range(0, rows, _ROWS), range(heads)):
            yield b, slice(first, first + _ROWS), h, h * self.k.shape[2] // heads

    def _scores(self, at: tuple[int, slice, int, int]) -> tuple[np.ndarray, Any]:
        """The scores, -inf where nothing is seen, and their slope by the product q·k."""
        b, cut, h, g = at
        scores, slope = self.q[b, cut, h] @ self.k[b, :, g].T * self.scale, 1.0
        if self.softcap is not None:
            inner = np.tanh(scores / self.softcap)
            scores, slope = self.softcap * inner, 1 - inner**2
        return np.where(self.seen[cut], scores, -np.inf), slope

    def _drift(self, scores: np.ndarray) -> np.ndarray:
        """The relative error of a weight by that of its score, `[rows, 1]`."""
        size = np.where(np.isinf(scores), 0, abs(scores)).max(1, initial=0.0, keepdims=True)
        size = np.maximum(size, self.softcap or 0)
        return ROUNDING[self.dtype].sums * np.maximum(1.0, size / _SCORE)


@dataclass
class _Sum:
    """Σ w·x and what its error may be, summed up part by part."""

    value: np.ndarray
    reach: np.ndarray
    square: np.ndarray
    drift: np.ndarray

    @classmethod
    def of(cls, *shape: int) -> _Sum:
        return cls(*(np.zeros(shape) for _ in range(4)))

    def add(self, to: Any, weights: np.ndarray, off: np.ndarray, x: np.ndarray, dtype: str) -> None:
        """`off` are the errors of the weights by other causes than their rounding."""
        self.value[to] += weights @ x
        self.drift[to] += off @ abs(x)
        rounding = ROUNDING[dtype]
        if rounding.weight:
            error = np.maximum(rounding.weight * abs(weights), rounding.least * (weights != 0))
            self.reach[to] += error @ abs(x)
            self.square[to] += error**2 @ x**2

    def expected(self, factor: float = 1.0) -> Expected:
        spread = np.minimum(self.reach, _SPREAD * np.sqrt(self.square))
        return Expected(factor * self.value, abs(factor) * (spread + self.drift))


def visible(
    q_length: int,
    kv_length: int,
    *,
    causal: bool = False,
    window: Sequence[int] | None = None,
    documents: Sequence[Any] | None = None,
    prefix: int = 0,
    sink_tokens: int = 0,
) -> np.ndarray:
    """Who sees whom, by the words of docs/masks.md, bool `[q_length, kv_length]`."""
    seen = np.zeros((q_length, kv_length), bool)
    ranges = [((0, q_length), (0, kv_length))]
    if documents is not None:
        flat = np.ndim(documents[0]) == 0
        spans = list(itertools.pairwise(documents)) if flat else documents
        ranges = [((begin, end), (begin, end)) for begin, end in spans]
    left, right = window or (-1, -1)
    for (q0, q1), (k0, k1) in ranges:
        ahead = (k1 - np.arange(k0, k1))[None, :] - (q1 - np.arange(q0, q1))[:, None]
        first = np.arange(k1 - k0)[None, :]
        shown = (ahead <= left) | (left == -1) | (first < sink_tokens)
        shown &= (-ahead <= right) | (right == -1)
        shown &= (ahead >= 0) | (not causal)
        seen[q0:q1, k0:k1] = shown | (first < prefix)
    return seen


def share_of_bound(result: np.ndarray, expected: Expected) -> tuple[float, str]:
    """The largest error as a share of what it may be, and where it is; inf where one is finite
    and the other is not."""
    value, bound = expected
    if result.shape != value.shape:
        return np.inf, f"shape {result.shape} in place of {value.shape}"
    wide = result.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(wide == value, 0.0, abs(wide - value))
    size = np.maximum(abs(value), abs(wide))
    share = error / (bound + half_ulp(size, result.dtype))
    share = np.where(np.isfinite(share), share, np.inf)
    if not share.size:
        return 0.0, "nowhere"
    worst = np.unravel_index(np.argmax(share), share.shape)
    place = [int(i) for i in worst]
    return float(share[worst]), f"{wide[worst]:g} in place of {value[worst]:g} at {place}"


def half_ulp(size: np.ndarray, dtype: Any) -> np.ndarray:
    """Half a unit in the last place of a dtype, at numbers of that size."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.frexp(np.where(np.isfinite(size), abs(size), 0))[1] - 1
    return np.exp2(np.maximum(exponent, info.minexp) - info.nmant - 1.0)


def _log_sum(scores: np.ndarray) -> np.ndarray:
    top = scores.max(1, initial=-np.inf)
    shift = np.where(np.isneginf(top), 0, top)
    with np.errstate(divide="ignore"):
        return shift + np.log(np.exp(scores - shift[:, None]).sum(1))


def _exp(scores: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Probabilities; 0 in rows that see nothing."""
    return np.exp(scores - np.where(np.isneginf(lse), 0, lse)[:, None])
