"""The commands. Exit codes: 0 done (and right); 1 a rank failed, or the result is not within
its bound; 2 a handled error, told in one or two lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringrt.errors import (
    KernelError,
    RankMismatch,
    RingrtError,
    TransportError,
    TransportUnavailable,
)
from ringrt.version import __version__

if TYPE_CHECKING:
    from ringrt.plan import Plan
    from ringrt.transport import Launch

_JOB = click.argument("job", type=click.Path(path_type=Path))
_RANKS = click.option("--ranks", type=click.IntRange(min=1), help="Number of ranks.")
_SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the job, by its dotted path.",
)

_ONLY = click.option(
    "--only", multiple=True, metavar="CHECK", help="Run this check alone; may be repeated."
)
_LIST = click.option(
    "--list", "listed", is_flag=True, help="Show the names of the checks, and run none."
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
    """Run a YAML job: under mpirun or torchrun one rank a process, else thread ranks."""
    from ringrt.cli.progress import LiveProgress
    from ringrt.cli.start import start
    from ringrt.cli.tables import print_report

    begun = start(job, overrides, ranks)
    with LiveProgress(hidden=not _speaks()) as progress:
        report = begun.run(progress)
    if _speaks():
        print_report(report)
    sys.exit(0 if report.passed else 1)


@cli.command()
@_JOB
@_RANKS
@_SET
@click.option("--rank", type=click.IntRange(min=0), help="Show the steps of this rank only.")
@click.option(
    "--draw",
    "picture",
    type=click.Path(path_type=Path),
    help="Draw the forward pass as SVG into this file instead.",
)
def plan(
    job: Path,
    ranks: int | None,
    overrides: tuple[str, ...],
    rank: int | None,
    picture: Path | None,
) -> None:
    """Print a job's schedule: per rank and ring step the shard, its work and its bytes."""
    from ringrt.cli.tables import print_plan
    from ringrt.jobs.load import load_job
    from ringrt.jobs.run import plan_of

    loaded = load_job(job, overrides)
    size = ranks or loaded.job.ring.ranks or 1
    if picture is not None:
        _draw(plan_of(loaded, size), picture)
        return
    for name in loaded.job.passes:
        print_plan(name, plan_of(loaded, size, name == "backward"), rank)


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
@click.option(
    "--suite",
    type=click.Choice(["cpu", "kernel", "ring", "limits"]),
    default="cpu",
    help="What is measured; cpu is all of it.",
)
@click.option(
    "--only", multiple=True, metavar="TEXT", help="Rows whose names hold this; may be repeated."
)
@click.option("--threads", metavar="N,...", help="Threads of the kernel; 1,2 by default.")
@click.option("--lengths", metavar="N,...", help="Tokens; 4096,8192 by default.")
@click.option("--head-dims", metavar="N,...", help="Sizes of heads; 64,128 by default.")
@click.option("--heads", type=click.IntRange(min=1), help="Heads; 8 by default.")
@click.option("--dtypes", metavar="NAME,...", help="float32,bfloat16,float16 by default.")
@click.option("--repeats", type=click.IntRange(min=1), help="Of every comparison; 7 by default.")
@click.option("--backend", metavar="NAME", help="What is measured; cpu by default.")
@click.option("--quick", is_flag=True, help="1,024 tokens, 1 thread, 3 repeats, if not given.")
@click.option(
    "--json", "record", type=click.Path(path_type=Path), help="Write all that was measured here."
)
@click.option(
    "--chart", "picture", type=click.Path(path_type=Path), help="Draw the ratios as SVG here."
)
@click.option("--list", "listed", is_flag=True, help="Show the names of the rows, and run none.")
def bench(
    suite: str,
    only: tuple[str, ...],
    record: Path | None,
    picture: Path | None,
    listed: bool,
    **options: Any,
) -> None:
    """Time the kernel and the ring, beside PyTorch where it is installed. Ratios are the result.

    Exit code 1 if a target that applies here is missed, or a result is wrong."""
    from ringrt.cli.bench import asked, measure, print_list, settings_of

    settings = settings_of(options)
    rows = asked(suite, settings, only)
    if listed:
        print_list(rows)
    else:
        sys.exit(0 if measure(rows, settings, record, picture) else 1)


@cli.command("check-backend")
@click.argument("name")
@_ONLY
@_LIST
def check_backend(name: str, only: tuple[str, ...], listed: bool) -> None:
    """Put the backend NAME to the whole contract."""
    from ringrt.cli.checks import check_and_print, print_names
    from ringrt.conformance.suites import BACKEND_CHECKS, BackendSuite

    if listed:
        print_names(BACKEND_CHECKS)
    else:
        sys.exit(0 if check_and_print(BackendSuite(name), only) else 1)


@cli.command("check-transport")
@click.argument("name")
@_ONLY
@_LIST
def check_transport(name: str, only: tuple[str, ...], listed: bool) -> None:
    """Put the transport NAME to the whole contract: on thread ranks, or where a launcher started
    this process (mpirun, say), on all that it started."""
    from ringrt.cli.checks import check_and_print, print_names
    from ringrt.conformance.suites import TRANSPORT_CHECKS, TransportSuite

    if listed:
        print_names(TRANSPORT_CHECKS)
        return
    suite = TransportSuite(name, processes=True)
    suite.leave(0 if check_and_print(suite, only, speaks=_speaks()) else 1)


@cli.command("new-plugin")
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=".",
    help="The folder in which the plugin's own is made; by default the current one.",
)
def new_plugin(name: str, into: Path) -> None:
    """Write a small plugin with a backend NAME, to begin your own with."""
    from ringrt.scaffold import new_plugin as write

    names, folder = write(name, into)
    click.echo(f"wrote {folder} with the backend {names.backend}; next:")
    click.echo(f"    pip install --editable {folder}")
    click.echo(f"    ringrt check-backend {names.backend}")


@cli.command()
def schema() -> None:
    """Print the JSON Schema of job files, for editors."""
    from ringrt.jobs.load import job_schema

    click.echo(json.dumps(job_schema(), indent=2))


def _draw(planned: Plan, picture: Path) -> None:
    from ringrt.cli.draw import draw
    from ringrt.errors import ConfigError

    try:
        picture.write_text(draw(planned))
    except OSError as error:
        raise ConfigError("--draw", "a file that can be written", error.strerror) from None


def main() -> None:
    """The console script."""
    try:
        cli()
    except RingrtError as error:
        sys.exit(_report_error(error))


def _report_error(error: RingrtError) -> int:
    """Print a handled error; its exit code. Where ranks are processes, what all of them know is
    said once, and what befell a rank is said by each."""
    known = isinstance(error, RankMismatch | TransportUnavailable)
    befell = isinstance(error, KernelError | TransportError) and not known
    launch = _launch()
    if befell or _speaks():
        where = f"rank {launch.rank}: " if launch is not None and befell else ""
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        click.echo(f"ringrt: {where}{error}{notes}", err=True)
    return 1 if befell else 2


def _launch() -> Launch | None:
    from ringrt.registry import registry

    launched = registry().launched()
    return launched[1] if launched is not None else None


def _speaks() -> bool:
    """Whether this process prints what all ranks know."""
    launch = _launch()
    return launch is None or launch.rank == 0
