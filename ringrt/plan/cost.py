"""What a plan costs: bytes, multiply-adds and memory.

Twice over, on purpose. `count_steps` adds up what the steps of one rank say; `traffic` is the
whole plan's, from the needs alone, and `ring_bytes_sent` and `peak_kv_bytes` are closed
formulas for a mask that leaves nothing out. Tests hold them and the runtime's own counters to one
another, and `ringrt run` prints what was counted beside what was planned.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringrt.plan.problem import ITEMSIZE, Problem
from ringrt.plan.rows import Rows
from ringrt.plan.schedule import Hop, Plan, Step


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and messages that all ranks together send in a pass."""

    bytes: int
    hops: int


@dataclass(frozen=True, slots=True)
class RankCost:
    """One rank's share: steps, bytes each way, visible (query, key) pairs, FLOPs (a
    multiply-add is two), and the most bytes of travelling tensors it holds at once: its home
    shard, the slots, and what has to be packed to be sent."""

    steps: int
    bytes_sent: int
    bytes_received: int
    visible_pairs: int
    flops: int
    peak_kv_bytes: int


def payload_bytes(problem: Problem, travel: str) -> int:
    """Bytes of one travelling row: of k and v, or of q, dout, lse and delta."""
    return problem.kv_row_bytes if travel == "kv" else problem.q_row_bytes


def sum_bytes(problem: Problem, travel: str) -> int:
    """Bytes of one row of travelling sums: of dk and dv, or of dq."""
    return problem.dkv_row_bytes if travel == "kv" else problem.dq_row_bytes


def traffic(plan: Plan, backward: bool = False) -> Traffic:
    """What all ranks send, from who needs what."""
    rows = hops = sums = sum_hops = 0
    for needs in plan.needs():
        more, moves = needs.moved(plan.schedule)
        rows, hops = rows + more, hops + moves
        if backward:
            more, moves = needs.returned(plan.schedule)
            sums, sum_hops = sums + more, sum_hops + moves
    problem = plan.problem
    total = rows * payload_bytes(problem, plan.travel) + sums * sum_bytes(problem, plan.travel)
    return Traffic(total, hops + sum_hops)


def least_bytes(plan: Plan) -> int:
    """The least that the partition allows in forward: each needed row once to each rank that
    needs it."""
    rows = sum(needs.moved("direct")[0] for needs in plan.needs())
    return rows * payload_bytes(plan.problem, plan.travel)


def count_steps(plan: Plan, rank: int, backward: bool = False) -> RankCost:
    """The rank's cost, added up over its steps."""
    steps = plan.backward_steps(rank) if backward else plan.steps(rank)
    problem = plan.problem
    row, sum_row = payload_bytes(problem, plan.travel), sum_bytes(problem, plan.travel)

    def moved(hops: list[Hop | None], each: int) -> int:
        return each * sum(hop.rows.count for hop in hops if hop)

    pairs = sum(int(step.tiles.visible_pairs().sum()) for step in steps)
    sent = moved([s.send for s in steps], row) + moved([s.grad_send for s in steps], sum_row)
    got = moved([s.recv for s in steps], row)
    got += moved([s.carry for s in steps] + [s.home for s in steps], sum_row)
    return RankCost(
        steps=len(steps),
        bytes_sent=sent,
        bytes_received=got,
        visible_pairs=pairs,
        flops=pairs * problem.flops_per_pair,
        peak_kv_bytes=held_bytes(plan, rank, steps),
    )


def held_bytes(plan: Plan, rank: int, steps: list[Step]) -> int:
    """Most bytes of the travelling tensors that the rank holds: home, slots, packed."""
    length = plan.problem.kv_length if plan.travel == "kv" else plan.problem.q_length
    home = plan.partition.count(length, plan.size, rank)
    rows = home + sum(slot_rows(steps).values())
    return rows * payload_bytes(plan.problem, plan.travel) + packed_bytes(plan, home, steps)


def slot_rows(steps: list[Step]) -> dict[int, int]:
    """Rows each slot must hold: the most that visit it."""
    rows: dict[int, int] = {}
    for step in steps:
        if step.recv:
            slot = step.recv.slot
            rows[slot] = max(rows.get(slot, 0), step.recv.rows.count)
    return rows


def packed_bytes(plan: Plan, home: int, steps: list[Step]) -> int:
    """Most bytes that are packed for one send, where it takes only a part of what lies there.
    Rows side by side need no packing, unless those of several batches (or, of lse and delta,
    several heads) lie apart."""
    problem, most = plan.problem, 0
    for step in steps:
        if step.send is None:
            continue
        whole = Rows.all(home) if step.send.slot < 0 else step.rows
        if step.send.rows == whole:
            continue
        each = payload_bytes(problem, plan.travel)
        if problem.batch == 1 and isinstance(step.send.rows.within(whole), slice):
            statistics = 2 * problem.q_heads * ITEMSIZE[problem.state_dtype]
            each = statistics if plan.travel == "q" and problem.q_heads > 1 else 0
        most = max(most, step.send.rows.count * each)
    return most


def ring_bytes_sent(plan: Plan, rank: int) -> int:
    """By the formula, where every rank needs every key: a rank sends every shard on but the one
    its successor began with, so kv_length − n(u+1) rows; (p − 1)/p of an even K,V."""
    if plan.size == 1:
        return 0
    successor = plan.partition.count(plan.problem.kv_length, plan.size, (rank + 1) % plan.size)
    return (plan.problem.kv_length - successor) * plan.problem.kv_row_bytes


def peak_kv_bytes(plan: Plan, rank: int) -> int:
    """By the formula, where every rank needs every key: the home shard, and one slot for each
    parity of the visiting shards, as large as its largest: at most three shards, whatever p."""
    rows = plan.kv_counts()
    visits = [rows[(rank - s) % plan.size] for s in range(1, plan.size)]
    slots = max(visits[0::2], default=0) + max(visits[1::2], default=0)
    return (rows[rank] + slots) * plan.problem.kv_row_bytes
