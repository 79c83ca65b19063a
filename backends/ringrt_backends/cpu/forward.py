"""The forward driver: which tiles of one shard are computed, in which order, on what. Of most
arrays it knows the address only, for what reads them are the compiled kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringrt_backends.cpu.calls import base, call, clear, driver, inner, take
from ringrt_backends.cpu.compiled import KEYS, QUERIES, SKEW, SQUARE
from ringrt_backends.cpu.exact import large_part
from ringrt_backends.cpu.spans import Spans, panel_range, runs, set_spans

#: Where the functions stand among the addresses; see `compiled.FORWARD`.
_SCORE, _SCORE_MASKED, _SOFT, _VALUES, _VALUES_NARROW, _MEND = range(6)
#: Bytes of a row of scores.
_ROW = (QUERIES + SKEW) * 4


class Keys(NamedTuple):
    """A chunk of K and V, packed: addresses of k `[slots, k_rows, depth]` and v `[slots, panels,
    v_rows, panel]`. It holds the keys from `begin` to `end` of the shard. `ordinary` `[slots,
    parts]`, of `part` keys each; see `layout.ORDINARY`. `square` `[slots, blocks]`, of SQUARE each:
    that of the longest row of K."""

    k: int
    v: int
    k_rows: int
    v_rows: int
    begin: int
    end: int
    part: int
    ordinary: Any
    square: Any


class Queries(NamedTuple):
    """Addresses of q `[lanes, panels, depth, panel]` and of the state: m and z `[lanes, rows]` and
    float64, m in units (see `layout.Units`) and a float32 number unless it is beyond these; y
    `[lanes, rows, value_row]`, sums (see `compiled.Shape`). `[lanes, blocks]`: whether q is
    `ordinary`, and whether y is still `fresh`, that is unset, for 0; `[lanes]`: the `square` of
    the longest row."""

    q: int
    panels: int
    m: int
    z: int
    y: int
    rows: int
    ordinary: Any
    fresh: Any
    square: Any


class Scratch(NamedTuple):
    """Of one thread: addresses of scores `[keys + a tile, row]`, weights likewise (the same for
    fp32), a panel's running maximum and a block's alpha, float32, and notes, of `note_bytes` each
    (see `mend_ir`); marks of these, int64; and the spans of a block's queries."""

    scores: int
    weights: int
    top: int
    alpha: int
    notes: int
    note_bytes: int
    marks: Any
    spans: Spans


@driver
def absorb(control, tasks, shape, at, units, starts, table, keys, queries, scratch):  # type: ignore[no-untyped-def]
    """Absorb the tiles into the state, task by task until there are none left. A task is (lane
    of q, slot of the keys, block of queries); the block's tiles are table[starts[block] :
    starts[block + 1]]. What is not ordinary is left out."""
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, slot, block = tasks[task]
        if not queries.ordinary[lane, block]:
            continue
        if queries.fresh[lane, block]:
            first = lane * queries.rows + block * QUERIES
            row_size = shape.value_row * shape.sum_bytes
            clear(queries.y + first * row_size, QUERIES * row_size)
            queries.fresh[lane, block] = 0
        for index in range(starts[block], starts[block + 1]):
            tile = table[index]
            if ordinary_keys(
                keys.ordinary[slot], keys.part, tile[2] - keys.begin, tile[3] - keys.begin
            ):
                _absorb_tile(shape, at, units, tile, lane, slot, block, keys, queries, scratch)


@inner
def ordinary_keys(ordinary, part, begin, end):  # type: ignore[no-untyped-def]
    """Whether all parts are that the keys [begin, end) of a chunk touch."""
    for number in range(max(begin, 0) // part, min(-(-end // part), len(ordinary))):
        if not ordinary[number]:
            return False
    return True


@inner
def _absorb_tile(shape, at, units, tile, lane, slot, block, keys, queries, scratch):  # type: ignore[no-untyped-def]
    """A tile of a block of queries, block of keys by block of keys."""
    q0 = block * QUERIES
    low, high = set_spans(tile, q0, keys.begin, keys.end, shape, scratch.spans)
    if low >= high:
        return
    k = keys.k + slot * keys.k_rows * shape.depth * 4
    v = keys.v + slot * shape.value_panels * keys.v_rows * shape.panel * 4
    for begin in range(low // shape.rows * shape.rows, high, KEYS):
        end = min(begin + KEYS, high)
        square = max(keys.square[slot, begin // SQUARE], keys.square[slot, (end - 1) // SQUARE])
        large = large_part(units.least_part, units.part_factor, queries.square[lane], square)
        for panel in range(QUERIES // shape.panel):
            bottom, top = panel_range(panel, shape.rows, scratch.spans, begin, end)
            if bottom < top:
                _weigh(
                    shape, at, units, lane, q0, panel, begin, bottom, top, k, large, queries,
                    scratch,
                )  # fmt: skip
        _add_values(shape, at, lane, q0, begin, end, v, keys.v_rows, queries, scratch)
        # There is room for those of two blocks.
        if end == high or 4 * scratch.marks[0] > len(scratch.marks):
            _mend(shape, at, units, lane, slot, q0, k, v, keys, queries, scratch)


@inner
def _mend(shape, at, units, lane, slot, q0, k, v, keys, queries, scratch):  # type: ignore[no-untyped-def]
    """Mend the weights that were noted of a block of queries, if they are still large."""
    for number in range(scratch.marks[0]):
        key, column = scratch.marks[1 + 2 * number], scratch.marks[2 + 2 * number]
        panel = (lane * queries.panels + (q0 + column) // shape.panel) * shape.depth * shape.panel
        q, row = queries.q + (panel + column % shape.panel) * 4, lane * queries.rows + q0 + column
        note = scratch.notes + number * scratch.note_bytes
        a, b = k + key * shape.depth * 4, v + key * shape.panel * 4
        m, z = queries.m + row * 8, queries.z + row * 8
        y = queries.y + row * shape.value_row * shape.sum_bytes
        stride = keys.v_rows * shape.panel
        square = keys.square[slot, key // SQUARE]
        large = large_part(units.least_part, units.part_factor, queries.square[lane], square)
        call(at[_MEND], (note, a, q, units.scale, m, z, y, b, stride, large))
    scratch.marks[0] = 0


@inner
def _weigh(shape, at, units, lane, q0, panel, begin, bottom, top, k, large, queries, scratch):  # type: ignore[no-untyped-def]
    """Scores and weights of one panel of queries and the keys [bottom, top) of the block that
    begins at `begin`."""
    column = panel * shape.panel
    q_panel = lane * queries.panels + q0 // shape.panel + panel
    q = queries.q + q_panel * shape.depth * shape.panel * 4
    s = scratch.scores + (bottom - begin) * _ROW + column * 4
    groups = -(-(top - bottom) // shape.rows)
    full, rest = runs(panel, bottom, groups, shape.rows, scratch.spans)
    first, last = base(scratch.spans.first) + column * 4, base(scratch.spans.last) + column * 4
    for start, stop in ((0, full), (full, rest), (rest, groups)):
        if start == stop:
            continue
        key = bottom + start * shape.rows
        a, to, count = k + key * shape.depth * 4, s + (key - bottom) * _ROW, stop - start
        if stop == rest and start == full:
            call(at[_SCORE], (a, q, to, count, scratch.top, units.cap))
        else:
            call(at[_SCORE_MASKED], (a, q, to, count, scratch.top, units.cap, first, last, key))
    each = 2 if shape.pairs else 1
    row = lane * queries.rows + q0 + column
    p = scratch.weights + (bottom - begin) // each * _ROW + column * 4
    count, alpha = (top - bottom + each - 1) // each, scratch.alpha + column * 4
    m, z = queries.m + row * 8, queries.z + row * 8
    notes, marks = scratch.notes, base(scratch.marks)
    call(
        at[_SOFT],
        (s, p, count, units.scale, scratch.top, m, z, alpha, notes, marks, bottom, column, large),
    )


@inner
def _add_values(shape, at, lane, q0, begin, end, v, v_rows, queries, scratch):  # type: ignore[no-untyped-def]
    """y = alpha y + P V, for each group of rows of queries over the keys that it sees. Each reads a
    part of the next panel of V ahead, which after the last one is the next block's first."""
    each = 2 if shape.pairs else 1
    y = queries.y + (lane * queries.rows + q0) * shape.value_row * shape.sum_bytes
    row_bytes, lows, highs = shape.panel * 4, scratch.spans.low, scratch.spans.high
    for column in range(shape.value_panels):
        panel = v + column * v_rows * row_bytes
        later = panel + (v_rows + begin // each) * row_bytes
        if column + 1 == shape.value_panels:
            later = v + (begin + KEYS) // each * row_bytes
        narrow = column * shape.panel + shape.panel > shape.value_row
        for group in range(len(lows)):
            bottom, top = max(lows[group], begin), min(highs[group], end)
            if bottom >= top:
                continue
            row, query = (bottom - begin) // each, group * shape.rows
            a = scratch.weights + row * _ROW + query * 4
            b = panel + (begin // each + row) * row_bytes
            c = y + (query * shape.value_row + column * shape.panel) * shape.sum_bytes
            depth = (top - begin + each - 1) // each - row
            part = later + group * (KEYS // each * row_bytes // len(lows))
            call(
                at[_VALUES_NARROW if narrow else _VALUES],
                (a, b, c, depth, part, scratch.alpha + query * 4),
            )


@driver
def finish(control, tasks, shape, unit, rounding, rows, m, z, queries, heads, out, row_bytes, lse):  # type: ignore[no-untyped-def]
    """out `[batch, rows, heads, value_dim]` at its address, rows of `row_bytes`, by the function at
    `rounding`; lse `[lanes, rows]` of m and z likewise. A task is (lane, block)."""
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, block = tasks[task]
        batch, head = lane // heads, lane % heads
        row_size = shape.value_row * shape.sum_bytes
        y = queries.y + (lane * queries.rows + block * QUERIES) * row_size
        if queries.fresh[lane, block]:
            clear(y, QUERIES * row_size)
        for i in range(block * QUERIES, min(block * QUERIES + QUERIES, rows)):
            total = z[lane, i]
            factor = 0.0 if total == 0 else 1 / total
            lse[lane, i] = -np.inf if total == 0 else (m[lane, i] + np.log2(total)) * unit
            source = y + (i - block * QUERIES) * row_size
            call(rounding, (source, out + ((batch * rows + i) * heads + head) * row_bytes, factor))
