"""Packing: rows of q, k, v and dout brought into the layouts that the register tile reads (see
`ringrt_backends.cpu.tile`). An element of these is 32 bits: an fp32, or a pair of bf16.

With each part goes its *peak*, the largest magnitude in it, NaN being larger than all: the
drivers take the compiled kernels only for blocks whose products cannot overflow.
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


@inner
def read_row(source, lane, row, target, peak):  # type: ignore[no-untyped-def]
    """One row, of batch and head lane = batch·heads + head, widened to fp32 or as pairs."""
    batch, head = lane // source.heads, lane % source.heads
    at = batch * source.batch_stride + row * source.row_stride + head * source.head_stride
    call(source.reader, (source.address + at, target, source.dim, peak))


@driver
def pack_rows(control, tasks, source, orders, shift, first, count, part, rows, peaks):  # type: ignore[no-untyped-def]
    """Rows [first, first + count) of the lanes shift, shift + 1, ... as operands A, side by side:
    `rows` `[slots, >= count, depth]`, elements in the order `orders` `[lanes, depth]`. A task is
    (slot, number of a part)."""
    one = np.zeros(rows.shape[2], np.uint32)
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        slot, number = tasks[task]
        peak = base(peaks) + (slot * peaks.shape[1] + number) * 4
        for row in range(number * part, min(number * part + part, count)):
            read_row(source, shift + slot, first + row, base(one), peak)
            at = base(rows) + (slot * rows.shape[1] + row) * rows.shape[2] * 4
            order = base(orders) + (shift + slot) * rows.shape[2] * 8
            call(source.reorder, (base(one), at, order, rows.shape[2]))


@driver
def pack_columns(control, tasks, source, shift, first, count, flip, part, panels, peaks):  # type: ignore[no-untyped-def]
    """The same rows as operands B that are summed over rows: `panels` `[slots, panels, rows,
    panel]`, or of half as many rows, in pairs. `part` is even. `flip` is XORed to each element."""
    _, panels_each, rows, panel = panels.shape
    pair = np.zeros((2, panels_each * panel), np.uint32)
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        slot, number = tasks[task]
        peak = base(peaks) + (slot * peaks.shape[1] + number) * 4
        begin, end = number * part, min(number * part + part, count)
        to, stride = base(panels) + slot * panels_each * rows * panel * 4, rows * panel
        columns(
            source, shift + slot, first, begin, end, flip, pair, panels_each, stride, panel, to, peak
        )


@inner
def columns(source, lane, first, begin, end, flip, rows, count, stride, panel, to, peak):  # type: ignore[no-untyped-def]
    """Rows [first + begin, first + end) to the rows from `begin` on of `count` panels, of `panel`
    elements a row and `stride` elements in all. `rows` `[2, >= count * panel]` is scratch, zero
    where no element comes."""
    one, two = base(rows), base(rows) + rows.shape[1] * 4
    for row in range(begin, end, 2 if source.pairs else 1):
        read_row(source, lane, first + row, one, peak)
        if not source.pairs:
            call(source.spread, (one, to + row * panel * 4, count, stride, flip))
            continue
        if row + 1 < end:
            read_row(source, lane, first + row + 1, two, peak)
        else:
            rows[1] = 0
        call(source.interleave, (one, two, to + row // 2 * panel * 4, count, stride, flip))


@driver
def pack_turned(control, tasks, source, orders, group, count, flip, part, panels, peaks):  # type: ignore[no-untyped-def]
    """Rows [0, count) of all lanes transposed, as operands B that are summed over columns:
    `panels` `[lanes, panels, depth, panel]`, depth in the order `orders` `[lanes // group,
    depth]`. `part` is a multiple of the panel's width."""
    depth, width = panels.shape[2], panels.shape[3]
    block = np.zeros((width, depth), np.uint32)
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, number = tasks[task]
        peak = base(peaks) + (lane * peaks.shape[1] + number) * 4
        for begin in range(number * part, min(number * part + part, count), width):
            height = min(width, count - begin)
            for row in range(height):
                to = base(block) + row * depth * 4
                read_row(source, lane, begin + row, to, peak)
            block[height:] = 0
            at = (lane * panels.shape[1] + begin // width) * depth * width * 4
            order = base(orders) + lane // group * depth * 8
            call(source.turn, (base(block), base(panels) + at, order, depth, flip))
