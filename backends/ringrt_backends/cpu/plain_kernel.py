"""The CPU kernels, forward and backward: one head's query rows meet a chunk of keys. Compiled by
Numba on first use and cached on disk; they hold no interpreter lock while they run.

Numerics. Products are taken in the dtype of q, four at a time; whatever lives longer (scores,
the state, gradients) is float64. Scores and values of a real model cancel, and plain float32
sums lose several bits more. Where float32 products overflow, they are taken again in float64.

Layout. K and V come in panels `[blocks, dim, BLOCK]`, transposed by blocks of keys, where a row
is multiplied with all keys of a block at once. In a block a row sees a range of keys, and a key
is seen by a range of rows; nothing outside these ranges is ever touched, so what a row does not
see cannot reach it, NaN included.
"""

from __future__ import annotations

import math
from functools import cache

import numba
import numpy as np

from ringrt.plan.partition import Array

#: Keys of a block, and rows of one in backward: its scores stay in the first-level cache.
BLOCK = 32

_jit = numba.njit(nogil=True, cache=True, fastmath={"contract"})
_inline = numba.njit(nogil=True, cache=True, fastmath={"contract"}, inline="always")


@_jit
def absorb(  # type: ignore[no-untyped-def]
    q, panels, v, m, z, y, lower, upper, scale, softcap
):
    """Absorb the pairs with lower <= i − j <= upper into (m, z, y), in place.

    q `[rows, head_dim]` and v `[keys, value_dim]` of one dtype, panels of K; m and z `[rows]`,
    y `[rows, value_dim]` float64; all contiguous. `softcap` 0 is off.
    """
    scores, weights = np.empty(BLOCK, np.float64), np.empty(BLOCK, q.dtype)
    sums = np.empty(v.shape[1], np.float64)
    for begin in range(0, v.shape[0], BLOCK):
        width = min(BLOCK, v.shape[0] - begin)
        for i in range(q.shape[0]):
            first = max(0, i - upper - begin)
            last = min(width, i - lower - begin + 1)
            if first >= last:
                continue
            _multiply(q[i], panels[begin // BLOCK], first, last, scores)
            top = m[i]
            for j in range(first, last):
                score = scores[j] * scale
                if softcap > 0:
                    score = softcap * math.tanh(score / softcap)
                scores[j] = score
                top = max(top, score)
            # Scores of −inf alone leave nothing to subtract; NaN scores stay NaN either way.
            base = 0.0 if top == -np.inf else top
            keep = 0.0 if m[i] == -np.inf else math.exp(m[i] - base)
            total = 0.0
            for j in range(first, last):
                weights[j] = math.exp(q.dtype.type(scores[j] - base))
                total += weights[j]
            _sum(weights, v, begin, first, last, sums)
            m[i] = top
            z[i] = z[i] * keep + total
            for d in range(y.shape[1]):
                y[i, d] = y[i, d] * keep + sums[d]


@_jit
def absorb_backward(  # type: ignore[no-untyped-def]
    q, dout, lse, delta, dq, k, v, k_panels, v_panels, dk, dv, lower, upper, scale, softcap
):
    """Add the gradients of the pairs with lower <= i − j <= upper to dq, dk and dv, in place.

    q and dout `[rows, dim]`, k and v `[keys, dim]` of one dtype, panels of K and V; lse and
    delta `[rows]`, and dq, dk and dv like q, k and v, in float64; all contiguous.
    """
    rows, keys = q.shape[0], k.shape[0]
    scores, products = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
    p, ds = np.empty((BLOCK, BLOCK), q.dtype), np.empty((BLOCK, BLOCK), q.dtype)
    row_ds = np.empty(BLOCK, q.dtype)
    key_sums, value_sums = np.empty(k.shape[1], np.float64), np.empty(v.shape[1], np.float64)
    for row_begin in range(0, rows, BLOCK):
        height = min(BLOCK, rows - row_begin)
        first_key, last_key = max(0, row_begin - upper), min(keys, row_begin + height - lower)
        for begin in range(first_key // BLOCK * BLOCK, last_key, BLOCK):
            width = min(BLOCK, keys - begin)
            for i in range(height):
                at = row_begin + i
                first = max(0, at - upper - begin)
                last = min(width, at - lower - begin + 1)
                if first >= last:
                    continue
                # A row whose scores are all −inf is empty, and has no gradients.
                empty = lse[at] == -np.inf
                _multiply(q[at], k_panels[begin // BLOCK], first, last, scores)
                _multiply(dout[at], v_panels[begin // BLOCK], first, last, products)
                for j in range(first, last):
                    score, slope = scores[j] * scale, scale
                    if softcap > 0:
                        tanh = math.tanh(score / softcap)
                        score, slope = softcap * tanh, scale * (1 - tanh * tanh)
                    weight = 0.0 if empty else math.exp(score - lse[at])
                    change = 0.0 if empty else weight * (products[j] - delta[at]) * slope
                    p[j, i], ds[j, i], row_ds[j] = weight, change, change
                _sum(row_ds, k, begin, first, last, key_sums)
                for d in range(k.shape[1]):
                    dq[at, d] += key_sums[d]
            for j in range(width):
                first = max(0, begin + j + lower - row_begin)
                last = min(height, begin + j + upper - row_begin + 1)
                if first >= last:
                    continue
                _sum(ds[j], q, row_begin, first, last, key_sums)
                _sum(p[j], dout, row_begin, first, last, value_sums)
                for d in range(k.shape[1]):
                    dk[begin + j, d] += key_sums[d]
                for d in range(v.shape[1]):
                    dv[begin + j, d] += value_sums[d]


@_inline
def _multiply(row, panel, first, last, products):  # type: ignore[no-untyped-def]
    """products[j] = row · key j of a block, for all j; of these, first <= j < last count."""
    for j in range(BLOCK):
        products[j] = 0
    d, dim = 0, row.shape[0]
    while d + 4 <= dim:
        a, b, c, e = row[d], row[d + 1], row[d + 2], row[d + 3]
        for j in range(BLOCK):
            pair = a * panel[d, j] + b * panel[d + 1, j]
            products[j] += pair + (c * panel[d + 2, j] + e * panel[d + 3, j])
        d += 4
    while d < dim:
        for j in range(BLOCK):
            products[j] += row[d] * panel[d, j]
        d += 1
    finite = 0.0
    for j in range(first, last):
        finite += products[j] * 0
    if finite != 0:
        for j in range(first, last):
            products[j] = 0
            for d in range(dim):
                products[j] += np.float64(row[d]) * np.float64(panel[d, j])


@_inline
def _sum(weights, x, begin, first, last, sums):  # type: ignore[no-untyped-def]
    """sums = Σ weights[j] · x[begin + j] over first <= j < last."""
    dim = sums.shape[0]
    for d in range(dim):
        sums[d] = 0
    j = first
    while j + 4 <= last:
        t = begin + j
        a, b, c, e = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(dim):
            sums[d] += (a * x[t, d] + b * x[t + 1, d]) + (c * x[t + 2, d] + e * x[t + 3, d])
        j += 4
    while j < last:
        for d in range(dim):
            sums[d] += weights[j] * x[begin + j, d]
        j += 1
    finite = 0.0
    for d in range(dim):
        finite += sums[d] * 0
    if finite != 0:
        for d in range(dim):
            sums[d] = 0
            for j in range(first, last):
                sums[d] += np.float64(weights[j]) * np.float64(x[begin + j, d])


@cache
def compile_for(dtype: str) -> None:
    """Compile both kernels for float32 or float64, or load them from Numba's disk cache, so
    that the time does not fall into a ring step."""
    row: Array = np.zeros((1, 1), dtype)
    panels, wide = np.zeros((1, 1, BLOCK), dtype), np.zeros((1, 1))
    flat = np.zeros(1)
    absorb(row, panels, row, flat, flat.copy(), wide, 0, 0, 1.0, 0.0)
    absorb_backward(
        row, row, flat, flat, wide, row, row, panels, panels,
        wide.copy(), wide.copy(), 0, 0, 1.0, 0.0,
    )  # fmt: skip
