"""Some rows of a shard, as merged half-open ranges: what of it is carried, needed or held."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ringrt.plan.mask import IntArray

#: Answers of `within` that each keeps: a plan asks the same in every pass.
_KEPT = 4


@dataclass(frozen=True, eq=False)
class Rows:
    """`ranges` int64 `[n, 2]`: sorted, apart from one another, none empty. Rows that are held
    lie side by side in this order ("compact"). Never written, so that what is found out once is
    kept."""

    ranges: IntArray

    @classmethod
    def all(cls, count: int) -> Rows:
        """Rows 0 .. count − 1."""
        return _all(count)

    @classmethod
    def where(cls, edges: IntArray, chosen: npt.NDArray[np.bool_]) -> Rows:
        """The intervals [edges[i], edges[i + 1]) that are chosen, neighbours merged."""
        steps = np.diff(chosen.astype(np.int8), prepend=0, append=0)
        starts, stops = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
        return cls(np.stack((edges[starts], edges[stops]), axis=1))

    @cached_property
    def count(self) -> int:
        """How many rows."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())

    def __bool__(self) -> bool:
        return len(self.ranges) > 0

    def __eq__(self, other: Any) -> bool:
        return self is other or (isinstance(other, Rows) and self._content == other._content)

    def __hash__(self) -> int:
        return hash(self._content)

    @cached_property
    def _content(self) -> bytes:
        return self.ranges.tobytes()

    def compact(self, index: IntArray) -> IntArray:
        """Where shard rows lie in compact order. Rows that are not held give nonsense."""
        starts, stops = self.ranges.T
        before = np.cumsum(stops - starts) - (stops - starts)
        which = np.searchsorted(starts, index, side="right") - 1
        moved: IntArray = before[which] + index - starts[which]
        return moved

    def within(self, held: Rows) -> slice | IntArray:
        """Index of these rows in the compact order of `held`, which holds them all: a slice
        where they lie side by side, otherwise int64 `[count]`."""
        known: _Within = self.__dict__.get("_within", ())
        for other, index in known:
            if other is held:
                return index
        index = self._index_within(held)
        self.__dict__["_within"] = ((held, index), *known[: _KEPT - 1])
        return index

    def _index_within(self, held: Rows) -> slice | IntArray:
        if self is held or not self:
            return slice(0, self.count)
        starts = held.compact(self.ranges[:, 0])
        counts = self.ranges[:, 1] - self.ranges[:, 0]
        total = int(counts.sum())
        if len(starts) == 1 or (starts[1:] == starts[:-1] + counts[:-1]).all():
            return slice(int(starts[0]), int(starts[0]) + total)
        before = np.cumsum(counts) - counts
        return np.repeat(starts - before, counts) + np.arange(total)


#: What `Rows.within` has been asked, and what it answered.
_Within = tuple[tuple[Rows, slice | IntArray], ...]


@lru_cache(maxsize=256)
def _all(count: int) -> Rows:
    ranges = np.array([[0, count]] if count else [], dtype=np.int64).reshape(-1, 2)
    ranges.flags.writeable = False
    return Rows(ranges)
