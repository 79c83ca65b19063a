"""Some rows of a shard, as merged half-open ranges: what of it is carried, needed or held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringrt.plan.mask import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """`ranges` int64 `[n, 2]`: sorted, apart from one another, none empty. Rows that are held
    lie side by side in this order ("compact")."""

    ranges: IntArray

    @classmethod
    def all(cls, count: int) -> Rows:
        """Rows 0 .. count − 1."""
        return cls(np.array([[0, count]] if count else [], dtype=np.int64).reshape(-1, 2))

    @classmethod
    def where(cls, edges: IntArray, chosen: npt.NDArray[np.bool_]) -> Rows:
        """The intervals [edges[i], edges[i + 1]) that are chosen, neighbours merged."""
        steps = np.diff(chosen.astype(np.int8), prepend=0, append=0)
        starts, stops = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
        return cls(np.stack((edges[starts], edges[stops]), axis=1))

    @property
    def count(self) -> int:
        """How many rows."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())

    def __bool__(self) -> bool:
        return len(self.ranges) > 0

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Rows) and np.array_equal(self.ranges, other.ranges)

    def __hash__(self) -> int:
        return hash(self.ranges.tobytes())

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
        if not self:
            return slice(0, 0)
        starts = held.compact(self.ranges[:, 0])
        counts = self.ranges[:, 1] - self.ranges[:, 0]
        total = int(counts.sum())
        if len(starts) == 1 or (starts[1:] == starts[:-1] + counts[:-1]).all():
            return slice(int(starts[0]), int(starts[0]) + total)
        before = np.cumsum(counts) - counts
        return np.repeat(starts - before, counts) + np.arange(total)
