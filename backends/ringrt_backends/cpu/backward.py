"""The backward driver: which tiles of one shard are computed, in which order, on what.

A task owns some blocks of keys of one KV head, with their dk and dv, for all query heads that
share it. Where several tasks share a head's dq, each has a dq of its own, added up afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from ringrt_backends.cpu.calls import base, call, take
from ringrt_backends.cpu.careful import absorb_backward_block
from ringrt_backends.cpu.compiled import SKEW, SQUARE
from ringrt_backends.cpu.pack import columns, read_row
from ringrt_backends.cpu.spans import full_range, number_of, panel_range, set_spans, set_unions

_jit = numba.njit(nogil=True, cache=True, error_model="numpy")

#: Bytes of a row of weights in fp32.
_ROW = (SQUARE + SKEW) * 4


class Rows(NamedTuple):
    """What belongs to the queries, packed once a pass: q and dout as panels that are summed over
    columns `[lanes, panels, depth, panel]` and over rows `[lanes, panels, rows, panel]` (half the
    rows, in pairs), their peaks `[lanes, blocks]`; per row `[lanes, rows]` lse in units, as the
    sum of two float32, and delta; a block's largest delta `[lanes, blocks]`."""

    q: Any
    q_columns: Any
    q_peaks: Any
    dout: Any
    dout_columns: Any
    dout_peaks: Any
    lse: Any
    rest: Any
    delta: Any
    delta_peaks: Any


class Exact(NamedTuple):
    """The same for the careful path: lse and delta `[lanes, rows]` float64, scale and softcap."""

    lse: Any
    delta: Any
    scale: float
    softcap: float


class Block(NamedTuple):
    """A block of keys, of one thread: K and V as rows `[keys, depth]` and K as panels `[panels,
    keys, panel]`, dk and dv `[keys, row]` float64, and their peaks uint32 (K's, V's)."""

    k: Any
    v: Any
    k_columns: Any
    dk: Any
    dv: Any
    peaks: Any


class Scratch(NamedTuple):
    """Of one thread: a row of K or V twice, weights P and their gradients dS `[keys, row]` with
    keys as rows (in fp32, or bf16 in the memory of fp32), dS by pairs of keys, one tile of P and of slopes, and the
    spans of a block's queries with their unions over groups of rows."""

    one: Any
    two: Any
    p: Any
    ds: Any
    by_key: Any
    tile: Any
    slope: Any
    first: Any
    last: Any
    low: Any
    high: Any


class Work(NamedTuple):
    """A shard: tiles cut at blocks of rows (see `tiled.Blocks`), blocks of queries [from_block,
    to_block), keys [begin, end), in how many `parts` the blocks of keys are dealt out, query heads
    a KV head, and the batch and heads of dk and dv."""

    starts: Any
    table: Any
    from_block: int
    to_block: int
    begin: int
    end: int
    parts: int
    group: int


class Factors(NamedTuple):
    """Exponents are `scale` · product in units, or `scale` · tanh(`cap` · product); products are
    safe below `limit`."""

    scale: np.float32
    cap: np.float32
    limit: float


@_jit
def absorb(control, tasks, shape, at, factors, exact, work, rows, k, v, orders, dk, dv, dq, block, scratch):  # type: ignore[no-untyped-def]
    """Add the gradients of the tiles, task by task until there are none left. A task is (KV lane,
    part). dk and dv `[batch, keys, heads, dim]` float32; dq `[parts, lanes, rows, row]`, of the
    rows of the first block on."""
    keys_of_all = range(work.begin, work.end, SQUARE)
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, part = tasks[task]
        for number in range(part, len(keys_of_all), work.parts):
            if control[1] != 0:
                return
            begin = work.begin + number * SQUARE
            end = min(begin + SQUARE, work.end)
            _pack_block(shape, k, v, orders, lane, begin, end, block, scratch)
            for head in range(lane * work.group, lane * work.group + work.group):
                for q_block in range(work.from_block, work.to_block):
                    for index in range(work.starts[q_block], work.starts[q_block + 1]):
                        tile = work.table[index]
                        if tile[2] < end and tile[3] > begin:
                            row = (q_block - work.from_block) * SQUARE
                            to = dq[part, head, row : row + SQUARE]
                            _absorb_tile(
                                shape, at, factors, exact, tile, head, q_block, begin, end,
                                rows, to, block, scratch,
                            )  # fmt: skip
            _add_block(shape, k.heads, lane, begin, end, exact.scale, dk, dv, block)


@_jit
def _pack_block(shape, k, v, orders, lane, begin, end, block, scratch):  # type: ignore[no-untyped-def]
    block.peaks[:] = 0
    k_peak, v_peak = base(block.peaks), base(block.peaks) + 4
    one = base(scratch.one)
    scratch.one[:] = 0
    order = base(orders) + lane * shape.depth * 8
    for row in range(end - begin):
        to = base(block.v) + row * shape.value_depth * 4
        read_row(v, lane, begin + row, to, v_peak)
        read_row(k, lane, begin + row, one, k_peak)
        to = base(block.k) + row * shape.depth * 4
        call(k.reorder, (one, to, order, shape.depth))
    # A tile of rows may reach over the end.
    block.k[end - begin :] = 0
    block.v[end - begin :] = 0
    zero = np.uint32(0)
    columns(k, lane, begin, 0, end - begin, zero, scratch.one, scratch.two, block.k_columns, k_peak)
    block.dk[:] = 0
    block.dv[:] = 0


@_jit
def _add_block(shape, heads, lane, begin, end, scale, dk, dv, block):  # type: ignore[no-untyped-def]
    batch, head = lane // heads, lane % heads
    for row in range(end - begin):
        for d in range(shape.dim):
            dk[batch, begin + row, head, d] += block.dk[row, d] * scale
        for d in range(shape.value_dim):
            dv[batch, begin + row, head, d] += block.dv[row, d]


@_jit
def _absorb_tile(shape, at, factors, exact, tile, lane, q_block, begin, end, rows, dq, block, scratch):  # type: ignore[no-untyped-def]
    q0 = q_block * SQUARE
    low, high = set_spans(tile, q0, begin, end, scratch.first, scratch.last)
    if low >= high:
        return
    q_peak, dout_peak = number_of(rows.q_peaks[lane, q_block]), number_of(rows.dout_peaks[lane, q_block])
    peaks = block.peaks.view(np.float32)
    k_peak, v_peak = number_of(peaks[0]), number_of(peaks[1])
    change = dout_peak * v_peak * shape.value_dim + number_of(rows.delta_peaks[lane, q_block])
    largest = max(q_peak * k_peak, max(change, dout_peak) * max(q_peak, k_peak, 1.0))
    if not largest < factors.limit:
        absorb_backward_block(
            shape, exact, tile, lane, q0, SQUARE, begin, end - begin, block, rows, dq
        )
        return
    set_unions(scratch.first, scratch.last, shape.rows, scratch.low, scratch.high)
    for panel in range(SQUARE // shape.panel):
        bottom, top = panel_range(panel, shape, scratch.low, scratch.high, 0, end - begin)
        if bottom < top:
            bottom = bottom // shape.rows * shape.rows
            _weigh(shape, at, factors, lane, q0, panel, bottom, top, rows, block, scratch)
    _add_keys(shape, at, tile, lane, q0, begin, end, rows, block, scratch)
    _add_queries(shape, at, dq, end - begin, block, scratch)


@_jit
def _weigh(shape, at, factors, lane, q0, panel, bottom, top, rows, block, scratch):  # type: ignore[no-untyped-def]
    """P and dS of one panel of queries and the keys [bottom, top)."""
    column = panel * shape.panel
    full_from, full_to = full_range(panel, shape, scratch.first, scratch.last)
    at_panel = q0 // shape.panel + panel
    q = base(rows.q) + (lane * rows.q.shape[1] + at_panel) * shape.depth * shape.panel * 4
    dout = base(rows.dout) + (lane * rows.dout.shape[1] + at_panel) * shape.value_depth * shape.panel * 4
    at_row = (lane * rows.lse.shape[1] + q0 + column) * 4
    lse, rest, delta = base(rows.lse) + at_row, base(rows.rest) + at_row, base(rows.delta) + at_row
    first, last = base(scratch.first) + column * 4, base(scratch.last) + column * 4
    size = 2 if shape.pairs else 4
    for key in range(bottom, top, shape.rows):
        k = base(block.k) + key * shape.depth * 4
        v = base(block.v) + key * shape.value_depth * 4
        to = (key * (SQUARE + SKEW) + column) * size
        narrow = base(scratch.p) + to
        p = base(scratch.tile) if shape.pairs else narrow
        slope = base(scratch.slope)
        full = full_from <= key and key + shape.rows <= full_to
        if factors.cap > 0 and full:
            call(at[0], (k, q, p, narrow, factors.scale, lse, rest, factors.cap, slope))
        elif factors.cap > 0:
            call(at[1], (k, q, p, narrow, factors.scale, lse, rest, factors.cap, slope, first, last, key))
        elif full:
            call(at[0], (k, q, p, narrow, factors.scale, lse, rest))
        else:
            call(at[1], (k, q, p, narrow, factors.scale, lse, rest, first, last, key))
        ds = base(scratch.ds) + to
        by_key = base(scratch.by_key) + key // 2 * _ROW + column * 4
        if factors.cap > 0:
            call(at[2], (v, dout, ds, p, delta, by_key, slope))
        else:
            call(at[2], (v, dout, ds, p, delta, by_key))


@_jit
def _add_keys(shape, at, tile, lane, q0, begin, end, rows, block, scratch):  # type: ignore[no-untyped-def]
    """dv += Pᵀ dO and dk += dSᵀ Q, for each group of rows of keys over the queries that see it."""
    each = 2 if shape.pairs else 1
    row_bytes = _ROW // each
    q_rows, dout_rows = rows.q_columns.shape[2], rows.dout_columns.shape[2]
    for values in (True, False):
        count, width = (shape.value_panels, shape.value_row) if values else (shape.panels, shape.row)
        a = base(scratch.p) if values else base(scratch.ds)
        panel_rows = dout_rows if values else q_rows
        b = base(rows.dout_columns) if values else base(rows.q_columns)
        b += lane * count * panel_rows * shape.panel * 4
        c = base(block.dv) if values else base(block.dk)
        for column in range(count):
            narrow = column * shape.panel + shape.panel > width
            function = at[(8 if narrow else 7) if values else (4 if narrow else 3)]
            for key in range(0, end - begin, shape.rows):
                bottom, top = _rows_that_see(tile, q0, begin + key, min(begin + key + shape.rows, end))
                bottom, top = bottom // each, (top + each - 1) // each
                if bottom >= top:
                    continue
                call(
                    function,
                    (
                        a + key * row_bytes + bottom * 4,
                        b + (column * panel_rows + q0 // each + bottom) * shape.panel * 4,
                        c + (key * width + column * shape.panel) * 8,
                        top - bottom,
                    ),
                )


@_jit
def _rows_that_see(tile, q0, begin, end):  # type: ignore[no-untyped-def]
    """The queries, counted from q0, that see any of the keys [begin, end) in a band tile. Row a
    of it sees key j where j + lower <= a <= j + upper."""
    row0, row1, key0, key1, lower, upper = tile
    begin, end = max(begin, key0) - key0, min(end, key1) - key0
    if begin >= end:
        return 0, 0
    first, last = max(0, begin + lower), min(row1 - row0, end + upper)
    return max(0, first + row0 - q0), min(SQUARE, last + row0 - q0)


@_jit
def _add_queries(shape, at, dq, keys, block, scratch):  # type: ignore[no-untyped-def]
    """dq += dS K, for each group of rows of queries over the keys that it sees."""
    each = 2 if shape.pairs else 1
    ds = base(scratch.by_key) if shape.pairs else base(scratch.ds)
    k_rows = block.k_columns.shape[1]
    for column in range(shape.panels):
        function = at[6 if column * shape.panel + shape.panel > shape.row else 5]
        for group in range(len(scratch.low)):
            bottom, top = max(scratch.low[group], 0), min(scratch.high[group], keys)
            bottom, top = bottom // each, (top + each - 1) // each
            if bottom >= top:
                continue
            call(
                function,
                (
                    ds + bottom * _ROW + group * shape.rows * 4,
                    base(block.k_columns) + (column * k_rows + bottom) * shape.panel * 4,
                    base(dq) + (group * shape.rows * shape.row + column * shape.panel) * 8,
                    top - bottom,
                ),
            )


@_jit
def finish(control, tasks, shape, scale, rounding, rows, dq, heads, out):  # type: ignore[no-untyped-def]
    """dq as `[batch, rows, heads, dim]`, by the function at `rounding`. A task is (lane, block)."""
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, block = tasks[task]
        batch, head = lane // heads, lane % heads
        for i in range(block * SQUARE, min(block * SQUARE + SQUARE, rows)):
            source = base(dq) + (lane * dq.shape[1] + i) * shape.row * 8
            target = base(out) + ((batch * rows + i) * heads + head) * out.strides[2]
            call(rounding, (source, target, shape.dim, scale))
