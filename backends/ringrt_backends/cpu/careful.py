"""Blocks that the compiled kernels are not for: where products may overflow float32, or where
there is NaN or inf, which must not reach a row that does not see it. Such a block is unpacked
and given to the plain kernels, which touch nothing but what is seen. Slow, and rare."""

from __future__ import annotations

import math

import numba
import numpy as np

from ringrt_backends.cpu.plain_kernel import BLOCK, absorb, absorb_backward

_jit = numba.njit(nogil=True, cache=True, error_model="numpy")

#: The largest and smallest number that m may be as float32.
_RANGE = float(np.finfo(np.float32).max)


@_jit
def to_floats(words, pairs, out):  # type: ignore[no-untyped-def]
    """A packed row of K, or a column of a panel, as fp32."""
    for d in range(len(out)):
        if pairs:
            word = words[d // 2]
            bits = word & np.uint32(0xFFFF0000) if d % 2 else word << np.uint32(16)
        else:
            bits = words[d]
        out[d] = np.uint32(bits)


@_jit
def rows_of(packed, shape, begin, end, dim):  # type: ignore[no-untyped-def]
    """Rows [begin, end) of operands A `[rows, depth]`, fp32 `[rows, dim]`."""
    out = np.zeros((end - begin, dim), np.uint32)
    for i in range(begin, end):
        to_floats(packed[i], shape.pairs, out[i - begin])
    return out.view(np.float32)


@_jit
def turned_rows(panels, shape, begin, end, dim):  # type: ignore[no-untyped-def]
    """Rows [begin, end) of transposed panels `[panels, depth, panel]`, fp32 `[rows, dim]`."""
    out = np.zeros((end - begin, dim), np.uint32)
    for i in range(begin, end):
        to_floats(panels[i // shape.panel, :, i % shape.panel], shape.pairs, out[i - begin])
    return out.view(np.float32)


@_jit
def column_rows(panels, shape, begin, end, dim):  # type: ignore[no-untyped-def]
    """Rows [begin, end) of column panels `[panels, rows, panel]`, fp32 `[rows, dim]`."""
    out = np.zeros((end - begin, dim), np.uint32)
    for i in range(begin, end):
        for d in range(dim):
            p, j = d // shape.panel, d % shape.panel
            if shape.pairs:
                word = panels[p, i // 2, j]
                out[i - begin, d] = word & np.uint32(0xFFFF0000) if i % 2 else word << np.uint32(16)
            else:
                out[i - begin, d] = panels[p, i, j]
    return out.view(np.float32)


@_jit
def blocked(x):  # type: ignore[no-untyped-def]
    """`[keys, dim]` as `[blocks, dim, BLOCK]`, as the plain kernels take K."""
    keys, dim = x.shape
    panels = np.zeros((-(-keys // BLOCK), dim, BLOCK), x.dtype)
    for j in range(keys):
        for d in range(dim):
            panels[j // BLOCK, d, j % BLOCK] = x[j, d]
    return panels


@_jit
def cut(tile, row0, row1, key0, key1):  # type: ignore[no-untyped-def]
    """The part of a band tile in rows [row0, row1) and keys [key0, key1): its ranges, and the
    band counted from their beginnings."""
    a, b = max(tile[0], row0), min(tile[1], row1)
    c, d = max(tile[2], key0), min(tile[3], key1)
    shift = (a - tile[0]) - (c - tile[2])
    return a, b, c, d, tile[4] - shift, tile[5] - shift


@_jit
def absorb_block(shape, scores, tile, lane, slot, q0, rows, begin, end, keys, queries):  # type: ignore[no-untyped-def]
    """As `ringrt_backends.cpu.forward` absorbs a block, for one tile of it."""
    first = keys.begin
    r0, r1, c0, c1, lower, upper = cut(tile, q0, q0 + rows, first + begin, first + end)
    if r0 >= r1 or c0 >= c1:
        return
    q = turned_rows(queries.q[lane], shape, r0, r1, shape.dim)
    k = rows_of(keys.k[slot], shape, c0 - first, c1 - first, shape.dim)
    v = column_rows(keys.v[slot], shape, c0 - first, c1 - first, shape.value_dim)
    m, z = queries.m[lane, r0:r1] * scores.unit, queries.z[lane, r0:r1].copy()
    y = queries.y[lane, r0:r1, : shape.value_dim].copy()
    absorb(q, blocked(k), v, m, z, y, lower, upper, scores.product_scale, scores.softcap)
    for i in range(r1 - r0):
        _put_back(queries, lane, r0 + i, m[i], z[i], y[i], scores.unit)


@_jit
def _put_back(queries, lane, row, m, z, y, unit):  # type: ignore[no-untyped-def]
    """The state of a row, its maximum again in units, and a float32 number if it can be."""
    new, factor = m / unit, 1.0
    if abs(new) <= _RANGE:
        new = np.float64(np.float32(new))
        factor = math.exp(m - new * unit)
    queries.m[lane, row], queries.z[lane, row] = new, z * factor
    for d in range(len(y)):
        queries.y[lane, row, d] = y[d] * factor


@_jit
def absorb_backward_block(shape, exact, tile, lane, q0, rows, key0, keys, block, packed, dq):  # type: ignore[no-untyped-def]
    """As `ringrt_backends.cpu.backward` adds the gradients of a block of queries and keys, for one
    tile of it."""
    r0, r1, c0, c1, lower, upper = cut(tile, q0, q0 + rows, key0, key0 + keys)
    if r0 >= r1 or c0 >= c1:
        return
    q = column_rows(packed.q_columns[lane], shape, r0, r1, shape.dim)
    dout = column_rows(packed.dout_columns[lane], shape, r0, r1, shape.value_dim)
    k = column_rows(block.k_columns, shape, c0 - key0, c1 - key0, shape.dim)
    v = rows_of(block.v, shape, c0 - key0, c1 - key0, shape.value_dim)
    dq_part, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    absorb_backward(
        q, dout, exact.lse[lane, r0:r1], exact.delta[lane, r0:r1], dq_part, k, v,
        blocked(k), blocked(v), dk, dv, lower, upper, exact.scale, exact.softcap,
    )  # fmt: skip
    # The scale is multiplied in at the end.
    for d in range(shape.dim):
        for i in range(r1 - r0):
            dq[r0 - q0 + i, d] += dq_part[i, d] / exact.scale
        for j in range(c1 - c0):
            block.dk[c0 - key0 + j, d] += dk[j, d] / exact.scale
    for j in range(c1 - c0):
        for d in range(shape.value_dim):
            block.dv[c0 - key0 + j, d] += dv[j, d]
