"""How a sequence is sharded: a rank's shard is a few runs of positions.

Any length >= 0 and any number of ranks >= 1. Shards may be uneven or empty; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringrt.errors import PlanError
from ringrt.plan.mask import IntArray

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Positions start, start + stride, ..., `count` of them."""

    start: int
    stride: int
    count: int


Runs = tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """A named rule: `runs(length, size, rank)` gives the rank's positions, in local order.

    The runs of all ranks must hold every position of `range(length)` exactly once, and have
    strides of at least 1; see `check_partition`.
    """

    name: str
    summary: str
    runs: Callable[[int, int, int], Runs]

    def count(self, length: int, size: int, rank: int) -> int:
        """Rows of the rank's shard."""
        return sum(run.count for run in self.runs(length, size, rank))

    def counts(self, length: int, size: int) -> list[int]:
        """Rows of every rank's shard."""
        return [self.count(length, size, rank) for rank in range(size)]


def _contiguous(length: int, size: int, rank: int) -> Runs:
    return _keep_filled(_chunk(length, size, rank))


def _striped(length: int, size: int, rank: int) -> Runs:
    return _keep_filled(Run(rank, size, max(0, -(-(length - rank) // size))))


def _zigzag(length: int, size: int, rank: int) -> Runs:
    early = _chunk(length, 2 * size, rank)
    late = _chunk(length, 2 * size, 2 * size - 1 - rank)
    return _keep_filled(early, late)


def _chunk(length: int, chunks: int, index: int) -> Run:
    """The index-th of `chunks` consecutive parts; the first length % chunks hold one more."""
    base, extra = divmod(length, chunks)
    return Run(index * base + min(index, extra), 1, base + (index < extra))


def _keep_filled(*runs: Run) -> Runs:
    return tuple(run for run in runs if run.count)


CONTIGUOUS = Partition("contiguous", "consecutive tokens; causal work is uneven", _contiguous)
STRIPED = Partition("striped", "every p-th token; causal work is even", _striped)
ZIGZAG = Partition("zigzag", "an early and a late chunk; causal work is even", _zigzag)

#: The partitions that ringrt brings, by name.
PARTITIONS = {partition.name: partition for partition in (CONTIGUOUS, STRIPED, ZIGZAG)}


def check_partition(partition: Partition, length: int, size: int) -> None:
    """`PlanError` unless a plugin's partition gives every position to exactly one rank."""
    if partition in PARTITIONS.values():
        return
    held = np.zeros(length, np.int64)
    for rank in range(size):
        try:
            runs = tuple(partition.runs(length, size, rank))
            backwards = any(run.stride < 1 for run in runs)
            index = positions(runs)
        except Exception as error:
            raise PlanError(
                f"partition {partition.name}: runs({length}, {size}, {rank}): "
                f"{type(error).__name__}: {error}"
            ) from error
        if backwards:
            raise PlanError(f"partition {partition.name}: a run's stride must be 1 or more")
        if len(index) and not 0 <= index.min() <= index.max() < length:
            raise PlanError(
                f"partition {partition.name}: rank {rank} of {size} holds positions "
                f"{index.min()} to {index.max()} of a sequence of {length}"
            )
        np.add.at(held, index, 1)
    wrong = np.flatnonzero(held != 1)
    if len(wrong):
        raise PlanError(
            f"partition {partition.name}: position {wrong[0]} of {length} is held "
            f"{held[wrong[0]]} times by {size} ranks"
        )


def positions(runs: Runs) -> IntArray:
    """Global positions of a shard's rows, int64 `[rows]`, in local order."""
    parts = [run.start + run.stride * np.arange(run.count, dtype=np.int64) for run in runs]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def shard(array: Array, runs: Runs, axis: int = 1) -> Array:
    """A rank's rows of a whole array, cut along `axis`. One run gives a view, more a copy."""
    before = (slice(None),) * axis
    parts = [array[(*before, _slice(run))] for run in runs]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, axis=axis) if parts else array[(*before, slice(0, 0))]


def unshard(shards: Sequence[Array], partition: Partition, axis: int = 1) -> Array:
    """The whole array from every rank's shard, in rank order. Inverse of `shard`."""
    length = sum(part.shape[axis] for part in shards)
    shape = list(shards[0].shape)
    shape[axis] = length
    whole = np.empty(shape, dtype=shards[0].dtype)
    before = (slice(None),) * axis
    for rank, part in enumerate(shards):
        taken = 0
        for run in partition.runs(length, len(shards), rank):
            whole[(*before, _slice(run))] = part[(*before, slice(taken, taken + run.count))]
            taken += run.count
    return whole


def _slice(run: Run) -> slice:
    return slice(run.start, run.start + run.stride * run.count, run.stride)
