"""The forward pass of one rank: the double-buffered loop."""

from __future__ import annotations

import time
from collections.abc import Callable

from ringrt.backend import Backend
from ringrt.engine.compute import Computing, portions
from ringrt.engine.exchange import Exchange
from ringrt.engine.stats import PassStats
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.schedule import Step
from ringrt.transport import Transport

#: Called after each step with (steps done, steps in all).
OnStep = Callable[[int, int], None]


def forward(
    q: Array,
    k: Array,
    v: Array,
    sink: Array | None,
    problem: Problem,
    steps: list[Step],
    backend: Backend,
    transport: Transport,
    stats: PassStats,
    timeout: float,
    on_step: OnStep | None = None,
) -> tuple[Array, Array]:
    """out `[batch, rows, q_heads, value_dim]` and lse `[batch, q_heads, rows]` of this rank's
    queries. q, k, v are its shards, sink the logits `[q_heads]`; `steps` is its part of the
    plan; `stats` is filled in."""
    begin = time.perf_counter()
    exchange = Exchange((k, v), (1, 1), steps, transport, stats)
    with Computing(stats, "at the start"):
        state = backend.begin(q, problem, sink)
    for done, step in enumerate(steps, start=1):
        ticket, _, _ = exchange.post(step)
        k_now, v_now = exchange.present(step)
        for tiles in portions(step, transport):
            with Computing(stats, f"in ring step {step.index}"):
                backend.accumulate(state, k_now, v_now, tiles)
            ticket.progress()
        exchange.wait(ticket, timeout)
        stats.steps += 1
        if on_step:
            on_step(done, len(steps))
    with Computing(stats, "at the end"):
        result = backend.finish(state)
    stats.seconds = time.perf_counter() - begin
    return result
