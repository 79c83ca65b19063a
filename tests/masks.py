"""Masks by their definitions, pair by pair, and the options that name them: what the pieces of
`ringrt.plan.mask_options` are held to. Shares no code with it."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st


def visible(
    q_length, kv_length, *, causal=False, window=None, documents=None, prefix=0, sink_tokens=0
):
    """bool [q_length, kv_length], from the words of the documentation."""
    ranges = _ranges(documents, q_length, kv_length)
    left, right = (None, None) if window is None else window
    seen = np.zeros((q_length, kv_length), dtype=bool)
    for (q_start, q_stop), (k_start, k_stop) in ranges:
        for i in range(q_start, q_stop):
            for j in range(k_start, k_stop):
                # Aligned at the end of the document: the last query stands at the last key.
                ahead = (k_stop - j) - (q_stop - i)
                by_left = left in (None, -1) or ahead <= left
                by_right = right in (None, -1) or -ahead <= right
                by_causal = not causal or ahead >= 0
                first = j - k_start
                seen[i, j] = first < prefix or (
                    by_causal and by_right and (by_left or first < sink_tokens)
                )
    return seen


def _ranges(documents, q_length, kv_length):
    if documents is None:
        return [((0, q_length), (0, kv_length))]
    sides = documents if isinstance(documents, tuple) else (documents, documents)
    queries, keys = (_one_side(side) for side in sides)
    return list(zip(queries, keys, strict=True))


def _one_side(side):
    side = list(side)
    if side and np.ndim(side[0]) == 0:
        return list(itertools.pairwise(side))
    return [tuple(each) for each in side]


@st.composite
def documents_of(draw, q_length, kv_length):
    """Documents in any of the forms that are taken, with and without padding between them."""
    count = draw(st.integers(1, 4))
    form = draw(st.sampled_from(["cu_seqlens", "ranges", "pair"]))
    if form != "pair" and q_length != kv_length:
        form = "pair"
    if form == "cu_seqlens":
        return sorted(draw(st.lists(st.integers(0, q_length), min_size=1, max_size=5)))
    if form == "ranges":
        return _split(draw, q_length, count)
    return _split(draw, q_length, count), _split(draw, kv_length, count)


def _split(draw, length, count):
    edges = sorted(draw(st.lists(st.integers(0, length), min_size=2 * count, max_size=2 * count)))
    return [[edges[2 * i], edges[2 * i + 1]] for i in range(count)]


@st.composite
def mask_options(draw, q_length, kv_length):
    """Options of `Ring.attention` that say who sees whom, in any combination."""
    side = st.none() | st.integers(-1, 12)
    options = {}
    if draw(st.booleans()):
        options["causal"] = True
    if draw(st.booleans()):
        options["window"] = (draw(side), draw(side))
    if draw(st.booleans()):
        options["documents"] = draw(documents_of(q_length, kv_length))
    if draw(st.booleans()):
        options["prefix"] = draw(st.integers(0, 6))
    if draw(st.booleans()):
        options["sink_tokens"] = draw(st.integers(0, 6))
    return options
