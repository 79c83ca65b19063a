"""Rings beside the bare kernel, beside one process with all cores, and beside one another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ringrt.bench.cases import Case, Settings
from ringrt.bench.check import check
from ringrt.bench.interleave import Contender, compare, interleave, ratio
from ringrt.bench.kernel import check_against_peer
from ringrt.bench.measurement import Measurement, summary
from ringrt.bench.problems import Inputs, Verbs, backend, inputs
from ringrt.bench.team import TIMEOUT_S, Process, Ranks, Team
from ringrt.plan.partition import Array
from ringrt.ring import Ring

#: Calls in a row, where nothing is computed: one alone is too short to time.
_CALLS = 50
#: What a pass gives.
NAMES = {"forward": ("out",), "backward": ("dq", "dk", "dv"), "both": ("out", "dq", "dk", "dv")}


def run(case: Case, settings: Settings) -> Iterator[Measurement]:
    """By kind."""
    if case.kind == "steps":
        yield from _steps(case, settings)
        return
    measure: Callable[[Case, Settings], Measurement] = {
        "one rank": _beside_kernel,
        "two ranks": _beside_kernel,
        "partitions": _partitions,
    }[case.kind]
    yield measure(case, settings)


class Shards:
    """A pass of every rank over its own shards, which it holds as they would come from a model:
    contiguous. What backward is of is computed before."""

    def __init__(self, ranks: Ranks, given: Inputs, **masking: Any) -> None:
        self._ranks, self._masking = ranks, masking
        self._given = given
        self._held: dict[int, tuple[Array, ...]] = {}
        self._results: dict[int, tuple[Array, Array]] = {}
        ranks.do(self._prepare)

    def seconds(self, way: str, calls: int = 1) -> float:
        """The mean of some calls in a row on every rank."""

        def work(ring: Ring) -> None:
            for _ in range(calls):
                self._pass(way, ring)

        return self._ranks.seconds(work) / calls

    def whole(self, way: str) -> list[Array]:
        """What a pass gives, put together."""
        return self._ranks.do(lambda ring: [ring.unshard(x) for x in self._pass(way, ring)])

    def whole_lse(self) -> Array:
        """lse of the whole sequence."""
        whole: Array = self._ranks.do(lambda ring: ring.unshard(self._results[ring.rank][1], 2))
        return whole

    def _prepare(self, ring: Ring) -> None:
        given = self._given
        cut = (ring.cut(x) for x in (given.q, given.k, given.v, given.dout))
        self._held[ring.rank] = tuple(map(np.ascontiguousarray, cut))
        q, k, v, _ = self._held[ring.rank]
        self._results[ring.rank] = ring.attention(q, k, v, **self._masking)

    def _pass(self, way: str, ring: Ring) -> tuple[Array, ...]:
        q, k, v, dout = self._held[ring.rank]
        out, lse = self._results[ring.rank]
        found: tuple[Array, ...] = ()
        if way != "backward":
            out, lse = ring.attention(q, k, v, **self._masking)
            found = (out,)
        if way != "forward":
            found += ring.attention_backward(dout, q, k, v, out, lse, **self._masking)
        return found

    def check(self, way: str, right: Any) -> None:
        """`Wrong` unless a pass gives what the kernel gives for the whole sequence."""
        check(NAMES[way], self.whole(way), right, self._given.problem.dtype, "the kernel alone")


@contextlib.contextmanager
def ranks_of(case: Case, settings: Settings, partition: str = "striped") -> Iterator[Ranks]:
    """The ranks that a case is for, one on each of its cores."""
    options: dict[str, Any] = {"partition": partition, "backend": settings.backend}
    if case.processes == "one":
        with Team(case.cores, **options) as team:
            yield team
        return
    join = Ring.from_mpi if case.processes == "mpi" else Ring.from_process_group
    with join(threads=1, timeout=TIMEOUT_S, **options) as ring:
        yield Process(ring)


def _beside_kernel(case: Case, settings: Settings) -> Measurement:
    """Of one rank, ring over kernel; of more, one process of as many threads over the ring."""
    shape = case.shape
    given = inputs(shape)
    alone = Verbs(backend(settings.backend, case.cores), given)
    check_against_peer(given, case, alone)
    with ranks_of(case, settings) as ranks:
        shards = Shards(ranks, given, causal=shape.causal)
        call = alone.call(shape.way)
        result = call()
        shards.check(shape.way, result[:1] if shape.way == "forward" else result)
        contenders = [
            Contender("ring", partial(shards.seconds, shape.way)),
            Contender("kernel", partial(ranks.alone, call)),
        ]
        times = interleave(contenders, settings.repeats)
    names = ("ring", "kernel") if case.kind == "one rank" else ("kernel", "ring")
    return case.row(**summary(ratio(times, *names)), times=times)


def _partitions(case: Case, settings: Settings) -> Measurement:
    """The time of contiguous shards over that of striped ones."""
    shape, names = case.shape, ("contiguous", "striped")
    given = inputs(shape)
    alone = Verbs(backend(settings.backend, case.cores), given)
    check_against_peer(given, case, alone)
    result = alone.call(shape.way)()
    with contextlib.ExitStack() as stack:
        contenders = []
        for name in names:
            shards = Shards(
                stack.enter_context(ranks_of(case, settings, name)), given, causal=shape.causal
            )
            shards.check(shape.way, result[:1] if shape.way == "forward" else result)
            contenders.append(Contender(name, partial(shards.seconds, shape.way)))
        times = interleave(contenders, settings.repeats)
    return case.row(**summary(ratio(times, *names)), times=times)


#: Every rank needs the rows of all, or none but its own: a pass of all steps, and one of a single
#: step, alike in all else.
_WINDOWS = (None, 0), (0, 0)


def _steps(case: Case, settings: Settings) -> Iterator[Measurement]:
    """µs of a ring step in which nothing is computed: what a call takes longer than one of a single
    step on the same ranks, over the steps that it has more: p − 1, and in backward one besides, in
    which the last sums come home. Beside it, µs of the call of a single step, in which the ranks
    agree and nothing moves."""
    count: int = case.detail["ranks"]
    shape, names = case.shape, ("all steps", "one step")
    further = count if shape.way == "backward" else count - 1
    with Team(count, backend="null") as team:
        contenders = []
        for name, window in zip(names, _WINDOWS, strict=True):
            shards = Shards(team, inputs(shape), window=window)
            contenders.append(Contender(name, partial(shards.seconds, shape.way, _CALLS)))
        times = interleave(contenders, settings.repeats)

    def of_a_step(more: float, one: float) -> float:
        return 1e6 * (more - one) / further

    def of_a_call(_: float, one: float) -> float:
        return 1e6 * one

    step, call = (summary(compare(times, *names, each)) for each in (of_a_step, of_a_call))
    yield case.row(unit="µs a step", threads=count, times=times, **step)
    beside = case.row(unit="µs a call", threads=count, target=None, **call)
    yield replace(beside, name=case.name.replace("ring step", "ring call"))
