"""What each query of a block sees of a band tile: one range of keys, its span."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringrt_backends.cpu.calls import inner
from ringrt_backends.cpu.compiled import Shape

#: A query that sees nothing has the span [NEVER, −NEVER): it widens no union of spans, and
#: makes none look full.
NEVER = 1 << 30


class Spans(NamedTuple):
    """Ranges of keys, each with the key after its last: of every query, `first` and `last`, int32
    `[queries]`; of every group of a tile's rows what any of these sees, `low` and `high`, int64
    `[groups]`; and of every panel, int64 `[panels]`, what scores are needed of, `seen_from` and
    `seen_to`, and what all of its queries see, `full_from` and `full_to`. Scores are needed of what
    any group sees that touches the panel, for a group's product reads them across its panels."""

    first: Any
    last: Any
    low: Any
    high: Any
    seen_from: Any
    seen_to: Any
    full_from: Any
    full_to: Any


def spans_of(queries: int, shape: Shape) -> Spans:
    """Memory for the spans of so many queries, unset."""
    groups, panels = -(-queries // shape.rows), queries // shape.panel
    first, last = (np.empty(queries, np.int32) for _ in range(2))
    low, high = (np.empty(groups, np.int64) for _ in range(2))
    return Spans(first, last, low, high, *(np.empty(panels, np.int64) for _ in range(4)))


@inner
def set_spans(tile, q0, from_key, to_key, shape, spans):  # type: ignore[no-untyped-def]
    """Set the spans of queries q0, q0 + 1, ... in [from_key, to_key), counted from from_key. The
    range of keys that any of them sees; where it is empty, groups and panels are not set.

    Row a of the tile sees its keys a − upper .. a − lower."""
    row0, row1, key0, key1, lower, upper = tile
    first, last = spans.first, spans.last
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
    if low < high:
        _set_groups(spans, shape)
        _set_panels(spans, shape)
    return low, high


@inner
def _set_groups(spans, shape):  # type: ignore[no-untyped-def]
    first, last, size = spans.first, spans.last, shape.rows
    for group in range(len(spans.low)):
        bottom, top = np.int64(NEVER), np.int64(-NEVER)
        for i in range(group * size, min(group * size + size, len(first))):
            bottom, top = min(bottom, np.int64(first[i])), max(top, np.int64(last[i]))
        spans.low[group], spans.high[group] = bottom, top


@inner
def _set_panels(spans, shape):  # type: ignore[no-untyped-def]
    width = shape.panel
    for panel in range(len(spans.seen_from)):
        bottom, top = np.int64(NEVER), np.int64(-NEVER)
        last_group = min(-(-(panel + 1) * width // shape.rows), len(spans.low))
        for group in range(panel * width // shape.rows, last_group):
            bottom, top = min(bottom, spans.low[group]), max(top, spans.high[group])
        spans.seen_from[panel], spans.seen_to[panel] = bottom, top
        bottom, top = np.int64(-NEVER), np.int64(NEVER)
        for i in range(panel * width, panel * width + width):
            bottom = max(bottom, np.int64(spans.first[i]))
            top = min(top, np.int64(spans.last[i]))
        spans.full_from[panel], spans.full_to[panel] = bottom, top


@inner
def panel_range(panel, rows, spans, begin, end):  # type: ignore[no-untyped-def]
    """The keys in [begin, end) that a panel of queries needs scores of. Begins at the first key of
    a tile of so many rows, counted from begin; see `layout.first_key`."""
    bottom, top = max(spans.seen_from[panel], begin), min(spans.seen_to[panel], end)
    return begin + (bottom - begin) // rows * rows, top


@inner
def runs(panel, first, count, rows, spans):  # type: ignore[no-untyped-def]
    """Of `count` groups of `rows` keys from key `first` on, how many to mask before those that all
    queries of a panel see in full, and before those after it: [0, a), [a, b), [b, count)."""
    a = min(max(-(-(spans.full_from[panel] - first) // rows), 0), count)
    b = min(max((spans.full_to[panel] - first) // rows, a), count)
    return a, b
