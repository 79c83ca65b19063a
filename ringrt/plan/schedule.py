"""The plan: per rank, which shard is present at each step, its tiles, and what moves.

A plan is pure data. The engine executes it, the cost model prices it, the CLI prints and draws
it and the tests check it, for 1024 ranks as easily as for two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ringrt.errors import PlanError
from ringrt.plan.needs import ShardNeeds, all_needs
from ringrt.plan.partition import Partition, Runs
from ringrt.plan.problem import Problem
from ringrt.plan.rows import Rows
from ringrt.plan.tiles import EMPTY, TileTable, lower

#: The "slot" of the shard that a rank was given; visiting shards lie in slots 0 and 1.
HOME = -1


@dataclass(frozen=True, slots=True)
class Hop:
    """Some rows of one shard on their way to or from a peer. `slot` is where the rows lie that
    they are taken from (a send) or arrive (a receive)."""

    peer: int
    shard: int
    rows: Rows
    slot: int = HOME


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank: compute `tiles` on the `rows` of `shard` that lie in `slot`, while
    `send` leaves and `recv` arrives for the next step. Tiles index the rows in compact order.
    A hop without rows is not made, a step in which nothing happens is left out.

    In backward, what was added for the shard of the step before (`grad_send`) leaves with the
    others. `carry` arrives: the sum so far for this step's shard, to which this rank adds its
    part, at the rows `adds`, giving the sum at the rows `sums`. `home` arrives: a sum for this
    rank's own shard.
    """

    index: int
    shard: int
    rows: Rows
    slot: int
    tiles: TileTable
    send: Hop | None = None
    recv: Hop | None = None
    adds: Rows = field(default_factory=lambda: Rows.all(0))
    sums: Rows = field(default_factory=lambda: Rows.all(0))
    grad_send: Hop | None = None
    carry: Hop | None = None
    home: Hop | None = None

    @property
    def moves(self) -> bool:
        """Something leaves or arrives."""
        return any((self.send, self.recv, self.grad_send, self.carry, self.home))

    @property
    def idle(self) -> bool:
        """Nothing is computed and nothing moves."""
        return len(self.tiles) == 0 and not self.moves


@dataclass(frozen=True, slots=True)
class Plan:
    """A problem under a partition, over `size` ranks, by a schedule: "ring", where shards are
    handed on from neighbour to neighbour, or "direct", where each rank gets what it needs of a
    shard from its owner. `travel` is what moves: "kv", or in backward possibly "q".

    Ranks are built when asked for, each by itself. `why` says how schedule and travel came
    about. Made by `ringrt.plan.plan`."""

    problem: Problem
    partition: Partition
    size: int
    schedule: str
    travel: str = "kv"
    why: str = ""

    def q_runs(self, rank: int) -> Runs:
        """Positions of the rank's query rows."""
        return self.partition.runs(self.problem.q_length, self.size, rank)

    def kv_runs(self, rank: int) -> Runs:
        """Positions of the rank's key and value rows."""
        return self.partition.runs(self.problem.kv_length, self.size, rank)

    def kv_counts(self) -> list[int]:
        """Key rows of every shard."""
        return self.partition.counts(self.problem.kv_length, self.size)

    def needs(self) -> tuple[ShardNeeds, ...]:
        """For each shard that travels, who needs what of it."""
        problem = self.problem
        return all_needs(
            problem.mask,
            self.partition,
            problem.q_length,
            problem.kv_length,
            self.size,
            self.travel,
        )

    def steps(self, rank: int) -> list[Step]:
        """The rank's forward steps, in order; K,V travel."""
        return [step for step in self._steps(rank, grads=False) if not step.idle]

    def backward_steps(self, rank: int) -> list[Step]:
        """The rank's backward steps, in order; what travels is `travel`."""
        return [step for step in self._steps(rank, grads=True) if not step.idle]

    def _steps(self, rank: int, grads: bool) -> list[Step]:
        if not 0 <= rank < self.size:
            raise PlanError(f"rank {rank} is not in a plan for {self.size} ranks")
        builder = _Builder(self, rank)
        count = self.size + 1 if grads else self.size
        return [builder.step(index, grads) for index in range(count)]


class _Builder:
    """The steps of one rank. At step s rank u works on shard (u − s) mod p, in either schedule
    (for the ring: Liu et al. 2023, "Ring Attention with Blockwise Transformers"). Both ends of
    a hop derive it from the same needs, so they agree."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.size = plan, rank, plan.size
        self.needs = plan.needs()
        self.ring = plan.schedule == "ring"

    def step(self, index: int, grads: bool) -> Step:
        """Step `index`; number p computes nothing and only brings sums home."""
        shard = (self.rank - index) % self.size
        slot = self._slot(index)
        rows = self._present(index)
        step = Step(
            index=index,
            shard=shard,
            rows=rows,
            slot=slot,
            tiles=self._tiles(index, rows),
            send=self._send(index),
            recv=self._recv(index),
        )
        if not grads:
            return step
        return replace(
            step,
            adds=self._adds(index),
            sums=self._sums(index),
            grad_send=self._grad_send(index),
            carry=self._carry(index),
            home=self._home(index),
        )

    def _owner(self, index: int) -> int:
        return (self.rank - index) % self.size

    def _slot(self, index: int) -> int:
        """Step 0 computes at home; visitors take the two slots in turn."""
        return HOME if index == 0 else (index - 1) % 2

    def _rank_at(self, shard: int, distance: int) -> int:
        return (shard + distance) % self.size

    def _shard_rows(self, shard: int) -> Rows:
        runs = self.plan.kv_runs(shard) if self.plan.travel == "kv" else self.plan.q_runs(shard)
        return Rows.all(sum(run.count for run in runs))

    def _present(self, index: int) -> Rows:
        """Rows of the step's shard that lie here: all at home; of a visitor, what this rank or
        (round the ring) a later one needs."""
        if index == 0:
            return self._shard_rows(self.rank)
        if index >= self.size:
            return Rows.all(0)
        needs = self.needs[self._owner(index)]
        return needs.beyond(index) if self.ring else needs.at(index)

    def _tiles(self, index: int, rows: Rows) -> TileTable:
        if index >= self.size:
            return EMPTY
        other = self._owner(index)
        mask, here = self.plan.problem.mask, None if index == 0 else rows
        if self.plan.travel == "kv":
            tiles = lower(mask, self.plan.q_runs(self.rank), self.plan.kv_runs(other))
            return tiles.compact(None, here)
        tiles = lower(mask, self.plan.q_runs(other), self.plan.kv_runs(self.rank))
        return tiles.compact(here, None)

    def _send(self, index: int) -> Hop | None:
        """What leaves during step `index`, to be present at its receiver in the next step."""
        following = index + 1
        if following >= self.size:
            return None
        if self.ring:
            shard = self._owner(index)
            rows = self.needs[shard].beyond(following)
            return _hop(self._rank_at(shard, following), shard, rows, self._slot(index))
        rows = self.needs[self.rank].at(following)
        return _hop(self._rank_at(self.rank, following), self.rank, rows)

    def _recv(self, index: int) -> Hop | None:
        following = index + 1
        if following >= self.size:
            return None
        shard = self._owner(following)
        peer = (self.rank - 1) % self.size if self.ring else shard
        return _hop(peer, shard, self._present(following), self._slot(following))

    def _adds(self, index: int) -> Rows:
        if index == 0 or index >= self.size:
            return Rows.all(0)
        return self.needs[self._owner(index)].at(index)

    def _sums(self, index: int) -> Rows:
        """Rows of the sum that leaves after step `index`."""
        if index == 0 or index >= self.size:
            return Rows.all(0)
        needs = self.needs[self._owner(index)]
        if not self.ring:
            return needs.at(index)
        return needs.until(index) if index <= needs.last else Rows.all(0)

    def _grad_send(self, index: int) -> Hop | None:
        """The sum of the step before: on to the next rank, or home if none adds to it."""
        before = index - 1
        if before < 1:
            return None
        shard = self._owner(before)
        onward = self.ring and before < self.needs[shard].last
        peer = self._rank_at(shard, index) if onward else shard
        return _hop(peer, shard, self._sums(before))

    def _carry(self, index: int) -> Hop | None:
        if not self.ring or not 2 <= index < self.size:
            return None
        needs = self.needs[self._owner(index)]
        if index > needs.last:
            return None
        return _hop((self.rank - 1) % self.size, self._owner(index), needs.until(index - 1))

    def _home(self, index: int) -> Hop | None:
        """A sum for the own shard, from the rank that added at distance index − 1."""
        distance = index - 1
        if distance < 1:
            return None
        needs = self.needs[self.rank]
        if self.ring:
            rows = needs.until(distance) if distance == needs.last else Rows.all(0)
        else:
            rows = needs.at(distance)
        return _hop(self._rank_at(self.rank, distance), self.rank, rows)


def _hop(peer: int, shard: int, rows: Rows, slot: int = HOME) -> Hop | None:
    return Hop(peer, shard, rows, slot) if rows else None
