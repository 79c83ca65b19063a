"""Masks as disjoint pieces over global positions.

A piece is a rectangle (query range × key range) with bounds on the distance
δ = q_index − k_index. A pair (query, key) is visible if exactly one piece holds it.
Nothing here knows of ranks or shards; `ringrt.plan.tiles` lowers a mask to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringrt.errors import ConfigError, PlanError

IntArray = npt.NDArray[np.int64]

#: Stands for "no bound" in tables of integers: larger than any distance, and far enough from
#: the end of int64 that adding or subtracting positions cannot overflow.
UNBOUNDED = 1 << 61

#: Longest sequence: the number of its (query, key) pairs must fit in an int64.
MAX_LENGTH = 1 << 31

#: Pieces compared with the others at a time, when overlaps are looked for.
_CHECKED = 512


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries `q_start <= i < q_stop` see keys `k_start <= j < k_stop` whose distance i − j
    lies within the inclusive bounds. `None` is no bound."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    min_distance: int | None = None
    max_distance: int | None = None

    def __post_init__(self) -> None:
        ranges = (self.q_start, self.q_stop, self.k_start, self.k_stop)
        bounds = (b for b in (self.min_distance, self.max_distance) if b is not None)
        if not all(map(is_whole, (*ranges, *bounds))):
            raise PlanError(f"{self}: ranges and bounds must be whole numbers, or bounds None")
        if not 0 <= self.q_start <= self.q_stop or not 0 <= self.k_start <= self.k_stop:
            raise PlanError(f"{self}: ranges must satisfy 0 <= start <= stop")
        if max(ranges) > MAX_LENGTH:
            raise PlanError(f"{self}: positions must be at most {MAX_LENGTH}")


class Mask:
    """A list of disjoint pieces, kept as one table so that thousands cost little.

    `table` is int64 `[pieces, 6]` in the order of `Piece`'s fields, with ∓`UNBOUNDED` for
    absent bounds. It is read-only; masks compare and hash by content.
    """

    __slots__ = ("_digest", "table")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._set(np.array([_row(piece) for piece in pieces], dtype=np.int64).reshape(-1, 6))

    @classmethod
    def from_table(cls, table: IntArray) -> Mask:
        """The mask of such a table, whose pieces the caller knows to be disjoint."""
        mask = cls.__new__(cls)
        mask._set(np.array(table, dtype=np.int64).reshape(-1, 6))
        return mask

    def _set(self, table: IntArray) -> None:
        self.table: IntArray = table
        self.table.flags.writeable = False
        self._digest = hashlib.sha256(table.tobytes()).hexdigest()

    @classmethod
    def full(cls, q_length: int, kv_length: int) -> Mask:
        """Every query sees every key."""
        return cls([Piece(0, q_length, 0, kv_length)])

    @classmethod
    def causal(cls, q_length: int, kv_length: int) -> Mask:
        """Bottom-right aligned: the last query sees every key, query i the keys
        j <= i + kv_length − q_length."""
        return cls([Piece(0, q_length, 0, kv_length, min_distance=q_length - kv_length)])

    def check(self, q_length: int, kv_length: int) -> None:
        """`ConfigError` unless every piece lies within the lengths and no two overlap."""
        outside = (self.table[:, 1] > q_length) | (self.table[:, 3] > kv_length)
        if outside.any():
            piece = self.pieces()[int(np.argmax(outside))]
            raise ConfigError("mask", f"pieces within {q_length} × {kv_length}", piece)
        order = np.argsort(self.table[:, 0], kind="stable")
        table = self.table[order]
        for begin in range(0, len(order), _CHECKED):
            clash = _first_overlap(table, begin, min(begin + _CHECKED, len(order)))
            if clash is not None:
                pieces = self.pieces()
                a, b = (pieces[order[index]] for index in clash)
                raise ConfigError("mask", "pieces that do not overlap", f"{a} and {b}")

    def pieces(self) -> list[Piece]:
        """The pieces, as values."""
        return [_piece(*map(int, row)) for row in self.table]

    def visible(self, q_index: IntArray, k_index: IntArray) -> npt.NDArray[np.bool_]:
        """The mask's definition, pair by pair: bool `[len(q_index), len(k_index)]`.

        For checking and drawing; the runtime itself lowers pieces to tiles instead."""
        q_order, k_order = np.argsort(q_index), np.argsort(k_index)
        i, j = q_index[q_order], k_index[k_order]
        rows = np.searchsorted(i, self.table[:, 0:2])
        keys = np.searchsorted(j, self.table[:, 2:4])
        met = (rows[:, 0] < rows[:, 1]) & (keys[:, 0] < keys[:, 1])
        seen = np.zeros((len(i), len(j)), dtype=np.bool_)
        for (q0, q1), (k0, k1), (low, high) in zip(
            rows[met], keys[met], self.table[met, 4:6], strict=True
        ):
            apart = i[q0:q1, None] - j[None, k0:k1]
            seen[q0:q1, k0:k1] |= (low <= apart) & (apart <= high)
        turned = np.empty_like(seen)
        turned[np.ix_(q_order, k_order)] = seen
        return turned

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the table, for comparing masks across ranks."""
        return self._digest

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Mask) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        shown = ", ".join(repr(piece) for piece in self.pieces()[:3])
        more = f", ... ({len(self.table)} pieces)" if len(self.table) > 3 else ""
        return f"Mask([{shown}{more}])"


def _first_overlap(table: IntArray, begin: int, end: int) -> tuple[int, int] | None:
    """Two rows with a pair in common, the first of them in begin .. end − 1, of a table sorted
    by q_start. In a rectangle every distance between its extremes occurs."""
    last = int(np.searchsorted(table[:, 0], table[begin:end, 1].max(), side="left"))
    a, b = table[begin:end, None, :], table[None, begin:last, :]
    q_start, k_start = np.maximum(a[..., 0], b[..., 0]), np.maximum(a[..., 2], b[..., 2])
    q_stop, k_stop = np.minimum(a[..., 1], b[..., 1]), np.minimum(a[..., 3], b[..., 3])
    low = np.maximum(np.maximum(a[..., 4], b[..., 4]), q_start - (k_stop - 1))
    high = np.minimum(np.minimum(a[..., 5], b[..., 5]), (q_stop - 1) - k_start)
    clash = (q_start < q_stop) & (k_start < k_stop) & (low <= high)
    clash &= np.arange(begin, end)[:, None] < np.arange(begin, last)[None, :]
    if not clash.any():
        return None
    first, second = np.unravel_index(int(np.argmax(clash)), clash.shape)
    return begin + int(first), begin + int(second)


def _row(piece: Piece) -> tuple[int, ...]:
    *box, low, high = astuple(piece)
    return (*box, _bound(low, -UNBOUNDED), _bound(high, UNBOUNDED))


def _bound(bound: int | None, absent: int) -> int:
    """A bound that no distance reaches is as good as the next such, and cannot overflow."""
    return absent if bound is None else max(-2 * MAX_LENGTH, min(2 * MAX_LENGTH, int(bound)))


def is_whole(value: Any) -> bool:
    """An integer, NumPy's included; not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _piece(q_start: int, q_stop: int, k_start: int, k_stop: int, low: int, high: int) -> Piece:
    return Piece(
        q_start,
        q_stop,
        k_start,
        k_stop,
        None if low == -UNBOUNDED else low,
        None if high == UNBOUNDED else high,
    )
