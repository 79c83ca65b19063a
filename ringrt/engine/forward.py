"""The forward pass of one rank: the double-buffered loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ringrt.backend import Backend
from ringrt.engine.exchange import KvExchange
from ringrt.engine.stats import PassStats
from ringrt.errors import KernelError, RingrtError
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.schedule import Step
from ringrt.plan.tiles import TileTable
from ringrt.transport import Transport

#: A transport that moves data only when it is tested gets that many chances in a step.
_PROGRESS_CALLS = 16

#: Called after each ring step with (steps done, steps in all).
OnStep = Callable[[int, int], None]


def forward(
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    steps: list[Step],
    backend: Backend,
    transport: Transport,
    stats: PassStats,
    timeout: float,
    on_step: OnStep | None = None,
) -> tuple[Array, Array]:
    """out `[batch, rows, q_heads, value_dim]` and lse `[batch, q_heads, rows]` of this rank's
    queries. q, k, v are its shards; `steps` is its part of the plan; `stats` is filled in."""
    begin = time.perf_counter()
    exchange = KvExchange(k, v, problem, steps, transport, stats)
    with _Computing(stats, "at the start"):
        state = backend.begin(q, problem)
    for step in steps:
        ticket = exchange.post(step)
        k_now, v_now = exchange.present(step)
        for tiles in _portions(step, transport):
            with _Computing(stats, f"in ring step {step.index}"):
                backend.accumulate(state, k_now, v_now, tiles)
            ticket.progress()
        exchange.wait(ticket, timeout)
        stats.steps += 1
        if on_step:
            on_step(step.index + 1, len(steps))
    with _Computing(stats, "at the end"):
        result = backend.finish(state)
    stats.seconds = time.perf_counter() - begin
    return result


def _portions(step: Step, transport: Transport) -> Iterator[TileTable]:
    """The step's tiles, at once or with pauses in which the transport can make progress."""
    moving = step.send is not None or step.recv is not None
    count = _PROGRESS_CALLS if transport.needs_progress and moving else 1
    yield from (tiles for tiles in step.tiles.portions(count) if len(tiles))


class _Computing:
    """Counts time in the backend, and turns what goes wrong there into a `KernelError`."""

    def __init__(self, stats: PassStats, when: str) -> None:
        self._stats, self._when = stats, when

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stats.compute_s += time.perf_counter() - self._begin
        if isinstance(error, Exception) and not isinstance(error, RingrtError):
            raise KernelError(
                f"backend {self._stats.backend} failed on rank {self._stats.rank} {self._when}: "
                f"{type(error).__name__}: {error}"
            ) from error
