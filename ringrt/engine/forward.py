"""The forward pass of one rank: the double-buffered loop."""

from __future__ import annotations

from ringrt.backend import Backend
from ringrt.engine.compute import Pass
from ringrt.engine.exchange import Exchange
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.schedule import Step


def forward(
    q: Array,
    k: Array,
    v: Array,
    sink: Array | None,
    problem: Problem,
    steps: list[Step],
    backend: Backend,
    run: Pass,
) -> tuple[Array, Array]:
    """out `[batch, rows, q_heads, value_dim]` and lse `[batch, q_heads, rows]` of this rank's
    queries. q, k, v are its shards, sink the logits `[q_heads]`, a NumPy array; `steps` is its
    part of the plan."""
    exchange = Exchange((k, v), (1, 1), steps, run)
    stream = run.device.stream
    with run.computing("at the start"):
        state = backend.begin(q, problem, sink, stream)
    for done, step in enumerate(steps, start=1):
        ticket, _, _ = exchange.post(step)
        k_now, v_now = exchange.present(step)
        run.step(
            step,
            ticket.progress,
            lambda tiles, k=k_now, v=v_now: backend.accumulate(state, k, v, tiles, stream),  # type: ignore[misc]
        )
        exchange.wait(step, ticket)
        run.done(done, len(steps))
    exchange.finish()
    with run.computing("at the end"):
        out, lse = backend.finish(state, stream)
        _check_shapes(q, problem, out, lse)
    run.finish()
    return out, lse


def _check_shapes(q: Array, problem: Problem, out: Array, lse: Array) -> None:
    """A plugin's mistake is told here, and not wherever its result does not fit."""
    batch, rows, heads, _ = q.shape
    for name, x, expected in (
        ("out", out, (batch, rows, heads, problem.value_dim)),
        ("lse", lse, (batch, heads, rows)),
    ):
        if x.shape != expected:
            raise ValueError(f"{name} has shape {x.shape} in place of {expected}")
