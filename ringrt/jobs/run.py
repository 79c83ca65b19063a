"""One rank's part of a job: read its rows, compute, check, write, report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from pydantic import TypeAdapter

from ringrt.engine.agree import agree, gather
from ringrt.engine.stats import PassStats
from ringrt.errors import ConfigError
from ringrt.jobs.load import LoadedJob
from ringrt.jobs.outputs import check_output, write_output
from ringrt.jobs.schema import Attention
from ringrt.jobs.sources import Source, open_source
from ringrt.jobs.verify import Results, Sample, Verdict, combine, verify
from ringrt.launch import run_threads
from ringrt.plan import Plan, Problem, get_partition, plan
from ringrt.plan.choose import check_names
from ringrt.plan.cost import count_steps
from ringrt.plan.mask_options import MaskOptions
from ringrt.plan.partition import Array, Runs, positions
from ringrt.plan.problem import default_scale
from ringrt.registry import registry
from ringrt.ring import Ring

_MASKING = ("causal", "window", "documents", "prefix", "sink_tokens")


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
    """What one rank did. `home_bytes` are its own K,V."""

    passes: dict[str, PassReport]
    home_bytes: int
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class JobReport:
    """What all ranks did, by which plans; `written` says whether there is an output."""

    plans: dict[str, Plan]
    ranks: list[RankReport]
    written: bool

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
    attention = loaded.job.attention
    masking = MaskOptions.of(**{name: getattr(attention, name) for name in _MASKING})
    if attention.sink is not None and len(attention.sink) != q_heads:
        raise ConfigError("attention.sink", f"{q_heads} logits, one a query head",
                          f"{len(attention.sink)}")  # fmt: skip
    return Problem(
        batch=batch,
        q_heads=q_heads,
        kv_heads=k[2],
        head_dim=head_dim,
        value_dim=v[3],
        q_length=q_length,
        kv_length=k[1],
        dtype=source.dtype,
        mask=masking.build(q_length, k[1]),
        scale=default_scale(head_dim) if attention.scale is None else attention.scale,
        softcap=attention.softcap,
        sink=attention.sink is not None,
    )


def plan_of(loaded: LoadedJob, size: int, backward: bool = False) -> Plan:
    """The plan of a job's pass over `size` ranks. Raises `ConfigError`."""
    problem = problem_of(loaded, open_source(loaded.job.input, loaded.folder))
    ring, partition = loaded.job.ring, get_partition(loaded.job.ring.partition)
    return plan(problem, partition, size, ring.schedule, backward=backward, travel=ring.travel)


def check_job(loaded: LoadedJob, size: int) -> None:
    """`ConfigError` for whatever can be found wrong before any rank starts."""
    try:
        check_names(loaded.job.ring.schedule, loaded.job.ring.travel)
        if loaded.job.ring.backend != "auto":
            registry().backend(loaded.job.ring.backend)
        plan_of(loaded, size)
    except ConfigError as error:
        if error.key in ("partition", "schedule", "travel", "backend"):
            raise ConfigError(f"ring.{error.key}", error.expected, error.got) from None
        raise
    job, folder = loaded.job, loaded.folder
    if job.output is not None:
        inputs = folder / job.input.path if job.input.source == "file" else None
        check_output(folder / job.output.path, inputs)


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
    plans: dict[str, Plan] = {
        name: plan_of(loaded, ring.size, name == "backward") for name in job.passes
    }
    tensors = _Shards(source, plans["forward"], ring.rank)
    options = _options(job.attention)
    passes = {}
    results, passes["forward"] = _forward(ring, tensors, options, plans, progress)
    if "backward" in plans:
        results, passes["backward"] = _backward(ring, tensors, options, plans, results, progress)
    verdict = None
    if job.verify.rows != 0:
        on_progress = _phase(progress, "verify") if ring.rank == 0 else _silent
        verdict = verify(
            source,
            plans["forward"].problem,
            results,
            _sample(tensors.q_runs, job.verify.rows),
            _sample(tensors.kv_runs, job.verify.rows),
            on_progress,
            options.get("sink"),
        )
    own = RankReport(passes, tensors.k.nbytes + tensors.v.nbytes, verdict)
    ranks = _gather_reports(ring, own)
    report = JobReport(plans, ranks, written=False)
    if job.output is None or not report.passed:
        return report
    path = loaded.folder / job.output.path
    write_output(ring, path, report.problem, tensors.q_runs, results.out, results.lse)
    return JobReport(plans, ranks, written=True)


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


def _forward(
    ring: Ring, tensors: _Shards, options: dict[str, Any], plans: dict[str, Plan],
    progress: Progress,
) -> tuple[Results, PassReport]:  # fmt: skip
    ring.on_step = _phase(progress, "forward") if ring.rank == 0 else None
    out, lse = ring.attention(tensors.q, tensors.k, tensors.v, **options)
    return Results(out, lse), _pass_report(ring, plans["forward"], backward=False)


def _backward(
    ring: Ring, tensors: _Shards, options: dict[str, Any], plans: dict[str, Plan],
    results: Results, progress: Progress,
) -> tuple[Results, PassReport]:  # fmt: skip
    ring.on_step = _phase(progress, "backward") if ring.rank == 0 else None
    dout, out, lse = tensors.dout(), results.out, results.lse
    dq, dk, dv, *dsink = ring.attention_backward(
        dout, tensors.q, tensors.k, tensors.v, out, lse, **options
    )
    report = _pass_report(ring, plans["backward"], backward=True)
    delta = np.einsum("brhd,brhd->bhr", dout.astype(np.float64), out.astype(np.float64))
    whole = ring.unshard(lse, axis=2), ring.unshard(delta, axis=2)
    return Results(out, lse, (dq, dk, dv), dsink[0] if dsink else None, *whole), report


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


def _phase(progress: Progress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)


def _silent(done: int, total: int) -> None:
    pass
