"""The CPU kernel: one head's query rows absorb a chunk of keys. Compiled by Numba on first use
and cached on disk; it holds no interpreter lock while it runs.

Numerics. The state is float32 for float32 inputs, but within a call sums are taken four
products at a time in float32 and added up in float64, and the maximum is taken from a score in
float64: scores and values of a real model cancel, and plain float32 sums lose two more bits.
"""

from __future__ import annotations

import math
from functools import cache

import numba
import numpy as np

from ringrt.plan.partition import Array

#: Keys of a block: its scores stay in the first-level cache.
BLOCK = 32

_jit = numba.njit(nogil=True, cache=True, fastmath={"contract"})
_inline = numba.njit(nogil=True, cache=True, fastmath={"contract"}, inline="always")


@_jit
def absorb_block(  # type: ignore[no-untyped-def]
    q, panels, v, m, z, y, lower, upper, scale, softcap
):
    """Absorb the pairs with lower <= i − j <= upper into (m, z, y), in place.

    q `[rows, head_dim]`, panels `[blocks, head_dim, BLOCK]` (K, transposed by blocks of keys),
    v `[keys, value_dim]`, m and z `[rows]`, y `[rows, value_dim]`: contiguous, one dtype.
    `softcap` 0 is off. A row uses only the scores and values of keys that it sees, so nothing
    else can reach it.
    """
    narrow = q.dtype.type
    scores, weights = np.empty(BLOCK, np.float64), np.empty(BLOCK, q.dtype)
    sums = np.empty(v.shape[1], np.float64)
    z_wide, y_wide = z.astype(np.float64), y.astype(np.float64)
    for begin in range(0, v.shape[0], BLOCK):
        width = min(BLOCK, v.shape[0] - begin)
        for i in range(q.shape[0]):
            first = max(0, i - upper - begin)
            last = min(width, i - lower - begin + 1)
            if first >= last:
                continue
            _score_row(q[i], panels[begin // BLOCK], scores)
            top = m[i]
            for j in range(first, last):
                score = scores[j] * scale
                if softcap > 0:
                    score = softcap * math.tanh(score / softcap)
                scores[j] = score
                top = max(top, narrow(score))
            # Scores of −inf alone leave nothing to subtract; NaN scores stay NaN either way.
            base = narrow(0) if top == -np.inf else top
            keep = narrow(0) if m[i] == -np.inf else math.exp(m[i] - base)
            total = narrow(0)
            for j in range(first, last):
                weights[j] = math.exp(narrow(scores[j] - base))
                total += weights[j]
            _weigh_values(weights, v, begin, first, last, sums)
            m[i] = top
            z_wide[i] = z_wide[i] * keep + total
            for d in range(y.shape[1]):
                y_wide[i, d] = y_wide[i, d] * keep + sums[d]
    z[:] = z_wide
    y[:] = y_wide


@_inline
def _score_row(row, panel, scores):  # type: ignore[no-untyped-def]
    """scores[j] = row · key j of a block. panel is the block's K, `[head_dim, BLOCK]`."""
    for j in range(BLOCK):
        scores[j] = 0
    d, dim = 0, row.shape[0]
    while d + 4 <= dim:
        a, b, c, e = row[d], row[d + 1], row[d + 2], row[d + 3]
        for j in range(BLOCK):
            pair = a * panel[d, j] + b * panel[d + 1, j]
            scores[j] += pair + (c * panel[d + 2, j] + e * panel[d + 3, j])
        d += 4
    while d < dim:
        for j in range(BLOCK):
            scores[j] += row[d] * panel[d, j]
        d += 1


@_inline
def _weigh_values(weights, v, begin, first, last, sums):  # type: ignore[no-untyped-def]
    """sums = Σ weights[j] · v[begin + j] over first <= j < last."""
    dim = sums.shape[0]
    for d in range(dim):
        sums[d] = 0
    j = first
    while j + 4 <= last:
        t = begin + j
        a, b, c, e = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(dim):
            sums[d] += (a * v[t, d] + b * v[t + 1, d]) + (c * v[t + 2, d] + e * v[t + 3, d])
        j += 4
    while j < last:
        for d in range(dim):
            sums[d] += weights[j] * v[begin + j, d]
        j += 1


@cache
def compile_for(dtype: str) -> None:
    """Compile `absorb_block` for float32 or float64, or load it from Numba's disk cache, so
    that the time does not fall into a ring step."""
    row: Array = np.zeros(1, dtype)
    panels, v = np.zeros((1, 1, BLOCK), dtype), np.zeros((1, 1), dtype)
    absorb_block(v, panels, v, row, row.copy(), v.copy(), 0, 0, 1.0, 0.0)
