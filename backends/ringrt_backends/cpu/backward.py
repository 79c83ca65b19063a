"""The backward driver: which tiles of one shard are computed, in which order, on what.

A task owns some blocks of keys of one KV head, with their dk and dv, for all query heads that
share it. Where several tasks share a head's dq, each has a dq of its own, added up afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringrt_backends.cpu.calls import base, call, clear, driver, inner, take
from ringrt_backends.cpu.compiled import SKEW, SQUARE
from ringrt_backends.cpu.exact import large_part
from ringrt_backends.cpu.pack import where
from ringrt_backends.cpu.spans import Spans, panel_range, runs, set_spans

#: Where the functions stand among the addresses; see `compiled.BACKWARD`.
_PROB, _PROB_MASKED, _DSCORE = range(3)
_BY_ROW, _BY_ROW_NARROW, _BY_COLUMN, _BY_COLUMN_NARROW = range(3, 7)
_VALUE_BY_ROW, _VALUE_BY_ROW_NARROW, _K_ROWS, _K_COLUMNS, _V_ROWS = range(7, 12)
_DK_ADDED, _DV_ADDED = range(12, 14)
#: Bytes of a row of weights in fp32.
_ROW = (SQUARE + SKEW) * 4


class Rows(NamedTuple):
    """What belongs to the queries, packed once a pass: addresses of q and dout as panels that are
    summed over columns `[lanes, panels, depth, panel]` and over rows `[lanes, panels, rows,
    panel]` (half the rows, in pairs); of lse in units, as the sum of two float32, and delta
    `[lanes, rows]`. `[lanes, blocks]`: whether they are `ordinary` (see `layout.ORDINARY`), and
    whether dq is still `fresh`, that is unset, for 0; `[lanes]`: q's longest row's `square`."""

    q: int
    q_columns: int
    dout: int
    dout_columns: int
    lse: int
    rest: int
    delta: int
    rows: int
    ordinary: Any
    fresh: Any
    square: Any


class Block(NamedTuple):
    """A block of keys, of one thread: addresses of K and V as rows `[keys, depth]`, K as panels
    (see `pack.Panels`), of dk and dv `[keys, row]` as sums (see `compiled.Shape`); and the sizes of
    K and V (see `pack`)."""

    k: int
    v: int
    k_columns: Any
    dk: int
    dv: int
    sizes: Any


class Scratch(NamedTuple):
    """Of one thread: addresses of weights P and their gradients dS `[keys, row]` with keys as rows
    (fp32, or bf16 in its place), of dS by pairs of keys, of a panel of P and of slopes, and of
    the largest weights of one call; and the spans of a block's queries."""

    p: int
    ds: int
    by_key: int
    tile: int
    slope: int
    top: int
    spans: Spans


class Work(NamedTuple):
    """A shard: tiles cut at blocks of rows (see `layout.Blocks`), blocks of queries [from_block,
    to_block), keys [begin, end), in how many `parts` the blocks of keys are dealt out, and query
    heads a KV head. dq's address, `[parts, lanes, dq_rows, row]` sums from the first block on.
    `left_out` `[KV lanes, blocks of keys]` is set for what is not ordinary."""

    starts: Any
    table: Any
    from_block: int
    to_block: int
    begin: int
    end: int
    parts: int
    group: int
    dq: int
    dq_rows: int
    lanes: int
    left_out: Any


class Source(NamedTuple):
    """K and V of the shard (see `pack.Source`), the address of the places of K's columns `[KV
    lanes, depth]`, and the largest peak that is ordinary."""

    k: Any
    v: Any
    places: int
    k_ordinary: np.float32
    v_ordinary: np.float32


@driver
def absorb(control, tasks, shape, at, units, scale, work, rows, source, dk, dv, block, scratch):  # type: ignore[no-untyped-def]
    """Add the gradients of the tiles, task by task until there are none left. A task is (KV lane,
    part). dk and dv, dk times `scale`: `pack.Source`s of float32, which are added to."""
    blocks = -(-(work.end - work.begin) // SQUARE)
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, part = tasks[task]
        for number in range(part, blocks, work.parts):
            if control[1] != 0:
                return
            begin = work.begin + number * SQUARE
            end = min(begin + SQUARE, work.end)
            _pack_block(shape, at, source, lane, begin, end, block)
            k_peak, v_peak = block.sizes[0, 0], block.sizes[1, 0]
            if not (k_peak <= source.k_ordinary and v_peak <= source.v_ordinary):
                work.left_out[lane, number] = 1
                continue
            for head in range(lane * work.group, lane * work.group + work.group):
                dq_bytes = work.dq_rows * shape.row * shape.sum_bytes
                dq = work.dq + (part * work.lanes + head) * dq_bytes
                _absorb_head(shape, at, units, head, begin, end, dq, work, rows, block, scratch)
            to, stride, count = where(dk, lane, begin), dk.row_stride, end - begin
            call(at[_DK_ADDED], (block.dk, to, stride, count, scale))
            to, stride = where(dv, lane, begin), dv.row_stride
            call(at[_DV_ADDED], (block.dv, to, stride, count, 1.0))


@inner
def _pack_block(shape, at, source, lane, begin, end, block):  # type: ignore[no-untyped-def]
    """Pack a block of keys, and set its dk and dv to 0, as well as the rows after it, over which a
    tile may reach."""
    block.sizes[:] = 0
    k_size, v_size, count = base(block.sizes), base(block.sizes) + 8, end - begin
    k, v = where(source.k, lane, begin), where(source.v, lane, begin)
    place, panels = source.places + lane * shape.depth * 8, block.k_columns
    call(at[_K_ROWS], (k, source.k.row_stride, count, block.k, place, k_size))
    stride = panels.rows * panels.panel
    call(at[_K_COLUMNS], (k, source.k.row_stride, count, panels.address, stride, k_size))
    call(at[_V_ROWS], (v, source.v.row_stride, count, block.v, v_size))
    clear(block.k + count * shape.depth * 4, shape.rows * shape.depth * 4)
    clear(block.v + count * shape.value_depth * 4, shape.rows * shape.value_depth * 4)
    clear(block.dk, (count + shape.rows) * shape.row * shape.sum_bytes)
    clear(block.dv, (count + shape.rows) * shape.value_row * shape.sum_bytes)


@inner
def _absorb_head(shape, at, units, head, begin, end, dq, work, rows, block, scratch):  # type: ignore[no-untyped-def]
    """All blocks of one head's queries against one block of keys."""
    for q_block in range(work.from_block, work.to_block):
        if not rows.ordinary[head, q_block]:
            continue
        block_bytes = SQUARE * shape.row * shape.sum_bytes
        to = dq + (q_block - work.from_block) * block_bytes
        if rows.fresh[head, q_block]:
            clear(to, block_bytes)
            rows.fresh[head, q_block] = 0
        for index in range(work.starts[q_block], work.starts[q_block + 1]):
            tile = work.table[index]
            if tile[2] < end and tile[3] > begin:
                _absorb_tile(
                    shape, at, units, tile, head, q_block * SQUARE, begin, end, to, rows, block,
                    scratch,
                )  # fmt: skip


@inner
def _absorb_tile(shape, at, units, tile, lane, q0, begin, end, dq, rows, block, scratch):  # type: ignore[no-untyped-def]
    low, high = set_spans(tile, q0, begin, end, shape, scratch.spans)
    if low >= high:
        return
    for panel in range(SQUARE // shape.panel):
        bottom, top = panel_range(panel, shape.rows, scratch.spans, 0, end - begin)
        if bottom < top:
            _weigh(shape, at, units, lane, q0, panel, bottom, top, rows, block, scratch)
    lane_bytes = lane * rows.rows * shape.panel * (2 if shape.pairs else 4)
    b = rows.dout_columns + lane_bytes * shape.value_panels
    _add_keys(
        shape, at[_VALUE_BY_ROW], at[_VALUE_BY_ROW_NARROW], scratch.p, b, shape.value_panels,
        shape.value_row, block.dv, tile, q0, begin, end, rows.rows,
    )  # fmt: skip
    b = rows.q_columns + lane_bytes * shape.panels
    _add_keys(
        shape, at[_BY_ROW], at[_BY_ROW_NARROW], scratch.ds, b, shape.panels,
        shape.row, block.dk, tile, q0, begin, end, rows.rows,
    )  # fmt: skip
    _add_queries(shape, at, dq, end - begin, block, scratch)


@inner
def _weigh(shape, at, units, lane, q0, panel, bottom, top, rows, block, scratch):  # type: ignore[no-untyped-def]
    """P and dS of one panel of queries and the keys [bottom, top)."""
    column = panel * shape.panel
    at_panel = (lane * rows.rows + q0 + column) * 4
    q, dout = rows.q + at_panel * shape.depth, rows.dout + at_panel * shape.value_depth
    lse, rest, delta = rows.lse + at_panel, rows.rest + at_panel, rows.delta + at_panel
    first, last = base(scratch.spans.first) + column * 4, base(scratch.spans.last) + column * 4
    large = large_part(units.least_part, units.part_factor, rows.square[lane], block.sizes[0, 1])
    groups = -(-(top - bottom) // shape.rows)
    full, rest_of = runs(panel, bottom, groups, shape.rows, scratch.spans)
    for start, stop in ((0, full), (full, rest_of), (rest_of, groups)):
        if start == stop:
            continue
        key, count = bottom + start * shape.rows, stop - start
        k, v = block.k + key * shape.depth * 4, block.v + key * shape.value_depth * 4
        by_key = scratch.by_key + key // 2 * _ROW + column * 4
        if shape.pairs:
            to = (key * (SQUARE + SKEW) + column) * 2
            p, narrow, ds = scratch.tile, scratch.p + to, scratch.ds + to
        else:
            to = (key * (SQUARE + SKEW) + column) * 4
            p, narrow, ds = scratch.p + to, scratch.p + to, scratch.ds + to
        common = scratch.slope, scratch.top, large
        weigh = (k, q, p, narrow, count, units.scale, lse, rest, units.cap, *common)
        if stop == rest_of and start == full:
            call(at[_PROB], weigh)
        else:
            call(at[_PROB_MASKED], (*weigh, first, last, key))
        call(at[_DSCORE], (v, dout, ds, p, count, delta, by_key, *common))


@inner
def _add_keys(shape, wide, narrow, a, b, count, width, c, tile, q0, begin, end, b_rows):  # type: ignore[no-untyped-def]
    """dv += Pᵀ dO, or dk += dSᵀ Q: for each group of rows of keys over the queries that see it. The
    function is `wide` or, for half a panel, `narrow`; of B there are `count` panels of `b_rows`
    rows, of C rows of `width`. Each reads a part of the next panel of B ahead."""
    each, row_bytes = 2 if shape.pairs else 1, shape.panel * 4
    panel_bytes = b_rows // each * row_bytes
    for column in range(count):
        function = narrow if column * shape.panel + shape.panel > width else wide
        for key in range(0, end - begin, shape.rows):
            last_key = min(begin + key + shape.rows, end)
            bottom, top = _rows_that_see(tile, q0, begin + key, last_key)
            bottom, top = bottom // each, (top + each - 1) // each
            if bottom < top:
                from_a = a + key * (_ROW // each) + bottom * 4
                panel = b + column * panel_bytes
                from_b = panel + (q0 // each + bottom) * row_bytes
                to = c + (key * width + column * shape.panel) * shape.sum_bytes
                later = panel + panel_bytes + (q0 + key) // each * row_bytes
                call(function, (from_a, from_b, to, top - bottom, later))


@inner
def _rows_that_see(tile, q0, begin, end):  # type: ignore[no-untyped-def]
    """The queries, counted from q0, that see any of the keys [begin, end) in a band tile. Row a
    of it sees key j where j + lower <= a <= j + upper."""
    row0, row1, key0, key1, lower, upper = tile
    begin, end = max(begin, key0) - key0, min(end, key1) - key0
    if begin >= end:
        return 0, 0
    first, last = max(0, begin + lower), min(row1 - row0, end + upper)
    return max(0, first + row0 - q0), min(SQUARE, last + row0 - q0)


@inner
def _add_queries(shape, at, dq, keys, block, scratch):  # type: ignore[no-untyped-def]
    """dq += dS K, for each group of rows of queries over the keys that it sees. Each reads a part
    of the next panel of K ahead."""
    each, row_bytes = 2 if shape.pairs else 1, shape.panel * 4
    panel_bytes = block.k_columns.rows * row_bytes
    ds = scratch.by_key if shape.pairs else scratch.ds
    lows, highs = scratch.spans.low, scratch.spans.high
    for column in range(shape.panels):
        narrow = column * shape.panel + shape.panel > shape.row
        function = at[_BY_COLUMN_NARROW if narrow else _BY_COLUMN]
        panel = block.k_columns.address + column * panel_bytes
        for group in range(len(lows)):
            bottom, top = max(lows[group], 0), min(highs[group], keys)
            bottom, top = bottom // each, (top + each - 1) // each
            if bottom < top:
                row = group * shape.rows
                a, b = ds + bottom * _ROW + row * 4, panel + bottom * row_bytes
                c = dq + (row * shape.row + column * shape.panel) * shape.sum_bytes
                later = panel + panel_bytes + row // each * row_bytes
                call(function, (a, b, c, top - bottom, later))


@driver
def finish(control, tasks, shape, scale, rounding, rows, dq, packed, heads, out, row_bytes):  # type: ignore[no-untyped-def]
    """scale · dq as `[batch, rows, heads, dim]` at the address out, by the function at `rounding`;
    dq at its address `[lanes, packed.rows, row]`. A task is (lane, block)."""
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, block = tasks[task]
        batch, head = lane // heads, lane % heads
        row_size = shape.row * shape.sum_bytes
        own = dq + (lane * packed.rows + block * SQUARE) * row_size
        if packed.fresh[lane, block]:
            clear(own, SQUARE * row_size)
        for i in range(block * SQUARE, min(block * SQUARE + SQUARE, rows)):
            source = own + (i - block * SQUARE) * row_size
            call(rounding, (source, out + ((batch * rows + i) * heads + head) * row_bytes, scale))
