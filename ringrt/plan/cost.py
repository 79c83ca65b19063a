"""What a plan costs: bytes, multiply-adds and memory, per rank.

Twice over, on purpose. `count_steps` adds up what a plan's steps say; `ring_bytes_sent` and
`peak_kv_rows` are closed formulas that never look at a step. Tests, and the table that
`ringrt run` prints, hold the two and the runtime's own counters to one another.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringrt.plan.schedule import HOME, Plan, Step


@dataclass(frozen=True, slots=True)
class RankCost:
    """One rank's share: hops and bytes of K,V each way, visible (query, key) pairs, FLOPs
    (a multiply-add is two), and the most bytes of K,V it holds at once."""

    steps: int
    bytes_sent: int
    bytes_received: int
    visible_pairs: int
    flops: int
    peak_kv_bytes: int


def count_steps(plan: Plan, rank: int) -> RankCost:
    """The rank's cost, added up over its steps."""
    steps, row = plan.steps(rank), plan.problem.kv_row_bytes
    pairs = sum(int(step.tiles.visible_pairs().sum()) for step in steps)
    return RankCost(
        steps=len(steps),
        bytes_sent=row * sum(step.send.rows for step in steps if step.send),
        bytes_received=row * sum(step.recv.rows for step in steps if step.recv),
        visible_pairs=pairs,
        flops=pairs * plan.problem.flops_per_pair,
        peak_kv_bytes=row * (steps[0].rows + sum(slot_rows(steps).values())),
    )


def slot_rows(steps: list[Step]) -> dict[int, int]:
    """Rows each slot must hold: the largest shard that visits it."""
    rows: dict[int, int] = {}
    for step in steps:
        if step.recv and step.recv.slot != HOME:
            rows[step.recv.slot] = max(rows.get(step.recv.slot, 0), step.recv.rows)
    return rows


def ring_bytes_sent(plan: Plan, rank: int) -> int:
    """By the formula: a rank sends every shard on but the one its successor began with,
    so kv_length − n(u+1) rows; (p − 1)/p of the whole K,V where shards are even."""
    if plan.size == 1:
        return 0
    successor = plan.partition.count(plan.problem.kv_length, plan.size, (rank + 1) % plan.size)
    return (plan.problem.kv_length - successor) * plan.problem.kv_row_bytes


def peak_kv_bytes(plan: Plan, rank: int) -> int:
    """By the formula: the home shard, and one slot for each parity of the visiting shards,
    as large as its largest: at most three shards, whatever p is."""
    rows = plan.kv_counts()
    visits = [rows[(rank - s) % plan.size] for s in range(1, plan.size)]
    slots = max(visits[0::2], default=0) + max(visits[1::2], default=0)
    return (rows[rank] + slots) * plan.problem.kv_row_bytes
