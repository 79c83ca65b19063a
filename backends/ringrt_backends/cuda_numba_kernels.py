"""The CUDA kernels in Python, forward and backward: a thread block owns `TILE` rows (or keys) of
one head, and meets the others tile by tile. Compiled by Numba; its simulator runs them as well.

Two sides. What a block owns is called own, what it meets other: `absorb` and `rows_backward` own
query rows and meet keys, `keys_backward` owns keys and meets query rows. A piece of work says
which own and which other see one another: own0 <= i < own1, other0 <= j < other1 and
low <= i − j <= high. Every sum belongs to one thread, so nothing is added atomically and the order
of addition never depends on chance.

Numerics. Products are taken in float32, four at a time; the sum of these keeps its rounding errors
in a second float32, for scores of a real model cancel. What lives longer than a tile (scores, the
state, gradients) is float64: a handful of operations for a pair, which a card with a few float64
units (1/64 of the rate) feels, by count about as much as all products, and one with half as many
does not. float64 for every product would cost the former more than ten times as much. Where
float32 overflows, sums are taken again in float64.

Only what the simulator has: shared arrays (one to a line), barriers, no warp instructions.
"""

from __future__ import annotations

import math

import numpy as np

from ringrt_backends.cuda_numba_pairs import (
    CHUNK,
    EACH,
    PADDED_CHUNK,
    PADDED_SIDE,
    PADDED_TILE,
    PAIRS,
    SIDE,
    SUMS,
    THREADS,
    TILE,
    WIDE,
    capped,
    cuda,
    inline,
    load,
    pair,
    product_of,
    ranges,
)


@cuda.jit
def absorb(q, k, v, m, z, y, tasks, pieces, scale, softcap):  # type: ignore[no-untyped-def]
    """Absorb the pieces into the state (m, z, y), in place.

    q `[batch, q_heads, rows, head_dim]`, k and v `[batch, kv_heads, keys, dim]` float32; m and z
    `[batch, q_heads, rows]`, y `[batch, q_heads, rows, value_dim]` float64. tasks `[n, 3]`: first
    row, range of its pieces `[m, 6]`: own0, own1, other0, other1, low, high. `softcap` 0 is off.
    One block for each task, batch and query head, the first tasks first.
    """
    own_tile = cuda.shared.array((TILE, PADDED_CHUNK), np.float32)
    other_tile = cuda.shared.array((TILE, PADDED_CHUNK), np.float32)
    weights = cuda.shared.array((TILE, PADDED_TILE), np.float32)
    partial = cuda.shared.array((TILE, PADDED_SIDE), np.float64)
    bases = cuda.shared.array(TILE, np.float64)
    keeps = cuda.shared.array(TILE, np.float64)
    high, low = cuda.local.array(PAIRS, np.float32), cuda.local.array(PAIRS, np.float32)
    scores = cuda.local.array(PAIRS, np.float64)
    starts, stops = cuda.local.array(EACH, np.int32), cuda.local.array(EACH, np.int32)
    thread = cuda.threadIdx.x
    column, line = thread % SIDE, thread // SIDE
    heads = q.shape[1]
    task, which = cuda.blockIdx.x // (q.shape[0] * heads), cuda.blockIdx.x % (q.shape[0] * heads)
    batch, head = which // heads, which % heads
    kv_head = head // (heads // k.shape[1])
    own, other, first = q[batch, head], k[batch, kv_head], int(tasks[task, 0])
    for at in range(tasks[task, 1], tasks[task, 2]):
        own0, own1 = int(pieces[at, 0]), int(pieces[at, 1])
        end = int(pieces[at, 3])
        for begin in range(pieces[at, 2], end, TILE):
            ranges(first + line, begin, pieces, at, starts, stops)
            _products(own, first, own1, other, begin, end, own_tile, other_tile, high, low)
            # Each row's maximum over the keys of a thread, then over the threads.
            for r in range(EACH):
                top = -math.inf
                for c in range(EACH):
                    n, j = r * EACH + c, column + SIDE * c
                    if starts[r] <= j < stops[r]:
                        i = first + line + SIDE * r
                        product = product_of(high[n], low[n], own, i, other, begin + j)
                        scores[n] = capped(product * scale, softcap)
                        top = max(top, scores[n])
                partial[line + SIDE * r, column] = top
            cuda.syncthreads()
            for i in range(thread, TILE, THREADS):
                keeps[i] = 1.0
                if own0 <= first + i < own1:
                    old = m[batch, head, first + i]
                    top = old
                    for c in range(SIDE):
                        top = max(top, partial[i, c])
                    # Scores of −inf alone leave nothing to subtract.
                    bases[i] = 0.0 if top == -math.inf else top
                    keeps[i] = math.exp(old - bases[i])
                    m[batch, head, first + i] = top
            cuda.syncthreads()
            for r in range(EACH):
                i, total = line + SIDE * r, np.float32(0)
                for c in range(EACH):
                    j = column + SIDE * c
                    if starts[r] <= j < stops[r]:
                        weight = np.float32(math.exp(np.float32(scores[r * EACH + c] - bases[i])))
                        weights[i, j] = weight
                        total += weight
                partial[i, column] = total
            cuda.syncthreads()
            for i in range(thread, TILE, THREADS):
                if own0 <= first + i < own1:
                    row_total = 0.0
                    for c in range(SIDE):
                        row_total += partial[i, c]
                    z[batch, head, first + i] = z[batch, head, first + i] * keeps[i] + row_total
            _rescale(y[batch, head], first, keeps)
            _add_sums(
                weights, v[batch, kv_head], begin, end, starts, stops, other_tile,
                y[batch, head], first,
            )  # fmt: skip


@cuda.jit
def rows_backward(  # type: ignore[no-untyped-def]
    q, dout, lse, delta, dq, k, v, tasks, pieces, scale, softcap
):
    """Add the pieces' gradients to dq, like q in float64. dout `[batch, q_heads, rows,
    value_dim]`, lse and delta `[batch, q_heads, rows]` float32; the rest as in `absorb`."""
    own_tile = cuda.shared.array((TILE, PADDED_CHUNK), np.float32)
    other_tile = cuda.shared.array((TILE, PADDED_CHUNK), np.float32)
    changes = cuda.shared.array((TILE, PADDED_TILE), np.float32)
    high, low = cuda.local.array(PAIRS, np.float32), cuda.local.array(PAIRS, np.float32)
    up, down = cuda.local.array(PAIRS, np.float32), cuda.local.array(PAIRS, np.float32)
    starts, stops = cuda.local.array(EACH, np.int32), cuda.local.array(EACH, np.int32)
    column, line = cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
    heads = q.shape[1]
    task, which = cuda.blockIdx.x // (q.shape[0] * heads), cuda.blockIdx.x % (q.shape[0] * heads)
    batch, head = which // heads, which % heads
    kv_head = head // (heads // k.shape[1])
    rows, douts, first = q[batch, head], dout[batch, head], int(tasks[task, 0])
    keys, values = k[batch, kv_head], v[batch, kv_head]
    for at in range(tasks[task, 1], tasks[task, 2]):
        own1, end = int(pieces[at, 1]), int(pieces[at, 3])
        for begin in range(pieces[at, 2], end, TILE):
            ranges(first + line, begin, pieces, at, starts, stops)
            _products(rows, first, own1, keys, begin, end, own_tile, other_tile, high, low)
            _products(douts, first, own1, values, begin, end, own_tile, other_tile, up, down)
            for r in range(EACH):
                for c in range(EACH):
                    n, j = r * EACH + c, column + SIDE * c
                    if starts[r] <= j < stops[r]:
                        i = first + line + SIDE * r
                        product = product_of(high[n], low[n], rows, i, keys, begin + j)
                        dp = product_of(up[n], down[n], douts, i, values, begin + j)
                        _, change = pair(
                            product * scale, dp, lse[batch, head, i], delta[batch, head, i],
                            scale, softcap,
                        )  # fmt: skip
                        changes[line + SIDE * r, j] = change
            _add_sums(changes, keys, begin, end, starts, stops, other_tile, dq[batch, head], first)


@cuda.jit
def keys_backward(  # type: ignore[no-untyped-def]
    q, dout, lse, delta, k, v, dk, dv, tasks, pieces, scale, softcap
):
    """Add the pieces' gradients to dk and dv, like k and v in float64. Here keys are own, and
    the query rows of all heads that share the KV head other. The rest as in `rows_backward`."""
    own_tile = cuda.shared.array((TILE, PADDED_CHUNK), np.float32)
    other_tile = cuda.shared.array((TILE, PADDED_CHUNK), np.float32)
    weights = cuda.shared.array((TILE, PADDED_TILE), np.float32)
    high, low = cuda.local.array(PAIRS, np.float32), cuda.local.array(PAIRS, np.float32)
    up, down = cuda.local.array(PAIRS, np.float32), cuda.local.array(PAIRS, np.float32)
    starts, stops = cuda.local.array(EACH, np.int32), cuda.local.array(EACH, np.int32)
    column, line = cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
    heads = k.shape[1]
    task, which = cuda.blockIdx.x // (k.shape[0] * heads), cuda.blockIdx.x % (k.shape[0] * heads)
    batch, kv_head = which // heads, which % heads
    group = q.shape[1] // heads
    keys, values, first = k[batch, kv_head], v[batch, kv_head], int(tasks[task, 0])
    for head in range(kv_head * group, (kv_head + 1) * group):
        rows, douts = q[batch, head], dout[batch, head]
        for at in range(tasks[task, 1], tasks[task, 2]):
            own1, end = int(pieces[at, 1]), int(pieces[at, 3])
            for begin in range(pieces[at, 2], end, TILE):
                ranges(first + line, begin, pieces, at, starts, stops)
                _products(keys, first, own1, rows, begin, end, own_tile, other_tile, high, low)
                _products(values, first, own1, douts, begin, end, own_tile, other_tile, up, down)
                for r in range(EACH):
                    for c in range(EACH):
                        n, j = r * EACH + c, column + SIDE * c
                        if starts[r] <= j < stops[r]:
                            i, row = first + line + SIDE * r, begin + j
                            product = product_of(high[n], low[n], keys, i, rows, row)
                            dp = product_of(up[n], down[n], values, i, douts, row)
                            weight, change = pair(
                                product * scale, dp, lse[batch, head, row],
                                delta[batch, head, row], scale, softcap,
                            )  # fmt: skip
                            weights[line + SIDE * r, j], up[n] = weight, change
                _add_sums(
                    weights, douts, begin, end, starts, stops, other_tile, dv[batch, kv_head], first
                )
                # The weights have been read; now the changes of the scores take their place.
                cuda.syncthreads()
                for r in range(EACH):
                    for c in range(EACH):
                        weights[line + SIDE * r, column + SIDE * c] = up[r * EACH + c]
                _add_sums(
                    weights, rows, begin, end, starts, stops, other_tile, dk[batch, kv_head], first
                )


@inline
def _products(  # type: ignore[no-untyped-def]
    own, first, own_end, other, begin, end, own_tile, other_tile, high, low
):
    """high + low `[PAIRS]` = the products of the thread's own rows and others, dims in
    chunks. Four products at a time are added to high, and what that rounds off to low (Knuth's
    two-sum)."""
    column, line = cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
    for n in range(PAIRS):
        high[n], low[n] = 0, 0
    for start in range(0, own.shape[1], CHUNK):
        cuda.syncthreads()
        load(own, first, own_end, start, own_tile, cuda.threadIdx.x)
        load(other, begin, end, start, other_tile, cuda.threadIdx.x)
        cuda.syncthreads()
        for d in range(0, CHUNK, 4):
            for r in range(EACH):
                for c in range(EACH):
                    i, j, n = line + SIDE * r, column + SIDE * c, r * EACH + c
                    part = own_tile[i, d] * other_tile[j, d]
                    part += own_tile[i, d + 1] * other_tile[j, d + 1]
                    part += own_tile[i, d + 2] * other_tile[j, d + 2]
                    part += own_tile[i, d + 3] * other_tile[j, d + 3]
                    total = high[n] + part
                    added = total - high[n]
                    low[n] += (high[n] - (total - added)) + (part - added)
                    high[n] = total


@inline
def _rescale(y, first, keeps):  # type: ignore[no-untyped-def]
    """y times keeps, by the threads that add to it. Most tiles move no maximum."""
    column, line = cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
    for r in range(EACH):
        i = line + SIDE * r
        if keeps[i] != 1:
            for d in range(column, y.shape[1], SIDE):
                y[first + i, d] *= keeps[i]


@inline
def _add_sums(  # type: ignore[no-untyped-def]
    weights, x, begin, end, starts, stops, tile, target, first
):
    """target[first + i] += Σ weights[i, j] · x[begin + j] over the j that i sees, dims in chunks.
    The first barrier also ends the writing of the weights."""
    column, line = cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
    sums = cuda.local.array(SUMS, np.float32)
    for start in range(0, x.shape[1], CHUNK):
        cuda.syncthreads()
        load(x, begin, end, start, tile, cuda.threadIdx.x)
        cuda.syncthreads()
        for n in range(SUMS):
            sums[n] = 0
        for j in range(min(TILE, end - begin)):
            for r in range(EACH):
                if starts[r] <= j < stops[r]:
                    for c in range(WIDE):
                        product = weights[line + SIDE * r, j] * tile[j, column + SIDE * c]
                        sums[r * WIDE + c] += product
        for r in range(EACH):
            for c in range(WIDE):
                d = column + SIDE * c
                if starts[r] < stops[r] and start + d < x.shape[1]:
                    i, total = line + SIDE * r, np.float64(sums[r * WIDE + c])
                    if not math.isfinite(total):
                        total = np.float64(0)
                        for j in range(starts[r], stops[r]):
                            total += np.float64(weights[i, j]) * np.float64(tile[j, d])
                    target[first + i, start + d] += total


_X, _ROWS, _SUMS = "float32[:,:,:,::1]", "float32[:,:,::1]", "float64[:,:,:,::1]"
_STATE, _WORK = "float64[:,:,::1]", "int32[:,::1], int32[:,::1], float64, float64"
#: The one signature of every kernel, whatever the problem.
SIGNATURES = {
    absorb: f"void({_X}, {_X}, {_X}, {_STATE}, {_STATE}, {_SUMS}, {_WORK})",
    rows_backward: f"void({_X}, {_X}, {_ROWS}, {_ROWS}, {_SUMS}, {_X}, {_X}, {_WORK})",
    keys_backward: f"void({_X}, {_X}, {_ROWS}, {_ROWS}, {_X}, {_X}, {_SUMS}, {_SUMS}, {_WORK})",
}
