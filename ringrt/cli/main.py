"""The commands. Exit codes: 0 done (and right); 1 a rank failed, or the result is not within
its bound; 2 a handled error, told in one or two lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringrt.errors import KernelError, RankMismatch, RingrtError, TransportError
from ringrt.version import __version__

if TYPE_CHECKING:
    from ringrt.jobs.load import LoadedJob
    from ringrt.jobs.run import JobReport, Progress
    from ringrt.transport import Launch, TransportSpec

_JOB = click.argument("job", type=click.Path(path_type=Path))
_RANKS = click.option("--ranks", type=click.IntRange(min=1), help="Number of ranks.")
_SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the job, by its dotted path.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ringrt")
def cli() -> None:
    """Exact attention over very long sequences, on a ring of ranks."""


@cli.command()
@_JOB
@_RANKS
@_SET
def run(job: Path, ranks: int | None, overrides: tuple[str, ...]) -> None:
    """Run a YAML job: under mpirun one rank a process, else thread ranks."""
    from ringrt.cli.progress import LiveProgress
    from ringrt.cli.tables import print_report
    from ringrt.jobs.load import load_job
    from ringrt.jobs.run import check_job

    loaded = load_job(job, overrides)
    transport, launch = _choose_transport(loaded.job.ring.transport)
    size = _size(loaded, launch, ranks)
    check_job(loaded, size)
    with LiveProgress(hidden=not _speaks(launch)) as progress:
        report = _run(loaded, transport, launch, size, progress)
    if _speaks(launch):
        print_report(report)
    sys.exit(0 if report.passed else 1)


@cli.command()
@_JOB
@_RANKS
@_SET
@click.option("--rank", type=click.IntRange(min=0), help="Show the steps of this rank only.")
def plan(job: Path, ranks: int | None, overrides: tuple[str, ...], rank: int | None) -> None:
    """Print a job's schedule: per rank and ring step the shard, its work and its bytes."""
    from ringrt.cli.tables import print_plan
    from ringrt.jobs.load import load_job
    from ringrt.jobs.run import plan_of

    loaded = load_job(job, overrides)
    print_plan(plan_of(loaded, _size(loaded, None, ranks)), rank)


@cli.command()
def doctor() -> None:
    """Say what works on this machine, what does not, and what would mend it."""
    from ringrt.cli.doctor import examine
    from ringrt.cli.tables import print_checks

    sys.exit(0 if print_checks(examine()) else 1)


@cli.command()
def backends() -> None:
    """List backends and transports, with what they support."""
    from ringrt.cli.tables import print_plugins

    print_plugins()


@cli.command()
def schema() -> None:
    """Print the JSON Schema of job files, for editors."""
    from ringrt.jobs.load import job_schema

    click.echo(json.dumps(job_schema(), indent=2))


def main() -> None:
    """The console script."""
    try:
        cli()
    except RingrtError as error:
        sys.exit(_report_error(error))


def _report_error(error: RingrtError) -> int:
    """Print a handled error; its exit code. Where ranks are processes, what all of them know is
    said once, and what befell a rank is said by each."""
    befell = isinstance(error, KernelError) or (
        isinstance(error, TransportError) and not isinstance(error, RankMismatch)
    )
    launch = _launch()
    if befell or _speaks(launch):
        where = f"rank {launch.rank}: " if launch is not None and befell else ""
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        click.echo(f"ringrt: {where}{error}{notes}", err=True)
    return 1 if befell else 2


def _choose_transport(name: str) -> tuple[TransportSpec, Launch | None]:
    """The transport of a job, and how its launcher started this process, if it needs one."""
    from ringrt.errors import ConfigError
    from ringrt.registry import registry

    if name == "auto":
        launched = registry().launched()
        name = launched.name if launched is not None else "threads"
    spec = registry().transport(name)
    if spec.launched is None:
        return spec, None
    launch = spec.launched()
    if launch is None:
        expected = f"a start by the launcher of {name}, as in `mpirun -n 4 ringrt run ...`"
        raise ConfigError("ring.transport", expected, "a plain process")
    return spec, launch


def _size(loaded: LoadedJob, launch: Launch | None, ranks: int | None) -> int:
    """How many ranks: the launcher's processes, or else --ranks, the job's ranks, or one."""
    from ringrt.errors import ConfigError

    if launch is not None:
        if ranks not in (None, launch.size):
            raise ConfigError("--ranks", f"the {launch.size} processes started", ranks)
        return launch.size
    return ranks or loaded.job.ring.ranks or 1


def _run(
    loaded: LoadedJob,
    transport: TransportSpec,
    launch: Launch | None,
    size: int,
    progress: Progress,
) -> JobReport:
    from ringrt.jobs.run import ring_options, run_on_rank, run_on_threads
    from ringrt.ring import Ring

    if launch is None or transport.connect is None:
        return run_on_threads(loaded, size, transport.name, progress)
    with Ring(transport.connect(), **ring_options(loaded)) as ring:
        return run_on_rank(ring, loaded, progress)


def _launch() -> Launch | None:
    from ringrt.registry import registry

    spec: Any = registry().launched()
    return spec.launched() if spec is not None else None


def _speaks(launch: Launch | None) -> bool:
    """Whether this process prints what all ranks know."""
    return launch is None or launch.rank == 0
