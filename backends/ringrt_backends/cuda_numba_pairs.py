"""What the CUDA kernels in Python do for a pair of rows, and the sizes they work in. Nothing here
touches a barrier or asks for its thread, for Numba's simulator offers those to the kernels' own
module alone."""

from __future__ import annotations

import math
from typing import Any

import numba.cuda
import numpy as np

#: Numba's types say less than it has.
_numba: Any = numba
cuda = _numba.cuda

#: Whether Numba simulates: every CUDA thread is then a thread of Python.
SIMULATED = bool(_numba.config.ENABLE_CUDASIM)

#: Own rows of a block, and others it meets at a time; threads of a block along either side;
#: dims that lie in shared memory at a time, a multiple of 4 and of SIDE. Small where simulated.
TILE, SIDE, CHUNK = (8, 2, 4) if SIMULATED else (64, 16, 32)
THREADS = SIDE * SIDE
#: One more, so that a column of shared memory lies in as many banks as it has rows.
PADDED_CHUNK, PADDED_TILE, PADDED_SIDE = CHUNK + 1, TILE + 1, SIDE + 1
#: Own rows and others of a thread, SIDE apart so that neighbours touch neighbours; and dims.
EACH, WIDE = TILE // SIDE, CHUNK // SIDE
PAIRS, SUMS = EACH * EACH, EACH * WIDE


def inline(function):  # type: ignore[no-untyped-def]
    """Part of a kernel. Inlined, or the arrays of a thread would not stay in registers; where
    simulated a plain function, which costs least."""
    return function if SIMULATED else cuda.jit(device=True, inline="always")(function)


@inline
def ranges(row, begin, pieces, at, starts, stops):  # type: ignore[no-untyped-def]
    """Which others of a tile, begun at `begin`, the thread's own rows see: starts <= j < stops.
    Nothing outside is ever multiplied, so what is hidden cannot get through, NaN included."""
    own0, own1, end = int(pieces[at, 0]), int(pieces[at, 1]), int(pieces[at, 3])
    low, high = int(pieces[at, 4]), int(pieces[at, 5])
    for r in range(EACH):
        i = row + SIDE * r
        starts[r] = max(0, i - high - begin) if own0 <= i < own1 else TILE
        stops[r] = min(TILE, end - begin, i - low - begin + 1)


@inline
def load(x, begin, end, start, tile, thread):  # type: ignore[no-untyped-def]
    """tile[i, d] = x[begin + i, start + d], 0 where there is none. Neighbouring threads read
    neighbouring addresses."""
    for at in range(thread, TILE * CHUNK, THREADS):
        i, d = at // CHUNK, at % CHUNK
        inside = begin + i < end and start + d < x.shape[1]
        tile[i, d] = x[begin + i, start + d] if inside else np.float32(0)


@inline
def product_of(high, low, own, i, other, j):  # type: ignore[no-untyped-def]
    """The product of own row i and other j in float64: taken again where float32 was too
    small for it."""
    product = np.float64(high) + np.float64(low)
    if not math.isfinite(product):
        product = np.float64(0)
        for d in range(own.shape[1]):
            product += np.float64(own[i, d]) * np.float64(other[j, d])
    return product


@inline
def capped(score, softcap):  # type: ignore[no-untyped-def]
    return softcap * math.tanh(score / softcap) if softcap > 0 else score


@inline
def pair(score, dp, lse, delta, scale, softcap):  # type: ignore[no-untyped-def]
    """p = e^(score − lse), and the change of q·k: p (dp − delta) times the softcap's slope."""
    # A row whose scores are all −inf is empty, and has no gradients.
    if lse == -math.inf:
        return np.float32(0), np.float32(0)
    slope = scale
    if softcap > 0:
        tanh = math.tanh(score / softcap)
        score, slope = softcap * tanh, scale * (1 - tanh * tanh)
    weight = np.float32(math.exp(np.float32(score - lse)))
    return weight, np.float32(weight * (dp - delta) * slope)
