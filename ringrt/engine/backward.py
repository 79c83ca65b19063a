"""The backward pass of one rank: the same loop, with sums that travel behind what they are for.

What stays and what goes. Where K,V travel, the queries stay: each rank adds its part to the
travelling dk and dv, which come home at the end. Where the queries travel (q, dout, lse and
delta), K,V stay with their dk and dv, and dq travels. Either way the global out and lse drive
every step: delta = rowsum(dout · out), p = e^(score − lse). lse = ln Σ e^score has the gradient p
with respect to the scores, so one that comes in through lse, dlse, is taken off delta:
ds = p (dp − delta + dlse).

A sum for the shard of step s leaves during step s + 1, when the compute of step s is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ringrt.backend import Backend
from ringrt.device import Device
from ringrt.engine.buffers import Arrays
from ringrt.engine.compute import Pass, Tiled
from ringrt.engine.exchange import Exchange
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.rows import Rows
from ringrt.plan.schedule import Step

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Tensors:
    """One rank's inputs of the backward pass, as `Ring.attention_backward` takes them, and
    delta − dlse `[batch, q_heads, rows]`; dlse where there is one, and out where the backend needs
    it, otherwise None."""

    q: Array
    k: Array
    v: Array
    dout: Array
    lse: Array
    delta: Array
    dlse: Array | None = None
    out: Array | None = None

    @classmethod
    def placed(
        cls,
        device: Device,
        arrays: tuple[Array, Array, Array, Array, Array, Array],
        dlse: Array | None,
        problem: Problem,
        needs_out: bool,
    ) -> Tensors:
        """On a device, where it is current; `arrays` are q, k, v, dout, out and lse."""
        q, k, v, dout, out, lse = (device.place(x) for x in arrays)
        if dlse is not None:
            dlse = device.take(device.place(dlse), _ALL, 2)
        delta = device.row_delta(dout, out, problem.dtype, dlse)
        lse = device.take(lse, _ALL, 2)
        return cls(q, k, v, dout, lse, delta, dlse, out if needs_out else None)


def backward(
    tensors: Tensors,
    problem: Problem,
    steps: list[Step],
    travel: str,
    backend: Backend,
    run: Pass,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv of this rank's shards, in the dtype of q, k and v. `steps` is its part of
    the backward plan."""
    make = _KvTravels if travel == "kv" else _QTravels
    with run.computing("at the start"):
        side: _Side = make(tensors, problem, backend, run)
    exchange = Exchange(side.travelling, side.axes, steps, run, side.sums)
    leaving: Arrays = ()
    for done, step in enumerate(steps, start=1):
        ticket, carried, arriving = exchange.post(step, leaving)
        part: Arrays = ()
        if len(step.tiles):
            part = side.compute(exchange.present(step), step, ticket.progress)
        exchange.wait(step, ticket)
        leaving = _add_up(step, part, carried, side.sums, run.device)
        _add_arrived(step, arriving, side.sums, run.device)
        run.done(done, len(steps))
    exchange.finish()
    with run.computing("at the end"):
        dq, dk, dv = (run.device.rounded(x, problem.dtype) for x in side.finish())
    run.finish()
    return dq, dk, dv


def _add_arrived(step: Step, arrived: Arrays, sums: Arrays, device: Device) -> None:
    """Add what came home to this rank's own sums."""
    if step.home is None:
        return
    for total, more in zip(sums, arrived, strict=True):
        device.add_rows(total, step.home.rows.within(Rows.all(total.shape[1])), more, _ALL)


def _add_up(step: Step, part: Arrays, carried: Arrays, like: Arrays, device: Device) -> Arrays:
    """The sums for the step's shard, to leave in the next step: what was carried here and this
    rank's part, each at its own rows."""
    if not step.sums:
        return ()
    if part and not carried and step.sums == step.rows:
        return part
    if step.carry and step.carry.rows == step.sums:
        totals = list(carried)
    else:
        shapes = [(x.shape[0], step.sums.count, *x.shape[2:]) for x in like]
        pairs = zip(shapes, like, strict=True)
        totals = [device.zeros(shape, x.dtype.name) for shape, x in pairs]
    for index, total in enumerate(totals):
        if step.carry and total is not carried[index]:
            device.add_rows(total, step.carry.rows.within(step.sums), carried[index], _ALL)
        if part:
            to, rows = step.adds.within(step.sums), step.adds.within(step.rows)
            device.add_rows(total, to, part[index], rows)
    return tuple(totals)


Progress = Callable[[], object]


class _Side(Protocol):
    """Which tensors travel. `sums` are the sums of the own shard, at home: dk and dv, or dq."""

    travelling: Arrays
    axes: tuple[int, ...]
    sums: Arrays

    def compute(self, present: Arrays, step: Step, progress: Progress) -> Arrays:
        """Add the gradients of the present shard's tiles to what stays; return the part of its
        sums, at its rows in compact order. At home that part is added to `sums`."""

    def finish(self) -> tuple[Array, Array, Array]:
        """dq, dk and dv, in the dtype of sums."""


class _KvTravels:
    """q, dout, lse and delta stay, packed once by the backend, and dq with them."""

    def __init__(self, tensors: Tensors, problem: Problem, backend: Backend, run: Pass) -> None:
        self._backend, self._run, self._sums_dtype = backend, run, problem.state_dtype
        t, stream = tensors, run.device.stream
        self._grads = backend.begin_backward(t.q, t.dout, t.lse, t.delta, problem, stream, t.out)
        self.travelling: Arrays = (t.k, t.v)
        self.axes: tuple[int, ...] = (1, 1)
        self.sums: Arrays = self._zeros_like(self.travelling)

    def compute(self, present: Arrays, step: Step, progress: Progress) -> Arrays:
        k, v = present
        dk, dv = self.sums if step.index == 0 else self._zeros_like(present)
        accumulate, stream = self._backend.accumulate_backward, self._run.device.stream
        add: Tiled = lambda tiles: accumulate(self._grads, k, v, dk, dv, tiles, stream)  # noqa: E731
        self._run.step(step, progress, add)
        return dk, dv

    def finish(self) -> tuple[Array, Array, Array]:
        dk, dv = self.sums
        return self._backend.finish_backward(self._grads, self._run.device.stream), dk, dv

    def _zeros_like(self, arrays: Arrays) -> Arrays:
        return tuple(self._run.device.zeros(x.shape, self._sums_dtype) for x in arrays)


class _QTravels:
    """k and v stay, and dk and dv with them."""

    def __init__(self, tensors: Tensors, problem: Problem, backend: Backend, run: Pass) -> None:
        self._backend, self._problem, self._run, t = backend, problem, run, tensors
        zeros = run.device.zeros
        self._k, self._v = t.k, t.v
        self._dk, self._dv = (zeros(x.shape, problem.state_dtype) for x in (t.k, t.v))
        self.travelling: Arrays = (t.q, t.dout, t.lse, t.delta)
        self.axes: tuple[int, ...] = (1, 1, 2, 2)
        self.sums: Arrays = (zeros(t.q.shape, problem.state_dtype),)

    def compute(self, present: Arrays, step: Step, progress: Progress) -> Arrays:
        backend, run, stream = self._backend, self._run, self._run.device.stream
        when = "in ring step"
        with run.computing(when, step.index):
            q, dout, lse, delta = present
            grads = backend.begin_backward(q, dout, lse, delta, self._problem, stream)
        fixed = self._k, self._v, self._dk, self._dv
        run.step(
            step, progress, lambda tiles: backend.accumulate_backward(grads, *fixed, tiles, stream)
        )
        with run.computing(when, step.index):
            dq = backend.finish_backward(grads, stream)
        if step.index == 0:
            run.device.add_rows(self.sums[0], _ALL, dq, _ALL)
        return (dq,)

    def finish(self) -> tuple[Array, Array, Array]:
        return self.sums[0], self._dk, self._dv
