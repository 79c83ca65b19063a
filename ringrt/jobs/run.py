"""One rank's part of a job: read its rows, compute, check, write, report."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
from pydantic import TypeAdapter

from ringrt.device.host import HOST
from ringrt.engine.agree import agree, gather
from ringrt.engine.compute import OnStep
from ringrt.engine.stats import PassStats
from ringrt.errors import ConfigError
from ringrt.inputs import Shapes
from ringrt.jobs.load import LoadedJob
from ringrt.jobs.outputs import check_output, write_output
from ringrt.jobs.schema import Attention, RingOptions
from ringrt.jobs.sources import Source, open_source
from ringrt.jobs.verify import Results, Sample, Verdict, combine, verify
from ringrt.launch import run_threads
from ringrt.options import CallOptions
from ringrt.plan import Plan, Problem, plan
from ringrt.plan.choose import check_names
from ringrt.plan.cost import count_steps
from ringrt.plan.partition import Array, Runs, check_partition, positions
from ringrt.registry import registry
from ringrt.ring import Ring


class Progress(Protocol):
    """Told how far a rank has come: a phase's name, parts done, parts in all."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one rank did in one pass, and what its plan says it should have."""

    stats: PassStats
    bytes_planned: int
    peak_planned: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did."""

    passes: dict[str, PassReport]
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class JobReport:
    """What all ranks did, by which plans. `written` says whether out was written; None where
    the job asks for no output."""

    plans: dict[str, Plan]
    ranks: list[RankReport]
    written: bool | None

    @property
    def problem(self) -> Problem:
        """The problem of all passes."""
        return self.plans["forward"].problem

    @property
    def verdict(self) -> Verdict | None:
        """All ranks' verdicts as one; None if nothing was verified."""
        verdicts = [each.verdict for each in self.ranks if each.verdict is not None]
        return combine(verdicts) if verdicts else None

    @property
    def passed(self) -> bool:
        """No error is beyond its bound."""
        return self.verdict is None or self.verdict.passed


def problem_of(loaded: LoadedJob, source: Source) -> Problem:
    """The whole problem of a job."""
    (batch, q_length, q_heads, head_dim), k, v = (source.shapes[name] for name in "qkv")
    shapes = Shapes(source.dtype, batch, q_heads, k[2], head_dim, v[3], q_length, k[1])
    options = CallOptions.of("jobs", shapes, _options(loaded.job.attention))
    return options.problem(shapes, q_length, k[1])


def plan_of(
    loaded: LoadedJob, size: int, backward: bool = False, travel: str | None = None
) -> Plan:
    """The plan of a job's pass over `size` ranks; `travel` in place of the job's. Raises
    `ConfigError`."""
    ring = loaded.job.ring
    with _keys_of_the_job():
        partition = registry().partition(ring.partition)
        problem = problem_of(loaded, open_source(loaded.job.input, loaded.folder))
        for length in {problem.q_length, problem.kv_length}:
            check_partition(partition, length, size)
        return plan(
            problem, partition, size, ring.schedule, backward=backward, travel=travel or ring.travel
        )


def check_job(loaded: LoadedJob, size: int) -> None:
    """`ConfigError` for whatever can be found wrong before any rank starts."""
    job, folder = loaded.job, loaded.folder
    with _keys_of_the_job():
        check_names(job.ring.schedule, job.ring.travel)
        if job.ring.backend != "auto":
            registry().backend(job.ring.backend)
    plan_of(loaded, size)
    if job.output is not None:
        inputs = folder / job.input.path if job.input.source == "file" else None
        check_output(folder / job.output.path, inputs)


@contextlib.contextmanager
def _keys_of_the_job() -> Iterator[None]:
    """What is wrong with an option of the ring or of the call is told by its key in the file."""
    try:
        yield
    except ConfigError as error:
        for section, model in (("ring", RingOptions), ("attention", Attention)):
            if error.key in model.model_fields:
                key = f"{section}.{error.key}"
                raise ConfigError(key, error.expected, error.got) from None
        raise


def ring_options(loaded: LoadedJob) -> dict[str, Any]:
    """The job's `ring` section, as options of `Ring`."""
    names = ("partition", "schedule", "backend", "timeout", "threads", "travel")
    return {name: getattr(loaded.job.ring, name) for name in names}


def run_on_threads(loaded: LoadedJob, size: int, transport: str, progress: Progress) -> JobReport:
    """The job on `size` thread ranks of this process."""
    reports = run_threads(
        lambda ring: run_on_rank(ring, loaded, progress),
        size,
        transport=transport,
        **ring_options(loaded),
    )
    return reports[0]


def run_on_rank(ring: Ring, loaded: LoadedJob, progress: Progress) -> JobReport:
    """This rank's part. Collective; every rank gets the whole report."""
    job = loaded.job
    digest = hashlib.sha256(job.model_dump_json().encode()).hexdigest()[:16]
    agree(ring.transport, {"operation": "job", "the job": digest}, ring.timeout)
    source = open_source(job.input, loaded.folder)
    plans = {"forward": plan_of(loaded, ring.size)}
    tensors = _Shards(source, plans["forward"], ring.rank)
    options = _options(job.attention)
    passes = {}
    results = _forward(ring, tensors, options, progress)
    passes["forward"] = _pass_report(ring, plans["forward"], backward=False)
    if "backward" in job.passes:
        results = _backward(ring, tensors, options, results, progress)
        assert ring.stats is not None
        plans["backward"] = plan_of(loaded, ring.size, True, ring.stats.travel)
        passes["backward"] = _pass_report(ring, plans["backward"], backward=True)
    verdict = None
    if job.verify.rows != 0:
        if "backward" in plans:
            results = _with_statistics(ring, results, tensors.dout())
        on_progress = _phase(progress, "verify") if ring.rank == 0 else _silent
        verdict = verify(
            source,
            plans["forward"].problem,
            results,
            _sample(tensors.q_runs, job.verify.rows),
            _sample(tensors.kv_runs, job.verify.rows),
            on_progress,
            options.get("sink"),
            registry()
            .backends[passes["forward"].stats.backend]
            .rounds(plans["forward"].problem.dtype),
        )
    ranks = _gather_reports(ring, RankReport(passes, verdict))
    report = JobReport(plans, ranks, written=None)
    if job.output is None:
        return report
    if report.passed:
        path = loaded.folder / job.output.path
        write_output(ring, path, report.problem, tensors.q_runs, results.out, results.lse)
    return replace(report, written=report.passed)


class _Shards:
    """A rank's rows of q, k, v, and of dout when asked for."""

    def __init__(self, source: Source, planned: Plan, rank: int) -> None:
        self._source = source
        self.q_runs, self.kv_runs = planned.q_runs(rank), planned.kv_runs(rank)
        self.q = source.read("q", self.q_runs)
        self.k, self.v = (source.read(name, self.kv_runs) for name in "kv")

    def dout(self) -> Array:
        """The gradient of out."""
        return self._source.read("dout", self.q_runs)


def _forward(ring: Ring, tensors: _Shards, options: dict[str, Any], progress: Progress) -> Results:
    ring.on_step = _steps(progress) if ring.rank == 0 else None
    out, lse = ring.attention(tensors.q, tensors.k, tensors.v, **options)
    return Results(out, lse)


def _backward(
    ring: Ring, tensors: _Shards, options: dict[str, Any], results: Results, progress: Progress
) -> Results:
    ring.on_step = _steps(progress) if ring.rank == 0 else None
    dout, out, lse = tensors.dout(), results.out, results.lse
    dq, dk, dv, *dsink = ring.attention_backward(
        dout, tensors.q, tensors.k, tensors.v, out, lse, **options
    )
    return Results(out, lse, (dq, dk, dv), dsink[0] if dsink else None)


def _with_statistics(ring: Ring, results: Results, dout: Array) -> Results:
    """With lse and delta of the whole sequence, which the checks of gradients need."""
    delta = HOST.row_delta(dout, results.out, "float64")
    lse, delta = (ring.unshard(x, axis=2) for x in (results.lse, delta))
    return replace(results, whole_lse=lse, whole_delta=delta)


def _pass_report(ring: Ring, planned: Plan, backward: bool) -> PassReport:
    cost = count_steps(planned, ring.rank, backward)
    assert ring.stats is not None
    return PassReport(ring.stats, cost.bytes_sent, cost.peak_kv_bytes)


def _options(attention: Attention) -> dict[str, Any]:
    """The job's `attention` section, as options of `Ring.attention`."""
    options = attention.model_dump()
    if attention.sink is not None:
        options["sink"] = np.array(attention.sink)
    return options


def _gather_reports(ring: Ring, own: RankReport) -> list[RankReport]:
    # Ranks verify at their own speed: what they wait for here is each other's checking.
    raw = gather(ring.transport, json.dumps(asdict(own)).encode(), max(ring.timeout, 3600.0))
    adapter = TypeAdapter(RankReport)
    return [adapter.validate_json(each) for each in raw]


def _sample(runs: Runs, rows: Any) -> Sample:
    """Rows to verify, spread evenly with the first and the last."""
    index = positions(runs)
    local = np.arange(len(index))
    if rows != "all" and rows < len(index):
        local = np.unique(np.linspace(0, len(index) - 1, rows).round().astype(np.int64))
    return Sample(local, index[local])


def _steps(progress: Progress) -> OnStep:
    return lambda step: progress(step.operation, step.done, step.steps)


def _phase(progress: Progress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)


def _silent(done: int, total: int) -> None:
    pass
