"""The plan: per rank, which shard is present at each ring step, its tiles, and what moves.

A plan is pure data. The engine executes it, the cost model prices it, the CLI prints it and
the tests check it, for 1024 ranks as easily as for two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringrt.errors import ConfigError, PlanError
from ringrt.plan.partition import Partition, Runs
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import TileTable, lower

#: The "slot" of the shard that a rank was given; visiting shards lie in slots 0 and 1.
HOME = -1


@dataclass(frozen=True, slots=True)
class Hop:
    """One shard's K,V rows on their way: with which peer, which shard, how many rows, and the
    buffer slot they leave from (a send) or arrive in (a receive)."""

    peer: int
    shard: int
    rows: int
    slot: int


@dataclass(frozen=True, slots=True)
class Step:
    """One ring step of one rank: compute `tiles` of the shard in `slot`, while `send` leaves
    and `recv` arrives for the next step. A hop without rows is not made."""

    index: int
    shard: int
    rows: int
    slot: int
    tiles: TileTable
    send: Hop | None
    recv: Hop | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A problem under a partition, over `size` ranks, by a schedule. Ranks are built when
    asked for, each by itself."""

    problem: Problem
    partition: Partition
    size: int
    schedule: str

    def q_runs(self, rank: int) -> Runs:
        """Positions of the rank's query rows."""
        return self.partition.runs(self.problem.q_length, self.size, rank)

    def kv_runs(self, rank: int) -> Runs:
        """Positions of the rank's key and value rows."""
        return self.partition.runs(self.problem.kv_length, self.size, rank)

    def kv_counts(self) -> list[int]:
        """Key rows of every shard."""
        return self.partition.counts(self.problem.kv_length, self.size)

    def steps(self, rank: int) -> list[Step]:
        """The rank's steps, in order."""
        if not 0 <= rank < self.size:
            raise PlanError(f"rank {rank} is not in a plan for {self.size} ranks")
        return SCHEDULES[self.schedule](self, rank)


def plan(problem: Problem, partition: Partition, size: int, schedule: str = "ring") -> Plan:
    """The plan of a problem. Raises `ConfigError` for an unknown schedule or no ranks."""
    if size < 1:
        raise ConfigError("ranks", "at least 1", size)
    name = "ring" if schedule == "auto" else schedule
    if name not in SCHEDULES:
        raise ConfigError("schedule", "auto or " + " or ".join(SCHEDULES), repr(schedule))
    return Plan(problem, partition, size, name)


def _ring(plan: Plan, rank: int) -> list[Step]:
    """At step s rank u holds shard b(u, s) = (u − s) mod p and passes it to rank u + 1
    (Liu et al. 2023, "Ring Attention with Blockwise Transformers")."""
    size, rows = plan.size, plan.kv_counts()
    q_runs = plan.q_runs(rank)
    steps = []
    for index in range(size):
        shard, following = (rank - index) % size, (rank - index - 1) % size
        slot, other = _slot_at(index), _slot_at(index + 1)
        last = index == size - 1
        steps.append(
            Step(
                index=index,
                shard=shard,
                rows=rows[shard],
                slot=slot,
                tiles=lower(plan.problem.mask, q_runs, plan.kv_runs(shard)),
                send=None if last else _hop((rank + 1) % size, shard, rows[shard], slot),
                recv=None if last else _hop((rank - 1) % size, following, rows[following], other),
            )
        )
    return steps


def _slot_at(index: int) -> int:
    """Step 0 computes on the home shard; visiting shards take the two slots in turn."""
    return HOME if index == 0 else (index - 1) % 2


def _hop(peer: int, shard: int, rows: int, slot: int) -> Hop | None:
    return Hop(peer, shard, rows, slot) if rows else None


#: The schedules that ringrt brings, by name.
SCHEDULES: dict[str, Callable[[Plan, int], list[Step]]] = {"ring": _ring}
