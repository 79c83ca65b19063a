"""Packing: rows of q, k, v and dout brought into the layouts that the register tile reads (see
`ringrt_backends.cpu.tile`). An element of these is 32 bits: an fp32, or a pair of bf16.

A row of all heads lies together in memory and is read at once; one head's alone would be read in
strides, at half the speed. With each part of the rows goes its *peak*, the bits of the largest
magnitude in it, NaN being larger than all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringrt_backends.cpu.calls import base, call, driver, inner, take


class Source(NamedTuple):
    """An array `[batch, rows, heads, dim]`, its elements side by side: address, strides in
    bytes, heads, and addresses of functions of `ringrt_backends.cpu.move_ir`: the one that reads
    a row of it, and those that lay rows out."""

    address: int
    batch_stride: int
    row_stride: int
    head_stride: int
    heads: int
    dim: int
    pairs: bool
    reader: int
    spread: int
    interleave: int
    turn: int
    reorder: int


class Panels(NamedTuple):
    """Address of panels `[lanes, count, rows, panel]`."""

    address: int
    count: int
    rows: int
    panel: int


@inner
def read_row(source, lane, row, target, peak):  # type: ignore[no-untyped-def]
    """One row, of batch and head lane = batch·heads + head, widened to fp32 or as pairs."""
    batch, head = lane // source.heads, lane % source.heads
    at = batch * source.batch_stride + row * source.row_stride + head * source.head_stride
    call(source.reader, (source.address + at, target, source.dim, peak))


@inner
def read_ordered(source, lane, row, order, one, target, depth, peak):  # type: ignore[no-untyped-def]
    """A row as operand A, its elements in an order; `one` is scratch for a row."""
    read_row(source, lane, row, one, peak)
    call(source.reorder, (one, target, order, depth))


@inner
def read_columns(source, lane, row, rows, to, panels, at, flip, pair, peak):  # type: ignore[no-untyped-def]
    """A row, or a pair of rows of which the second is 0 from `rows` on, as row `at` of panels that
    begin at `to`. `pair` `[2, >= count * panel]` is scratch, 0 where no element comes."""
    one, two = base(pair), base(pair) + pair.shape[1] * 4
    target, stride = to + at * panels.panel * 4, panels.rows * panels.panel
    read_row(source, lane, row, one, peak)
    if not source.pairs:
        call(source.spread, (one, target, panels.count, stride, flip))
        return
    if row + 1 < rows:
        read_row(source, lane, row + 1, two, peak)
    else:
        pair[1] = 0
    call(source.interleave, (one, two, target, panels.count, stride, flip))


@driver
def pack_keys(control, tasks, k, v, orders, slot, slots, first, count, part, rows, panels, peaks):  # type: ignore[no-untyped-def]
    """Rows [first, first + count) of the KV lanes slot, slot + 1, ...: of K as operands A, `rows`
    `[slots, >= count, depth]`, elements in the order `orders` `[KV lanes, depth]`; of V as
    `panels`, which are summed over rows. A task is the number of a part, of `part` rows, an even
    number; `peaks` `[2, slots, parts]`."""
    depth, parts = rows.shape[2], peaks.shape[2]
    one, pair = np.zeros(depth, np.uint32), np.zeros((2, panels.count * panels.panel), np.uint32)
    lane_bytes = panels.count * panels.rows * panels.panel * 4
    each = 2 if v.pairs else 1
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        number = tasks[task]
        begin, end = number * part, min(number * part + part, count)
        for row in range(begin, end):
            for lane in range(slots):
                peak = base(peaks) + (lane * parts + number) * 4
                order = base(orders) + (slot + lane) * depth * 8
                to = base(rows) + (lane * rows.shape[1] + row) * depth * 4
                read_ordered(k, slot + lane, first + row, order, base(one), to, depth, peak)
        for row in range(begin, end, each):
            for lane in range(slots):
                peak = base(peaks) + ((slots + lane) * parts + number) * 4
                to = panels.address + lane * lane_bytes
                read_columns(
                    v, slot + lane, first + row, first + end, to, panels, row // each, np.uint32(0),
                    pair, peak,
                )  # fmt: skip


@driver
def pack_columns(control, tasks, source, count, part, panels, peaks):  # type: ignore[no-untyped-def]
    """Rows [0, count) of all lanes as panels that are summed over rows. A task is (batch, number of
    a part); `part` is even, peaks `[lanes, parts]`."""
    pair = np.zeros((2, panels.count * panels.panel), np.uint32)
    lane_bytes = panels.count * panels.rows * panels.panel * 4
    each = 2 if source.pairs else 1
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        batch, number = tasks[task]
        for row in range(number * part, min(number * part + part, count), each):
            for lane in range(batch * source.heads, (batch + 1) * source.heads):
                peak = base(peaks) + (lane * peaks.shape[1] + number) * 4
                to = panels.address + lane * lane_bytes
                read_columns(
                    source, lane, row, count, to, panels, row // each, np.uint32(0), pair, peak
                )


@driver
def pack_turned(control, tasks, source, orders, group, count, flip, part, panels, peaks):  # type: ignore[no-untyped-def]
    """Rows [0, count) of all lanes transposed, as panels that are summed over columns: `panels`
    `[lanes, panels, depth, panel]`, depth in the order `orders` `[lanes // group, depth]`. `flip`
    is XORed to each element. A task is (batch, number of a part); `part` is a multiple of the
    panel's width, peaks `[lanes, parts]`."""
    depth, width = panels.shape[2], panels.shape[3]
    blocks = np.zeros((source.heads, width, depth), np.uint32)
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        batch, number = tasks[task]
        lane = batch * source.heads
        for begin in range(number * part, min(number * part + part, count), width):
            height = min(width, count - begin)
            for row in range(height):
                for head in range(source.heads):
                    peak = base(peaks) + ((lane + head) * peaks.shape[1] + number) * 4
                    to = base(blocks) + (head * width + row) * depth * 4
                    read_row(source, lane + head, begin + row, to, peak)
            blocks[:, height:] = 0
            for head in range(source.heads):
                at = ((lane + head) * panels.shape[1] + begin // width) * depth * width * 4
                order = base(orders) + (lane + head) // group * depth * 8
                block = base(blocks) + head * width * depth * 4
                call(source.turn, (block, base(panels) + at, order, depth, flip))
