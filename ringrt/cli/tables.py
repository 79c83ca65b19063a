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
    from ringrt.backend import Backend, BackendSpec
    from ringrt.cli.doctor import Check
    from ringrt.jobs.run import JobReport

#: More ranks than this are summed up instead of shown step by step.
_SHOWN_RANKS = 8


def print_report(report: JobReport) -> None:
    """The result of a job: a row for each rank, then speed and error."""
    problem, whole = report.problem, report.problem.kv_length * report.problem.kv_row_bytes
    console = _console()
    console.print(f"{_describe(problem)}, {report.partition} over {len(report.ranks)} ranks")
    table = _table("rank", "backend", "tokens", "ring steps", "KV sent", "by formula", "home KV",
                   "peak KV", "by formula", "compute s", "wait s")  # fmt: skip
    for each in report.ranks:
        stats = each.stats
        table.add_row(
            str(stats.rank),
            stats.backend,
            f"{stats.tokens:,}",
            str(stats.steps),
            _size(stats.bytes_sent),
            _size(each.bytes_formula),
            _share(each.home_bytes, whole),
            f"{_size(stats.peak_kv_bytes)} = {_share(stats.peak_kv_bytes, whole)}",
            _size(each.peak_formula),
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
    console.print(
        f"max error against the float64 oracle over {rows:,} rows: out {out_error:.2e} "
        f"({max(out_excess, 0.0):.2e} beyond the rounding of {report.problem.dtype}; "
        f"bound {out_bound:.1e}), lse {lse_error:.2e} (bound {lse_bound:.1e})"
    )
    console.print("verified" if report.passed else "NOT VERIFIED: an error is beyond its bound")


def print_plan(plan: Plan, rank: int | None) -> None:
    """The schedule of a plan: every step of a few ranks, or a row for each of many."""
    console = _console()
    problem = plan.problem
    console.print(f"{_describe(problem)}, {plan.partition.name} over {plan.size} ranks")
    console.print(f"schedule {plan.schedule}")
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
    table = _table("backend", "runs here", "dtypes", "softcap", "own value_dim", "what it is",
                   text=("backend", "runs here", "dtypes", "what it is"))  # fmt: skip
    for spec in found.backends.values():
        table.add_row(spec.name, *_capabilities(spec), spec.summary)
    console.print(table)
    table = _table("transport", "runs here", "ranks are", "what it is",
                   text=("transport", "runs here", "ranks are", "what it is"))  # fmt: skip
    for each in found.transports.values():
        ranks = "threads" if each.group is not None else "processes"
        table.add_row(each.name, each.probe() or "yes", ranks, each.summary)
    console.print(table)
    for problem in found.problems:
        console.print(problem, markup=False)


def _capabilities(spec: BackendSpec) -> tuple[str, str, str, str]:
    """Whether it runs here, and what it says of problems that differ in one thing."""
    from ringrt.backend import BackendContext

    missing = spec.probe()
    if missing is not None:
        return missing, "-", "-", "-"
    backend = spec.load(BackendContext(threads=1))
    dtypes = [name for name in ITEMSIZE if backend.supports(_small(dtype=name)) is None]
    some = dtypes[0] if dtypes else "float32"
    softcap = _yes(backend, _small(dtype=some, softcap=1.0))
    value_dim = _yes(backend, _small(dtype=some, value_dim=4))
    backend.close()
    return "yes", ", ".join(dtypes), softcap, value_dim


def _small(dtype: str, softcap: float | None = None, value_dim: int = 8) -> Problem:
    return Problem(1, 2, 1, 8, value_dim, 8, 8, dtype, Mask.causal(8, 8), 1.0, softcap)


def _yes(backend: Backend, problem: Problem) -> str:
    return "yes" if backend.supports(problem) is None else "no"


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
        f"KV heads, {dims}, {problem.dtype}, {'full' if pairs else 'causal'}"
    )


def _hop(plan: Plan, hop: object, link: str) -> str:
    from ringrt.plan import Hop

    if not isinstance(hop, Hop):
        return "-"
    return f"{_size(hop.rows * plan.problem.kv_row_bytes)} {link} {hop.peer}"


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count} B"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _table(*columns: str, text: tuple[str, ...] = ("backend", "in")) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in text else "right", no_wrap=True)
    return table


def _console() -> Console:
    """Wide enough for the tables where there is no terminal to say."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)
