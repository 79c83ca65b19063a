"""What each query of a block sees of a band tile: one range of keys, its span."""

from __future__ import annotations

import numpy as np

from ringrt_backends.cpu.calls import inner

#: A query that sees nothing has the span [NEVER, −NEVER): it widens no union of spans, and
#: makes none look full.
NEVER = 1 << 30


@inner
def set_spans(tile, q0, from_key, to_key, first, last):  # type: ignore[no-untyped-def]
    """The spans of queries q0, q0 + 1, ... in [from_key, to_key), counted from from_key, as
    int32 first and last. The smallest and the largest key that any of them sees.

    Row a of the tile sees its keys a − upper .. a − lower."""
    row0, row1, key0, key1, lower, upper = tile
    low, high = NEVER, -NEVER
    for i in range(len(first)):
        a = q0 + i - row0
        begin = max(key0, key0 + a - upper, from_key)
        end = min(key1, key0 + a - lower + 1, to_key)
        if a < 0 or q0 + i >= row1 or begin >= end:
            first[i], last[i] = NEVER, -NEVER
            continue
        first[i], last[i] = begin - from_key, end - from_key
        low, high = min(low, begin - from_key), max(high, end - from_key)
    return low, high


@inner
def set_unions(first, last, size, low, high):  # type: ignore[no-untyped-def]
    """For each `size` queries the smallest and the largest key that any of them sees."""
    for group in range(len(low)):
        low[group], high[group] = NEVER, -NEVER
        for i in range(group * size, min(group * size + size, len(first))):
            low[group], high[group] = min(low[group], first[i]), max(high[group], last[i])


@inner
def panel_range(panel, shape, low, high, begin, end):  # type: ignore[no-untyped-def]
    """The keys in [begin, end) that a panel of queries needs scores of: those that any group of
    rows which touches the panel sees, for a group's product reads them across its panels. Begins
    at the first key of a tile, counted from begin; see `layout.first_key`."""
    first_group = panel * shape.panel // shape.rows
    last_group = min(-(-(panel + 1) * shape.panel // shape.rows), len(low))
    bottom, top = NEVER, -NEVER
    for group in range(first_group, last_group):
        bottom, top = min(bottom, low[group]), max(top, high[group])
    bottom, top = max(bottom, begin), min(top, end)
    return begin + (bottom - begin) // shape.rows * shape.rows, top


@inner
def full_range(panel, shape, first, last):  # type: ignore[no-untyped-def]
    """The keys that all queries of a panel see."""
    bottom, top = np.int64(-NEVER), np.int64(NEVER)
    for i in range(panel * shape.panel, panel * shape.panel + shape.panel):
        bottom, top = max(bottom, np.int64(first[i])), min(top, np.int64(last[i]))
    return bottom, top


@inner
def runs(first, count, rows, full_from, full_to):  # type: ignore[no-untyped-def]
    """Of `count` groups of `rows` keys from key `first` on, how many to mask before those that all
    queries see in full, and before those after it: [0, a), [a, b), [b, count)."""
    a = min(max(-(-(full_from - first) // rows), 0), count)
    b = min(max((full_to - first) // rows, a), count)
    return a, b
