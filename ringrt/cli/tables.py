"""What the commands print."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ringrt.plan import HOME, Mask, Plan, Problem
from ringrt.plan.cost import count_steps
from ringrt.plan.problem import ITEMSIZE
from ringrt.registry import registry

if TYPE_CHECKING:
    from ringrt.backend import BackendSpec
    from ringrt.cli.doctor import Check
    from ringrt.jobs.run import JobReport

#: More ranks than this are summed up instead of shown step by step.
_SHOWN_RANKS = 8


def print_report(report: JobReport) -> None:
    """The result of a job: a row for each rank, then speed and error."""
    problem, whole = report.problem, report.problem.kv_length * report.problem.kv_row_bytes
    console = _console()
    backends = " and ".join(sorted({each.stats.backend for each in report.ranks}))
    console.print(_describe(problem))
    console.print(f"{report.partition} over {len(report.ranks)} ranks, backend {backends}")
    unit, size = _unit(max(each.stats.peak_kv_bytes for each in report.ranks))
    table = _table("rank", "tokens", "ring\nsteps", f"KV sent\n{unit}", "by\nformula",
                   "home\nof all", f"peak KV\n{unit}", "by\nformula", "peak\nof all",
                   "compute\ns", "wait\ns")  # fmt: skip
    for each in report.ranks:
        stats = each.stats
        table.add_row(
            str(stats.rank),
            f"{stats.tokens:,}",
            str(stats.steps),
            f"{stats.bytes_sent / size:.2f}",
            f"{each.bytes_formula / size:.2f}",
            _share(each.home_bytes, whole),
            f"{stats.peak_kv_bytes / size:.2f}",
            f"{each.peak_formula / size:.2f}",
            _share(stats.peak_kv_bytes, whole),
            f"{stats.compute_s:.3f}",
            f"{stats.wait_s:.3f}",
        )
    console.print(table)
    seconds = max(each.stats.seconds for each in report.ranks)
    rate = problem.batch * problem.q_length / seconds if seconds else 0.0
    console.print(f"{rate:,.0f} tokens/s ({seconds:.3f} s)")
    _print_errors(console, report)


def _print_errors(console: Console, report: JobReport) -> None:
    verdicts = [each.verdict for each in report.ranks if each.verdict is not None]
    if not verdicts:
        console.print("not verified")
        return

    def worst(number: Callable[[int], float]) -> float:
        return max(map(number, range(len(verdicts))), key=lambda x: (x != x, x))

    rows = sum(verdict.rows for verdict in verdicts)
    out_error = worst(lambda i: verdicts[i].out_error)
    out_excess = worst(lambda i: verdicts[i].out_excess)
    out_bound = worst(lambda i: verdicts[i].out_bound)
    lse_error = worst(lambda i: verdicts[i].lse_error)
    lse_bound = worst(lambda i: verdicts[i].lse_bound)
    excess, dtype = max(out_excess, 0.0), report.problem.dtype
    console.print(f"max error against the float64 oracle over {rows:,} rows:")
    console.print(
        f"  out {out_error:.2e} ({excess:.2e} beyond the rounding of {dtype}, "
        f"bound {out_bound:.1e})"
    )
    console.print(f"  lse {lse_error:.2e} (bound {lse_bound:.1e})")
    console.print("verified" if report.passed else "NOT VERIFIED: an error is beyond its bound")


def print_plan(plan: Plan, rank: int | None) -> None:
    """The schedule of a plan: every step of a few ranks, or a row for each of many."""
    console = _console()
    problem = plan.problem
    console.print(_describe(problem))
    console.print(f"{plan.partition.name} over {plan.size} ranks, schedule {plan.schedule}")
    if rank is not None or plan.size <= _SHOWN_RANKS:
        console.print(_steps_table(plan, range(plan.size) if rank is None else [rank]))
    else:
        console.print(_ranks_table(plan))


def _steps_table(plan: Plan, ranks: Iterable[int]) -> Table:
    table = _table("rank", "step", "shard", "in", "keys", "tiles", "work", "sends", "receives")
    for rank in ranks:
        q_rows = plan.partition.count(plan.problem.q_length, plan.size, rank)
        for step in plan.steps(rank):
            pairs = int(step.tiles.visible_pairs().sum())
            table.add_row(
                str(rank),
                str(step.index),
                str(step.shard),
                "home" if step.slot == HOME else f"slot {step.slot}",
                f"{step.rows:,}",
                str(len(step.tiles)),
                _share(pairs, q_rows * step.rows),
                _hop(plan, step.send, "to"),
                _hop(plan, step.recv, "from"),
            )
        table.add_section()
    return table


def _ranks_table(plan: Plan) -> Table:
    table = _table("rank", "tokens", "steps", "work", "KV sent", "KV received", "peak KV")
    counts = [count_steps(plan, rank) for rank in range(plan.size)]
    total = sum(each.visible_pairs for each in counts)
    for rank, each in enumerate(counts):
        table.add_row(
            str(rank),
            f"{plan.partition.count(plan.problem.q_length, plan.size, rank):,}",
            str(each.steps),
            f"{each.visible_pairs * plan.size / total:.3f} of even" if total else "-",
            _size(each.bytes_sent),
            _size(each.bytes_received),
            _size(each.peak_kv_bytes),
        )
    return table


def print_checks(checks: Iterable[Check]) -> bool:
    """What `ringrt doctor` found, as it finds it; False if something essential is broken."""
    console = _console()
    sound = True
    for check in checks:
        mark = "[green]works[/]" if check.works else "[yellow]does not work[/]"
        console.print(f"{check.name}: {mark} - ", end="")
        console.print(check.detail, markup=False)
        if check.remedy:
            console.print(f"    to mend it: {check.remedy}", markup=False)
        sound &= check.works or not check.essential
    return sound


def print_plugins() -> None:
    """Backends and transports, what they are and what they support."""
    console = _console()
    found = registry()
    for spec in found.backends.values():
        missing = spec.probe()
        console.print(f"[bold]backend {spec.name}[/]: {spec.summary}")
        said = f"cannot run here: {missing}" if missing else f"supports {_capabilities(spec)}"
        console.print(f"    {said}", markup=False)
    for each in found.transports.values():
        missing = each.probe()
        console.print(f"[bold]transport {each.name}[/]: {each.summary}")
        said = f"cannot run here: {missing}" if missing else "runs here"
        console.print(f"    {said}", markup=False)
    for problem in found.problems:
        console.print(problem, markup=False)


def _capabilities(spec: BackendSpec) -> str:
    """What the backend says of problems that differ in one thing."""
    from ringrt.backend import BackendContext

    backend = spec.load(BackendContext(threads=1))
    able = [name for name in ITEMSIZE if backend.supports(_small(dtype=name)) is None]
    some = able[0] if able else "float32"
    options = {
        "softcap": _small(dtype=some, softcap=1.0),
        "value_dim ≠ head_dim": _small(dtype=some, value_dim=4),
    }
    able += [name for name, problem in options.items() if backend.supports(problem) is None]
    backend.close()
    return ", ".join(able)


def _small(dtype: str, softcap: float | None = None, value_dim: int = 8) -> Problem:
    return Problem(1, 2, 1, 8, value_dim, 8, 8, dtype, Mask.causal(8, 8), 1.0, softcap)


def _describe(problem: Problem) -> str:
    lengths = f"{problem.q_length:,} tokens"
    if problem.kv_length != problem.q_length:
        lengths = f"{problem.q_length:,} queries, {problem.kv_length:,} keys"
    pairs = problem.mask == Mask.full(problem.q_length, problem.kv_length)
    dims = f"head_dim {problem.head_dim}"
    if problem.value_dim != problem.head_dim:
        dims += f", value_dim {problem.value_dim}"
    return (
        f"batch {problem.batch}, {lengths}, {problem.q_heads} query heads on {problem.kv_heads} "
        f"KV heads,\n{dims}, {problem.dtype}, {'full' if pairs else 'causal'}"
    )


def _hop(plan: Plan, hop: object, link: str) -> str:
    from ringrt.plan import Hop

    if not isinstance(hop, Hop):
        return "-"
    return f"{_size(hop.rows * plan.problem.kv_row_bytes)} {link} {hop.peer}"


def _unit(count: int) -> tuple[str, int]:
    """The largest unit of which `count` bytes are at least one, and its bytes."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return unit, 1 << power
    return "bytes", 1


def _size(count: int) -> str:
    unit, size = _unit(count)
    return f"{count / size:.2f} {unit}" if size > 1 else f"{count} {unit}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _table(*columns: str, text: tuple[str, ...] = ("in",)) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in text else "right", no_wrap=True)
    return table


def _console() -> Console:
    """Never narrower than the tables: a line that the terminal wraps is better than a figure
    that is cut off."""
    console = Console(highlight=False)
    return Console(highlight=False, width=max(console.width, 120), soft_wrap=True)
