"""The forward driver: which tiles of one shard are computed, in which order, on what."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from ringrt_backends.cpu.calls import base, call, take
from ringrt_backends.cpu.careful import absorb_block
from ringrt_backends.cpu.compiled import KEYS, QUERIES, SKEW
from ringrt_backends.cpu.spans import full_range, number_of, panel_range, set_spans, set_unions

_jit = numba.njit(nogil=True, cache=True, error_model="numpy")

#: Bytes of a row of scores.
_ROW = (QUERIES + SKEW) * 4


class Keys(NamedTuple):
    """A chunk of K and V, packed: k `[slots, rows, depth]`, v `[slots, panels, rows, panel]`
    (half the rows, in pairs), and peaks `[slots, parts]` of `part` rows. It holds the keys from
    `begin` to `end` of the shard."""

    k: Any
    v: Any
    k_peaks: Any
    v_peaks: Any
    part: int
    begin: int
    end: int


class Queries(NamedTuple):
    """q packed as `[lanes, panels, depth, panel]`, its peaks `[lanes, blocks]`, and the state:
    m and z `[lanes, rows]`, y `[lanes, rows, value_row]`, float64, m in units of `unit`."""

    q: Any
    peaks: Any
    m: Any
    z: Any
    y: Any


class Scores(NamedTuple):
    """How scores come from products: exponents of 2 are `scale` · product in units of `unit`,
    or with a cap `scale` · tanh(`cap` · product). A product is safe below `limit`. `product_scale`
    and `softcap` (0 is off) say the same in natural units, for the careful path."""

    scale: np.float32
    cap: np.float32
    unit: float
    limit: float
    product_scale: float
    softcap: float


class Scratch(NamedTuple):
    """Of one thread: scores `[keys + a tile, row]`, weights likewise (the same for fp32), the
    spans of a block's queries int32, their unions over groups of rows, and a panel's running
    maximum and a block's alpha float32."""

    scores: Any
    weights: Any
    first: Any
    last: Any
    low: Any
    high: Any
    top: Any
    alpha: Any


@_jit
def absorb(control, tasks, shape, at, scores, starts, table, keys, queries, scratch):  # type: ignore[no-untyped-def]
    """Absorb the tiles into the state, task by task until there are none left. A task is (lane
    of q, slot of the keys, block of queries); the block's tiles are table[starts[block] :
    starts[block + 1]]."""
    scratch.top[:] = -np.inf
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, slot, block = tasks[task]
        for index in range(starts[block], starts[block + 1]):
            _absorb_tile(shape, at, scores, table[index], lane, slot, block, keys, queries, scratch)


@_jit
def _absorb_tile(shape, at, scores, tile, lane, slot, block, keys, queries, scratch):  # type: ignore[no-untyped-def]
    q0 = block * QUERIES
    first, last = scratch.first, scratch.last
    low, high = set_spans(tile, q0, keys.begin, keys.end, first, last)
    if low >= high:
        return
    set_unions(first, last, shape.rows, scratch.low, scratch.high)
    q_peak = number_of(queries.peaks[lane, block])
    for begin in range(low // 2 * 2, high, KEYS):
        end = min(begin + KEYS, high)
        k_peak, v_peak = 0.0, 0.0
        for part in range(begin // keys.part, (end - 1) // keys.part + 1):
            k_peak = max(k_peak, number_of(keys.k_peaks[slot, part]))
            v_peak = max(v_peak, number_of(keys.v_peaks[slot, part]))
        if q_peak * k_peak < scores.limit and v_peak < scores.limit:
            _absorb_block(shape, at, scores, lane, slot, q0, begin, end, keys, queries, scratch)
        else:
            absorb_block(shape, scores, tile, lane, slot, q0, QUERIES, begin, end, keys, queries)


@_jit
def _absorb_block(shape, at, scores, lane, slot, q0, begin, end, keys, queries, scratch):  # type: ignore[no-untyped-def]
    """One block of queries and of keys [begin, end): scores and softmax panel by panel of the
    queries, then all value sums."""
    low, high = scratch.low, scratch.high
    for panel in range(QUERIES // shape.panel):
        bottom, top = panel_range(panel, shape, low, high, begin, end)
        if bottom < top:
            _weigh(shape, at, scores, lane, slot, q0, panel, begin, bottom, top, keys, queries, scratch)
    keys_each = 2 if shape.pairs else 1
    y = base(queries.y) + (lane * queries.y.shape[1] + q0) * shape.value_row * 8
    v_panel = keys.v.shape[2] * shape.panel * 4
    v = base(keys.v) + slot * shape.value_panels * v_panel
    for column in range(shape.value_panels):
        narrow = column * shape.panel + shape.panel > shape.value_row
        for group in range(len(low)):
            bottom, top = max(low[group], begin), min(high[group], end)
            if bottom >= top:
                continue
            row = (bottom - begin) // keys_each
            depth = (top - begin + keys_each - 1) // keys_each - row
            call(
                at[4 if narrow else 3],
                (
                    base(scratch.weights) + row * _ROW + group * shape.rows * 4,
                    v + column * v_panel + (begin // keys_each + row) * shape.panel * 4,
                    y + (group * shape.rows * shape.value_row + column * shape.panel) * 8,
                    depth,
                    base(scratch.alpha) + group * shape.rows * 4,
                ),
            )


@_jit
def _weigh(shape, at, scores, lane, slot, q0, panel, begin, bottom, top, keys, queries, scratch):  # type: ignore[no-untyped-def]
    """Scores and weights of one panel of queries and the keys [bottom, top)."""
    column = panel * shape.panel
    full_from, full_to = full_range(panel, shape, scratch.first, scratch.last)
    q_panel = q0 // shape.panel + panel
    q = base(queries.q) + (lane * queries.q.shape[1] + q_panel) * shape.depth * shape.panel * 4
    k = base(keys.k) + slot * keys.k.shape[1] * shape.depth * 4
    s = base(scratch.scores) + (bottom - begin) * _ROW + column * 4
    running = base(scratch.top)
    for key in range(bottom, top, shape.rows):
        a, to = k + key * shape.depth * 4, s + (key - bottom) * _ROW
        if full_from <= key and key + shape.rows <= full_to:
            if scores.softcap > 0:
                call(at[0], (a, q, to, running, scores.cap))
            else:
                call(at[0], (a, q, to, running))
        else:
            span = (base(scratch.first) + column * 4, base(scratch.last) + column * 4, key)
            if scores.softcap > 0:
                call(at[1], (a, q, to, running, scores.cap, span[0], span[1], span[2]))
            else:
                call(at[1], (a, q, to, running, span[0], span[1], span[2]))
    keys_each = 2 if shape.pairs else 1
    row = lane * queries.m.shape[1] + q0 + column
    call(
        at[2],
        (
            s,
            base(scratch.weights) + (bottom - begin) // keys_each * _ROW + column * 4,
            (top - bottom + keys_each - 1) // keys_each,
            scores.scale,
            running,
            base(queries.m) + row * 8,
            base(queries.z) + row * 8,
            base(scratch.alpha) + column * 4,
        ),
    )


@_jit
def finish(control, tasks, shape, unit, rounding, rows, queries, heads, out, lse):  # type: ignore[no-untyped-def]
    """out `[batch, rows, heads, value_dim]`, by the function at `rounding`, and lse `[lanes,
    rows]`. A task is (lane, block)."""
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, block = tasks[task]
        batch, head = lane // heads, lane % heads
        for i in range(block * QUERIES, min(block * QUERIES + QUERIES, rows)):
            z = queries.z[lane, i]
            factor = 0.0 if z == 0 else 1 / z
            lse[lane, i] = -np.inf if z == 0 else (queries.m[lane, i] + np.log2(z)) * unit
            source = base(queries.y) + (lane * queries.y.shape[1] + i) * shape.value_row * 8
            target = base(out) + ((batch * rows + i) * heads + head) * out.strides[2]
            call(rounding, (source, target, shape.value_dim, factor))
