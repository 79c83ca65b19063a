"""One rank's part of a job: read its rows, compute, check, write, report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from ringrt.engine.agree import gather
from ringrt.engine.stats import PassStats
from ringrt.jobs.load import LoadedJob
from ringrt.jobs.outputs import check_output, write_output
from ringrt.jobs.schema import Attention
from ringrt.jobs.sources import Source, open_source
from ringrt.jobs.verify import Verdict, verify
from ringrt.launch import run_threads
from ringrt.plan import Mask, Plan, Problem, get_partition, plan
from ringrt.plan.cost import peak_kv_bytes, ring_bytes_sent
from ringrt.plan.partition import positions
from ringrt.plan.problem import default_scale
from ringrt.ring import Ring


class Progress(Protocol):
    """Told how far a rank has come: a phase's name, parts done, parts in all."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did, and what the formulas say it should have."""

    stats: PassStats
    bytes_formula: int
    peak_formula: int
    home_bytes: int
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class JobReport:
    """What all ranks did."""

    problem: Problem
    partition: str
    schedule: str
    ranks: list[RankReport]

    @property
    def passed(self) -> bool:
        """No rank found an error beyond its bound."""
        return all(each.verdict is None or each.verdict.passed for each in self.ranks)


def problem_of(loaded: LoadedJob, source: Source) -> Problem:
    """The whole problem of a job."""
    (batch, q_length, q_heads, head_dim), k, v = (source.shapes[name] for name in "qkv")
    options: Attention = loaded.job.attention
    mask = Mask.causal if options.causal else Mask.full
    return Problem(
        batch=batch,
        q_heads=q_heads,
        kv_heads=k[2],
        head_dim=head_dim,
        value_dim=v[3],
        q_length=q_length,
        kv_length=k[1],
        dtype=source.dtype,
        mask=mask(q_length, k[1]),
        scale=default_scale(head_dim) if options.scale is None else options.scale,
        softcap=options.softcap,
    )


def plan_of(loaded: LoadedJob, size: int) -> Plan:
    """The plan of a job over `size` ranks. Raises `ConfigError`."""
    problem = problem_of(loaded, open_source(loaded.job.input, loaded.folder))
    options = loaded.job.ring
    return plan(problem, get_partition(options.partition), size, options.schedule)


def check_job(loaded: LoadedJob, size: int) -> None:
    """`ConfigError` for whatever can be found wrong before any rank starts."""
    plan_of(loaded, size)
    if loaded.job.output is not None:
        check_output(loaded.folder / loaded.job.output.path)


def ring_options(loaded: LoadedJob) -> dict[str, Any]:
    """The job's `ring` section, as options of `Ring`."""
    names = ("partition", "schedule", "backend", "timeout", "threads")
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
    job, rank = loaded.job, ring.rank
    source = open_source(job.input, loaded.folder)
    planned = plan_of(loaded, ring.size)
    q_runs, kv_runs = planned.q_runs(rank), planned.kv_runs(rank)
    q, k, v = source.read("q", q_runs), source.read("k", kv_runs), source.read("v", kv_runs)
    if rank == 0:
        ring.on_step = _phase(progress, "forward")
    gather(ring.transport, b"", ring.timeout)
    out, lse = ring.attention(q, k, v, **job.attention.model_dump())
    stats = ring.stats
    assert stats is not None
    if job.output is not None:
        write_output(ring, loaded.folder / job.output.path, planned.problem, q_runs, out, lse)
    verdict = None
    rows = _sample(stats.tokens, job.verify.rows)
    if rows is not None:
        on_progress = _phase(progress, "verify") if rank == 0 else _silent
        at = positions(q_runs)[rows]
        verdict = verify(source, planned.problem, out, lse, at, rows, on_progress)
    own = RankReport(
        stats=stats,
        bytes_formula=ring_bytes_sent(planned, rank),
        peak_formula=peak_kv_bytes(planned, rank),
        home_bytes=k.nbytes + v.nbytes,
        verdict=verdict,
    )
    return _gather_reports(ring, planned, own)


def _gather_reports(ring: Ring, planned: Plan, own: RankReport) -> JobReport:
    # Ranks verify at their own speed: what they wait for here is each other's checking.
    raw = gather(ring.transport, json.dumps(asdict(own)).encode(), max(ring.timeout, 3600.0))
    reports = [
        RankReport(
            **values
            | {"stats": PassStats(**values["stats"])}
            | {"verdict": Verdict(**values["verdict"]) if values["verdict"] else None}
        )
        for values in map(json.loads, raw)
    ]
    return JobReport(planned.problem, planned.partition.name, planned.schedule, reports)


def _sample(count: int, rows: Any) -> Any:
    """Local rows to verify, spread evenly with the first and the last; None for no check."""
    if rows == 0:
        return None
    if rows == "all" or rows >= count:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, rows).round().astype(np.int64))


def _phase(progress: Progress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)


def _silent(done: int, total: int) -> None:
    pass
