"""Masks as users name them: causal, window, documents, prefix, sink tokens; and how each
becomes pieces.

Within one document (or the whole sequence, if there are no documents) of q_len queries and
k_len keys, let δ = (i + k_len − q_len) − j for the i-th query and the j-th key: aligned at the
bottom right, so that the last query stands at the last key. Then

    causal            0 <= δ
    window (l, r)    −r <= δ <= l      None is unbounded; causal makes r at most 0
    prefix n          keys j < n are visible to every query
    sink_tokens n     keys j < n are not bound by l (but by r and causal)

which are at most three pieces a document, side by side: prefix keys, sink keys, other keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringrt.errors import ConfigError
from ringrt.plan.mask import MAX_LENGTH, UNBOUNDED, IntArray, Mask, is_whole

Window = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class MaskOptions:
    """The options of one call, checked as far as they can be without the lengths.

    `documents` is a pair of int64 `[n, 2]`: the [start, stop) of each document among the
    queries and among the keys."""

    causal: bool = False
    window: Window | None = None
    documents: tuple[IntArray, IntArray] | None = None
    prefix: int = 0
    sink_tokens: int = 0
    mask: Mask | None = None

    @classmethod
    def of(
        cls,
        *,
        causal: bool = False,
        window: Sequence[int | None] | None = None,
        documents: Any = None,
        prefix: int = 0,
        sink_tokens: int = 0,
        mask: Mask | None = None,
    ) -> MaskOptions:
        """From a user's arguments. Raises `ConfigError`."""
        if not isinstance(causal, bool | np.bool_):
            raise ConfigError("causal", "True or False", repr(causal))
        options = cls(
            bool(causal),
            None if window is None else _window(window),
            None if documents is None else _documents(documents),
            _count("prefix", prefix),
            _count("sink_tokens", sink_tokens),
            mask,
        )
        if mask is not None:
            if not isinstance(mask, Mask):
                raise ConfigError("mask", "a ringrt.Mask", type(mask).__name__)
            named = ("causal", "window", "documents", "prefix", "sink_tokens")
            also = [name for name in named if getattr(options, name) not in (None, False, 0)]
            if also:
                raise ConfigError("mask", f"no {' and no '.join(also)} beside it", "both")
        return options

    def record(self) -> dict[str, Any]:
        """The options in plain values, by which ranks compare them; arrays by a digest."""
        said: dict[str, Any] = {"causal": self.causal, "prefix": self.prefix}
        said |= {"sink_tokens": self.sink_tokens, "window": self.window}
        said["mask"] = None if self.mask is None else self.mask.digest[:16]
        said["documents"] = None
        if self.documents is not None:
            content = b"".join(x.tobytes() for x in self.documents)
            said["documents"] = hashlib.sha256(content).hexdigest()[:16]
        return said

    def build(self, q_length: int, kv_length: int) -> Mask:
        """The mask over whole sequences of these lengths. Raises `ConfigError` where documents
        or the user's own pieces do not fit them."""
        if self.mask is not None:
            self.mask.check(q_length, kv_length)
            return self.mask
        if self.documents is None:
            queries, keys = np.array([[0, q_length]]), np.array([[0, kv_length]])
        else:
            queries, keys = self.documents
            _check_ranges(queries, q_length, "query")
            _check_ranges(keys, kv_length, "key")
        return Mask.from_table(self._pieces(queries, keys))

    def _pieces(self, queries: IntArray, keys: IntArray) -> IntArray:
        (q_start, q_stop), (k_start, k_stop) = queries.T, keys.T
        # δ = (i − q_start + k_len − q_len) − (j − k_start) = (i − j) + (k_stop − q_stop).
        shift = q_stop - k_stop
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        low = np.full_like(shift, -UNBOUNDED) if right is None else shift - right
        high = np.full_like(shift, UNBOUNDED) if left is None else shift + left
        free = np.full_like(shift, UNBOUNDED)
        first = np.minimum(k_start + self.prefix, k_stop)
        second = np.minimum(k_start + max(self.prefix, self.sink_tokens), k_stop)
        prefix = (q_start, q_stop, k_start, first, -free, free)
        sinks = (q_start, q_stop, first, second, low, free)
        others = (q_start, q_stop, second, k_stop, low, high)
        table = np.stack([np.stack(part, axis=1) for part in (prefix, sinks, others)], axis=1)
        table = table.reshape(-1, 6)
        return table[(table[:, 0] < table[:, 1]) & (table[:, 2] < table[:, 3])]


def _window(window: Sequence[int | None]) -> Window:
    expected = "(left, right), each a whole number >= -1 or None"
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ConfigError("window", expected, repr(window)) from None
    sides: list[int | None] = []
    for side in (left, right):
        if side is not None and (not is_whole(side) or side < -1):
            raise ConfigError("window", expected, repr(window))
        sides.append(None if side is None or side == -1 else min(int(side), MAX_LENGTH))
    return sides[0], sides[1]


def _count(name: str, value: Any) -> int:
    if not is_whole(value) or value < 0:
        raise ConfigError(name, "a whole number >= 0", repr(value))
    return min(int(value), MAX_LENGTH)


def _documents(documents: Any) -> tuple[IntArray, IntArray]:
    """A pair is a tuple of two arrays; anything else is one array for queries and keys."""
    if isinstance(documents, tuple) and len(documents) == 2 and np.ndim(documents[0]) > 0:
        if all(np.shape(side) == (2,) for side in documents) and documents[1][0] != 0:
            expected = "a list of ranges, or arrays (queries, keys) of cu_seqlens that begin at 0"
            raise ConfigError("documents", expected, f"{documents}, which may mean either")
        queries, keys = (_ranges(side) for side in documents)
        if len(queries) != len(keys):
            got = f"{len(queries)} and {len(keys)}"
            raise ConfigError("documents", "as many among queries as among keys", got)
        return queries, keys
    both = _ranges(documents)
    return both, both


def _ranges(documents: Any) -> IntArray:
    """[start, stop) of each document, from cu_seqlens `[n + 1]` or ranges `[n, 2]`."""
    expected = "whole numbers: cu_seqlens [n + 1], or ranges [n, 2] of [start, stop)"
    try:
        array = np.asarray(documents)
    except ValueError:
        raise ConfigError("documents", expected, "a ragged list") from None
    if array.size == 0 and array.ndim in (1, 2):
        return np.empty((0, 2), np.int64)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ConfigError("documents", expected, f"{array.dtype} of shape {array.shape}")
    if (array > MAX_LENGTH).any():
        raise ConfigError("documents", f"positions of at most {MAX_LENGTH}", array.max())
    array = array.astype(np.int64)
    if array.ndim == 1:
        array = np.stack((array[:-1], array[1:]), axis=1)
    if array.shape[1] != 2:
        raise ConfigError("documents", expected, f"shape {array.shape}")
    if (array[:, 0] > array[:, 1]).any() or (array < 0).any():
        worst = array[(array[:, 0] > array[:, 1]) | (array < 0).any(axis=1)][0]
        raise ConfigError("documents", "0 <= start <= stop", worst.tolist())
    return array


def _check_ranges(ranges: IntArray, length: int, side: str) -> None:
    filled = ranges[ranges[:, 0] < ranges[:, 1]]
    filled = filled[np.argsort(filled[:, 0], kind="stable")]
    if len(filled) and filled[:, 1].max() > length:
        worst = filled[np.argmax(filled[:, 1])].tolist()
        raise ConfigError("documents", f"ranges within the {length} {side} rows", worst)
    clash = filled[1:, 0] < filled[:-1, 1]
    if clash.any():
        index = int(np.argmax(clash))
        got = f"{filled[index].tolist()} and {filled[index + 1].tolist()} ({side} rows)"
        raise ConfigError("documents", "ranges that do not overlap", got)
