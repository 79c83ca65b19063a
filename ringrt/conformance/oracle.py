"""Dense attention in float64, written from the definition, one query row at a time over the keys
that it sees. Shares no code with what it is held against.

Beside every result stands the sum of the sizes of its terms, of which bounds are made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringrt.plan.mask import Piece

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sized:
    """A result in float64, the sum of its terms' sizes, and that of its factors' sizes where a
    weight (or the gradient of one) counts as 1."""

    value: Array
    size: Array
    unweighted: Array
    #: As `size`, before terms that the mathematics lets cancel were subtracted.
    gross: Array


@dataclass(frozen=True, slots=True)
class Exact:
    """out `[batch, rows, q_heads, value_dim]`, lse `[batch, q_heads, rows]`, and the largest
    sum of the sizes of a score's terms."""

    out: Sized
    lse: Array
    score: float


@dataclass(frozen=True, slots=True)
class Gradients:
    """dq, dk and dv, and the largest sum of the sizes of a score's terms."""

    dq: Sized
    dk: Sized
    dv: Sized
    score: float


def visible(rows: int, keys: int, pieces: Iterable[Piece]) -> Array:
    """Who sees whom, bool `[rows, keys]`."""
    seen = np.zeros((rows, keys), dtype=bool)
    for piece in pieces:
        for i in range(piece.q_start, min(piece.q_stop, rows)):
            for j in range(piece.k_start, min(piece.k_stop, keys)):
                low, high = piece.min_distance, piece.max_distance
                seen[i, j] |= (low is None or low <= i - j) and (high is None or i - j <= high)
    return seen


def attention(
    q: Array,
    k: Array,
    v: Array,
    seen: Array,
    scale: float,
    softcap: float | None = None,
    sink: Array | None = None,
) -> Exact:
    """Each row a plain softmax over what it sees and over the sink of its head, whose value
    is 0. A row without either has out 0 and lse −inf."""
    q, k, v = _wide(q, k, v)
    batch, rows, heads, _ = q.shape
    out, size, unweighted = (np.zeros((batch, rows, heads, v.shape[3])) for _ in range(3))
    lse = np.full((batch, heads, rows), -np.inf)
    logits = np.full(heads, -np.inf) if sink is None else sink.astype(np.float64)
    largest = float(np.max(abs(logits), initial=0.0, where=np.isfinite(logits)))
    for i in range(rows):
        keys = np.flatnonzero(seen[i])
        scores, _ = _scores(q[:, i], k[:, keys], scale, softcap)
        largest = max(largest, _score_size(q[:, i], k[:, keys], scale))
        with np.errstate(invalid="ignore"):
            top = np.maximum(scores.max(axis=-1, initial=-np.inf), logits)
            shift = np.where(top == -np.inf, 0, top)
            weights = np.exp(scores - shift[..., None])
            total = weights.sum(axis=-1) + np.exp(logits - shift)
            divisor = np.where(total == 0, 1, total)
            p = weights / divisor[..., None]
            out[:, i] = np.einsum("bhk,bkhd->bhd", p, v[:, keys])
            lse[:, :, i] = np.where(total == 0, -np.inf, top + np.log(divisor))
        size[:, i] = np.einsum("bhk,bkhd->bhd", _finite(p), _finite(v[:, keys]))
        unweighted[:, i] = _finite(v[:, keys]).sum(axis=1)
    return Exact(Sized(out, size, unweighted, size), lse, largest)


def gradients(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    seen: Array,
    scale: float,
    softcap: float | None = None,
) -> Gradients:
    """The chain rule through each row, given lse and delta = rowsum(dout · out) of the whole row
    `[batch, q_heads, rows]`: p = e^(s − lse), ds = p (dout · v − delta)."""
    kv_heads = k.shape[2]
    q, k, v = _wide(q, k, v)
    dout, lse, delta = (x.astype(np.float64) for x in (dout, lse, delta))
    dq, dk, dv = (_Sums(x.shape) for x in (q, k, v))
    largest = 0.0
    for i in range(q.shape[1]):
        keys = np.flatnonzero(seen[i])
        scores, slope = _scores(q[:, i], k[:, keys], scale, softcap)
        largest = max(largest, _score_size(q[:, i], k[:, keys], scale))
        own = lse[:, :, i, None]
        values, d_row, d = v[:, keys], dout[:, i], delta[:, :, i, None]
        with np.errstate(invalid="ignore", over="ignore"):
            # A row whose scores are all −inf is empty, and has no gradients.
            p = np.where(own == -np.inf, 0, np.exp(scores - own))
            dp = np.einsum("bhd,bkhd->bhk", d_row, values)
            ds = np.where(own == -np.inf, 0, p * (dp - d) * slope)
        dp_size = np.einsum("bhd,bkhd->bhk", _finite(d_row), _finite(values)) + _finite(d)
        gross = _finite(p) * dp_size * _finite(slope)
        at = (slice(None), slice(i, i + 1))
        dq.add(at, "bhk,bkhd->bhd", ds, gross, k[:, keys], _finite(slope))
        dk.add((slice(None), keys), "bhk,bhd->bkhd", ds, gross, q[:, i], _finite(slope))
        dv.add((slice(None), keys), "bhk,bhd->bkhd", p, _finite(p), d_row, np.ones_like(p))
    return Gradients(dq.made(q.shape[2]), dk.made(kv_heads), dv.made(kv_heads), largest)


class _Sums:
    """A gradient while it is summed up, `[batch, rows, q_heads, dim]`, with its sizes."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._parts = [np.zeros(shape) for _ in range(4)]

    def add(self, at: Any, rule: str, weights: Array, gross: Array, x: Array, units: Array) -> None:
        """Add weights · x at some rows."""
        finite = _finite(x)
        factors = ((weights, x), (_finite(weights), finite), (units, finite), (gross, finite))
        for total, (left, right) in zip(self._parts, factors, strict=True):
            with np.errstate(invalid="ignore", over="ignore"):
                product = np.einsum(rule, left, right)
                total[at] += product if product.ndim == 4 else product[:, None]

    def made(self, heads: int) -> Sized:
        """The sums over the query heads of each of so many heads."""
        return Sized(*(_per_head(part, heads) for part in self._parts))


def _scores(q: Array, k: Array, scale: float, softcap: float | None) -> tuple[Array, Array]:
    """Scores `[batch, heads, keys]` of one row, and their derivative by q·k."""
    with np.errstate(invalid="ignore", over="ignore"):
        scores = scale * np.einsum("bhd,bkhd->bhk", q, k)
        if softcap is None:
            return scores, np.full(scores.shape, scale)
        tanh = np.tanh(scores / softcap)
        return softcap * tanh, scale * (1 - tanh * tanh)


def _score_size(q: Array, k: Array, scale: float) -> float:
    """The largest sum of the sizes of a score's terms in one row: its rounding is in proportion to
    that, though the score itself may be small."""
    sizes = np.einsum("bhd,bkhd->bhk", _finite(q), _finite(k))
    return float(abs(scale) * sizes.max(initial=0.0))


def _wide(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """In float64, with the KV head h // (q_heads // kv_heads) for each query head h."""
    of = np.arange(q.shape[2]) // (q.shape[2] // k.shape[2])
    k, v = k.astype(np.float64)[:, :, of], v.astype(np.float64)[:, :, of]
    return q.astype(np.float64), k, v


def _per_head(x: Array, heads: int) -> Array:
    batch, rows, all_heads, dim = x.shape
    return np.asarray(x.reshape(batch, rows, heads, all_heads // heads, dim).sum(axis=3))


def _finite(x: Array) -> Array:
    """Sizes; 0 for what is not finite."""
    return np.where(np.isfinite(x), abs(x), 0)
