"""Packing: which rows of q, k, v and dout are brought where, by the kernels of `pack_ir`, as the
register tile reads them (see `tile`). With each part of the rows goes its *size*, two floats: the
largest magnitude in it and, of q, dout and K unless in pairs, the square of the longest row."""

from __future__ import annotations

from typing import NamedTuple

from ringrt_backends.cpu.calls import base, call, driver, inner, take


class Source(NamedTuple):
    """An array `[batch, rows, heads, dim]`, its elements side by side: address, strides in bytes,
    and heads."""

    address: int
    batch_stride: int
    row_stride: int
    head_stride: int
    heads: int


class Panels(NamedTuple):
    """Address of panels `[lanes, number, rows, panel]`."""

    address: int
    number: int
    rows: int
    panel: int


@inner
def where(source, lane, row):  # type: ignore[no-untyped-def]
    """The address of a row, of batch and head lane = batch·heads + head."""
    batch, head = lane // source.heads, lane % source.heads
    offset = batch * source.batch_stride + row * source.row_stride + head * source.head_stride
    return source.address + offset


@driver
def pack_keys(control, tasks, at, k, v, places, slot, first, count, part, rows, panels, sizes):  # type: ignore[no-untyped-def]
    """Rows [first, first + count) of the KV lanes slot, slot + 1, ..., by the functions at[0] and
    at[1]: of K as operand A, `rows` `[slots, >= count, depth]`, elements at their `places` `[KV
    lanes, depth]`; of V as `panels` that are summed over rows. A task is (slot, number of a part),
    of `part` rows, an even number; `sizes` `[2, slots, parts, 2]`."""
    depth, each = rows.shape[2], rows.shape[1] // panels.rows
    lane_bytes = panels.number * panels.rows * panels.panel * 4
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, number = tasks[task]
        row = number * part
        height = min(part, count - row)
        size, next_size = (
            base(sizes) + (lane * sizes.shape[2] + number) * 8,
            sizes.shape[1] * sizes.shape[2] * 8,
        )
        to, place = (
            base(rows) + (lane * rows.shape[1] + row) * depth * 4,
            base(places) + (slot + lane) * depth * 8,
        )
        call(at[0], (where(k, slot + lane, first + row), k.row_stride, height, to, place, size))
        to = panels.address + lane * lane_bytes + row // each * panels.panel * 4
        stride = panels.rows * panels.panel
        source = where(v, slot + lane, first + row)
        call(at[1], (source, v.row_stride, height, to, stride, size + next_size))


@driver
def pack_queries(  # type: ignore[no-untyped-def]
    control, tasks, at, source, places, group, count, flip, part, panels, columns, sizes
):
    """Rows [0, count) of all lanes: by the function at[0] transposed, as panels that are summed
    over columns, `panels` `[lanes, panels, depth, panel]`, depth at its `places` `[lanes //
    group, depth]`; and by at[1], if it is not 0, as `columns` that are summed over rows. `flip` is
    XORed to each element of the first. A task is (lane, number of a part); `part` is a multiple of
    the panel's width and even; sizes `[lanes, parts, 2]`."""
    depth, width = panels.shape[2], panels.shape[3]
    lane_bytes = columns.number * columns.rows * columns.panel * 4
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        lane, number = tasks[task]
        size, place = (
            base(sizes) + (lane * sizes.shape[1] + number) * 8,
            base(places) + lane // group * depth * 8,
        )
        row = number * part
        end = min(row + part, count)
        for begin in range(row, end, width):
            to = base(panels) + (lane * panels.shape[1] + begin // width) * depth * width * 4
            height = min(width, end - begin)
            given = where(source, lane, begin), source.row_stride, height
            call(at[0], (given[0], given[1], given[2], to, place, flip, size))
        if at[1] != 0:
            each = panels.shape[1] * width // columns.rows
            to = columns.address + lane * lane_bytes + row // each * columns.panel * 4
            stride = columns.rows * columns.panel
            given = where(source, lane, row), source.row_stride, end - row
            call(at[1], (given[0], given[1], given[2], to, stride, size))
