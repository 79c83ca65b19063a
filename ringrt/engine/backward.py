"""The backward pass of one rank: the same loop, with sums that travel behind what they are for.

What stays and what goes. Where K,V travel, the queries stay: each rank adds its part to the
travelling dk and dv, which come home at the end. Where the queries travel (q, dout, lse and
delta), K,V stay with their dk and dv, and dq travels. Either way the global out and lse drive
every step: delta = rowsum(dout · out), p = e^(score − lse).

A sum for the shard of step s leaves during step s + 1, when the compute of step s is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ringrt.backend import Backend
from ringrt.engine.compute import Computing, portions
from ringrt.engine.exchange import Arrays, Exchange, take
from ringrt.engine.forward import OnStep
from ringrt.engine.stats import PassStats
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.rows import Rows
from ringrt.plan.schedule import Step
from ringrt.plan.tiles import TileTable
from ringrt.transport import Transport


@dataclass(frozen=True, slots=True)
class Tensors:
    """One rank's inputs of the backward pass, as `Ring.attention_backward` takes them, and
    delta `[batch, q_heads, rows]`."""

    q: Array
    k: Array
    v: Array
    dout: Array
    lse: Array
    delta: Array


def row_delta(dout: Array, out: Array, dtype: str) -> Array:
    """delta = rowsum(dout · out) `[batch, heads, rows]`, summed in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.einsum("brhd,brhd->bhr", dout.astype(np.float64), out.astype(np.float64))
        return np.ascontiguousarray(product.astype(dtype))


def sink_gradient(sink: Array, lse: Array, delta: Array, seen: Array) -> Array:
    """This rank's part of dsink `[heads]`, float64: the sink's weight e^(sink − lse) in a row,
    times (0 − delta), for its value is 0. `seen` bool `[rows]` are the rows that see a key: in
    the others out is 0 whatever dout, so the sink changes nothing."""
    shift = sink.astype(np.float64)[None, :, None] - lse[..., seen].astype(np.float64)
    gradient: Array = -(np.exp(shift) * delta[..., seen].astype(np.float64)).sum(axis=(0, 2))
    return np.where(sink == -np.inf, 0, gradient)


def backward(
    tensors: Tensors,
    problem: Problem,
    steps: list[Step],
    travel: str,
    backend: Backend,
    transport: Transport,
    stats: PassStats,
    timeout: float,
    on_step: OnStep | None = None,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv of this rank's shards, in the dtype of q, k and v. `steps` is its part of
    the backward plan; `stats` is filled in."""
    begin = time.perf_counter()
    make = _KvTravels if travel == "kv" else _QTravels
    with Computing(stats, "at the start"):
        side: _Side = make(tensors, problem, backend)
    exchange = Exchange(side.travelling, side.axes, steps, transport, stats, side.sums)
    leaving: Arrays = ()
    for done, step in enumerate(steps, start=1):
        ticket, carried, arriving = exchange.post(step, leaving)
        part: Arrays = ()
        if len(step.tiles):
            parts = _Paced(step, transport, stats, ticket.progress)
            part = side.compute(exchange.present(step), parts, at_home=step.index == 0)
        exchange.wait(ticket, timeout)
        with np.errstate(invalid="ignore", over="ignore"):
            leaving = _add_up(step, part, carried, side.sums)
            _add_arrived(step, arriving, side.sums)
        stats.steps += 1
        if on_step:
            on_step(done, len(steps))
    with Computing(stats, "at the end"):
        dq, dk, dv = side.finish()
    stats.seconds = time.perf_counter() - begin
    with np.errstate(over="ignore"):
        dtype = tensors.q.dtype
        return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)


def _add_arrived(step: Step, arrived: Arrays, sums: Arrays) -> None:
    """Add what came home to this rank's own sums."""
    if step.home is None:
        return
    for total, more in zip(sums, arrived, strict=True):
        total[:, step.home.rows.within(Rows.all(total.shape[1]))] += more


def _add_up(step: Step, part: Arrays, carried: Arrays, like: Arrays) -> Arrays:
    """The sums for the step's shard, to leave in the next step: what was carried here and this
    rank's part, each at its own rows."""
    if not step.sums:
        return ()
    if part and not carried and step.sums == step.rows:
        return part
    totals = []
    for index, x in enumerate(like):
        total = np.zeros((x.shape[0], step.sums.count, *x.shape[2:]), x.dtype)
        if step.carry:
            total[:, step.carry.rows.within(step.sums)] = carried[index]
        if part:
            total[:, step.adds.within(step.sums)] += take(part[index], step.adds.within(step.rows))
        totals.append(total)
    return tuple(totals)


class _Paced:
    """The tiles of a step, in the portions between which the transport makes progress."""

    def __init__(
        self, step: Step, transport: Transport, stats: PassStats, progress: Callable[[], bool]
    ) -> None:
        self._step, self._transport, self._stats = step, transport, stats
        self._progress = progress

    def run(self, compute: Callable[[TileTable], None]) -> None:
        """Call `compute` on every portion."""
        for tiles in portions(self._step, self._transport):
            with self.timed():
                compute(tiles)
            self._progress()

    def timed(self) -> Computing:
        """Time in the backend, named by the step."""
        return Computing(self._stats, f"in ring step {self._step.index}")


class _Side(Protocol):
    """Which tensors travel. `sums` are the sums of the own shard, at home: dk and dv, or dq."""

    travelling: Arrays
    axes: tuple[int, ...]
    sums: Arrays

    def compute(self, present: Arrays, paced: _Paced, at_home: bool) -> Arrays:
        """Add the gradients of the present shard's tiles to what stays; return the part of its
        sums, at its rows in compact order. At home that part is added to `sums`."""

    def finish(self) -> tuple[Array, Array, Array]:
        """dq, dk and dv, in the dtype of sums."""


class _KvTravels:
    """q, dout, lse and delta stay, packed once by the backend, and dq with them."""

    def __init__(self, tensors: Tensors, problem: Problem, backend: Backend) -> None:
        self._backend = backend
        t = tensors
        self._grads = backend.begin_backward(t.q, t.dout, t.lse, t.delta, problem)
        self.travelling: Arrays = (t.k, t.v)
        self.axes: tuple[int, ...] = (1, 1)
        self.sums: Arrays = tuple(np.zeros(x.shape, problem.state_dtype) for x in (t.k, t.v))

    def compute(self, present: Arrays, paced: _Paced, at_home: bool) -> Arrays:
        k, v = present
        dtype = self.sums[0].dtype
        dk, dv = self.sums if at_home else (np.zeros(x.shape, dtype) for x in present)
        accumulate = self._backend.accumulate_backward
        paced.run(lambda tiles: accumulate(self._grads, k, v, dk, dv, tiles))
        return dk, dv

    def finish(self) -> tuple[Array, Array, Array]:
        dk, dv = self.sums
        return self._backend.finish_backward(self._grads), dk, dv


class _QTravels:
    """k and v stay, and dk and dv with them."""

    def __init__(self, tensors: Tensors, problem: Problem, backend: Backend) -> None:
        self._backend, self._problem, t = backend, problem, tensors
        self._k, self._v = t.k, t.v
        self._dk, self._dv = (np.zeros(x.shape, problem.state_dtype) for x in (t.k, t.v))
        self.travelling: Arrays = (t.q, t.dout, t.lse, t.delta)
        self.axes: tuple[int, ...] = (1, 1, 2, 2)
        self.sums: Arrays = (np.zeros(t.q.shape, problem.state_dtype),)

    def compute(self, present: Arrays, paced: _Paced, at_home: bool) -> Arrays:
        q, dout, lse, delta = present
        with paced.timed():
            grads = self._backend.begin_backward(q, dout, lse, delta, self._problem)
        accumulate = self._backend.accumulate_backward
        kv_and_sums = self._k, self._v, self._dk, self._dv
        paced.run(lambda tiles: accumulate(grads, *kv_and_sums, tiles))
        with paced.timed():
            dq = self._backend.finish_backward(grads)
        if at_home:
            with np.errstate(invalid="ignore"):
                self.sums[0][...] += dq
        return (dq,)

    def finish(self) -> tuple[Array, Array, Array]:
        return self.sums[0], self._dk, self._dv
