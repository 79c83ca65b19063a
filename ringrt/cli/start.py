"""From a job file to ranks. Where a launcher started this process, the ring is joined before
anything can go wrong: a mistake that only one rank finds (a file that is missing on its node,
say) must reach the others, who would wait for it forever inside MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringrt.engine.agree import agree_ready
from ringrt.errors import ConfigError, RingrtError
from ringrt.jobs.load import LoadedJob, load_job
from ringrt.jobs.run import (
    JobReport,
    Progress,
    check_job,
    ring_options,
    run_on_rank,
    run_on_threads,
)
from ringrt.registry import registry
from ringrt.ring import Ring
from ringrt.transport import Launch, Transport, TransportSpec

#: How long launched ranks wait for one another to read and check the job, in seconds.
_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Begun:
    """A checked job, and its ring: `transport` between launched processes, or None for `size`
    thread ranks of the transport `threads`."""

    loaded: LoadedJob
    size: int
    threads: str
    transport: Transport | None

    def run(self, progress: Progress) -> JobReport:
        """Run the job, or this process's part of it."""
        if self.transport is None:
            return run_on_threads(self.loaded, self.size, self.threads, progress)
        with Ring.join(self.transport, **ring_options(self.loaded)) as ring:
            return run_on_rank(ring, self.loaded, progress)


def start(path: Path, overrides: Sequence[str], ranks: int | None) -> Begun:
    """Read and check the job. Raises `ConfigError` on the ranks that find it wrong, and
    `RankMismatch` with the reason on the others."""
    launched = registry().launched()
    transport = registry().connect(launched[0].name) if launched is not None else None
    failure: RingrtError | None = None
    begun = None
    try:
        begun = _begin(path, overrides, ranks, launched, transport)
    except RingrtError as error:
        failure = error
    if transport is not None:
        try:
            agree_ready(transport, {}, failure, _TIMEOUT)
        except RingrtError:
            transport.close()
            raise
    elif failure is not None:
        raise failure
    assert begun is not None
    return begun


def _begin(
    path: Path,
    overrides: Sequence[str],
    ranks: int | None,
    launched: tuple[TransportSpec, Launch] | None,
    transport: Transport | None,
) -> Begun:
    loaded = load_job(path, overrides)
    threads = _check_transport(loaded.job.ring.transport, launched[0].name if launched else None)
    if launched is None:
        size = ranks or loaded.job.ring.ranks or 1
    elif ranks in (None, launched[1].size):
        size = launched[1].size
    else:
        raise ConfigError("--ranks", f"the {launched[1].size} processes started", ranks)
    check_job(loaded, size)
    over = registry().transport(threads).over
    if transport is not None and over is not None:
        transport = over(transport)
    return Begun(loaded, size, threads, transport)


def _check_transport(name: str, launcher: str | None) -> str:
    """The job's transport must fit the way it was started: `launcher` is the transport whose
    launcher did. Returns a transport of threads."""
    if name == "auto":
        return "threads"
    spec = registry().transport(name)
    if spec.over is not None:
        return name
    if launcher is not None and name != launcher:
        expected = f"auto, {launcher} or one that works over it, as these processes were started"
        raise ConfigError("ring.transport", expected, name)
    if launcher is None and spec.group is None:
        expected = f"a start by the launcher of {name}, {spec.start('ringrt run ...')}"
        raise ConfigError("ring.transport", expected, "a plain process")
    return name
