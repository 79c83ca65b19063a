"""What the commands print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ringrt.device.cuda import CudaDevice
from ringrt.device.driver import simulated
from ringrt.device.host import HOST
from ringrt.errors import BackendUnavailable
from ringrt.plan import HOME, Hop, Mask, Plan, Problem, Step
from ringrt.plan.cost import count_steps, payload_bytes, sum_bytes
from ringrt.plan.problem import ITEMSIZE
from ringrt.plugins import BLOCK_VARIABLE, one_line
from ringrt.registry import missing_for, registry

if TYPE_CHECKING:
    from ringrt.backend import Backend, BackendSpec
    from ringrt.cli.doctor import Check
    from ringrt.jobs.run import JobReport

#: More ranks than this are summed up instead of shown step by step; of many, some.
_SHOWN_RANKS, _SUMMED_RANKS = 8, 64


def print_report(report: JobReport) -> None:
    """The result of a job: for each pass a row for each rank and the speed, then the error."""
    console = new_console()
    console.print(_describe(report.problem))
    for name, planned in report.plans.items():
        console.print()
        _print_pass(console, report, name, planned)
    console.print()
    _print_errors(console, report)


def _print_pass(console: Console, report: JobReport, name: str, planned: Plan) -> None:
    passes = [each.passes[name] for each in report.ranks]
    backends = " and ".join(sorted({each.stats.backend for each in passes}))
    moves = "K,V" if planned.travel == "kv" else "Q"
    row = payload_bytes(planned.problem, planned.travel)
    length = planned.problem.kv_length if moves == "K,V" else planned.problem.q_length
    whole = row * length
    how = f"{planned.partition.name} over {planned.size} ranks, {moves} by {planned.schedule}"
    console.print(f"{name}: {how}, backend {backends}")
    unit, size = _unit(max(each.stats.peak_kv_bytes for each in passes))
    table = _table("rank", "tokens", "ring\nsteps", f"sent\n{unit}", "by\nformula",
                   "home\nof all", f"peak {moves}\n{unit}", "by\nformula", "peak\nof all",
                   "compute\ns", "wait\ns")  # fmt: skip
    for rank, each in enumerate(passes):
        stats = each.stats
        home = planned.partition.count(length, planned.size, rank) * row
        table.add_row(
            str(stats.rank),
            f"{stats.tokens:,}",
            str(stats.steps),
            f"{stats.bytes_sent / size:.2f}",
            f"{each.bytes_planned / size:.2f}",
            _share(home, whole),
            f"{stats.peak_kv_bytes / size:.2f}",
            f"{each.peak_planned / size:.2f}",
            _share(stats.peak_kv_bytes, whole),
            f"{stats.compute_s:.3f}",
            f"{stats.wait_s:.3f}",
        )
    console.print(table)
    seconds = max(each.stats.seconds for each in passes)
    tokens = planned.problem.batch * planned.problem.q_length
    rate = tokens / seconds if seconds else 0.0
    on_gpu = {registry().backends[each.stats.backend].device for each in passes} == {"cuda"}
    if on_gpu and simulated():
        console.print("simulated: times would say nothing of a GPU")
        return
    console.print(f"{rate:,.0f} tokens/s ({seconds:.3f} s)")


def _print_errors(console: Console, report: JobReport) -> None:
    verdict = report.verdict
    if verdict is None:
        console.print("not verified")
        return
    console.print(f"max error against the float64 oracle over {verdict.rows:,} rows:")
    for name, figure in verdict.figures.items():
        dtype = report.problem.state_dtype if name == "lse" else report.problem.dtype
        console.print(
            f"  {name:<5} {figure.error:.2e} ({figure.excess:.2e} beyond the rounding of {dtype}, "
            f"bound {figure.bound:.1e})"
        )
    console.print("verified" if report.passed else "NOT VERIFIED: an error is beyond its bound")
    if report.written is False:
        console.print("no output was written")


def print_plan(name: str, plan: Plan, rank: int | None) -> None:
    """The schedule of a pass: every step of a few ranks, or a row for each of many."""
    console = new_console()
    problem = plan.problem
    moves = "K,V" if plan.travel == "kv" else "Q"
    console.print(_describe(problem))
    how = f"{plan.partition.name} over {plan.size} ranks, {moves} by schedule {plan.schedule}"
    console.print(f"{name}: {how}")
    if plan.why:
        console.print(f"chosen by bytes: {plan.why}")
    if rank is not None or plan.size <= _SHOWN_RANKS:
        console.print(_steps_table(name, plan, range(plan.size) if rank is None else [rank]))
    else:
        console.print(_ranks_table(name, plan))
        if plan.size > _SUMMED_RANKS:
            console.print(f"{_SUMMED_RANKS} of {plan.size} ranks; --rank shows the steps of one")


def _steps_table(name: str, plan: Plan, ranks: Iterable[int]) -> Table:
    backward = name == "backward"
    columns = ["rank", "step", "shard", "in", "rows", "tiles", "work", "sends", "receives"]
    table = _table(*columns, *(["sums sent", "sums received"] if backward else []))
    row = payload_bytes(plan.problem, plan.travel)
    sums = sum_bytes(plan.problem, plan.travel)
    for rank in ranks:
        for step in plan.backward_steps(rank) if backward else plan.steps(rank):
            pairs = int(step.tiles.visible_pairs().sum())
            cells = [
                str(rank),
                str(step.index),
                str(step.shard),
                _lies_in(step),
                f"{step.rows.count:,}",
                str(len(step.tiles)),
                _share(pairs, _all_pairs(plan, rank, step)),
                _hops("to", row, step.send),
                _hops("from", row, step.recv),
            ]
            if backward:
                cells += [_hops("to", sums, step.grad_send)]
                cells += [_hops("from", sums, step.carry, step.home)]
            table.add_row(*cells)
        table.add_section()
    return table


def _ranks_table(name: str, plan: Plan) -> Table:
    moves = "K,V" if plan.travel == "kv" else "Q"
    table = _table("rank", "tokens", "steps", "work", "sent", "received", f"peak {moves}")
    ranks = sorted({i * plan.size // _SUMMED_RANKS for i in range(_SUMMED_RANKS)})
    ranks = ranks if plan.size > _SUMMED_RANKS else list(range(plan.size))
    counts = [count_steps(plan, rank, name == "backward") for rank in ranks]
    total = sum(each.visible_pairs for each in counts)
    for rank, each in zip(ranks, counts, strict=True):
        table.add_row(
            str(rank),
            f"{plan.partition.count(plan.problem.q_length, plan.size, rank):,}",
            str(each.steps),
            f"{each.visible_pairs * len(ranks) / total:.3f} of even" if total else "-",
            _size(each.bytes_sent),
            _size(each.bytes_received),
            _size(each.peak_kv_bytes),
        )
    return table


def print_checks(checks: Iterable[Check]) -> bool:
    """What `ringrt doctor` found, as it finds it; False if something essential is broken."""
    console = new_console()
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
    """Backends, transports and partitions, what they are and what they support."""
    console = new_console()
    found = registry()
    for spec in found.backends.values():
        missing = missing_for(spec)
        console.print(f"[bold]backend {spec.name}[/]: {escape(spec.summary)}")
        said = f"cannot run here: {missing}" if missing else f"supports {_capabilities(spec)}"
        console.print(f"    {said}", markup=False)
    for each in found.transports.values():
        missing = missing_for(each)
        console.print(f"[bold]transport {each.name}[/]: {escape(each.summary)}")
        said = f"cannot run here: {missing}" if missing else "runs here"
        console.print(f"    {said}", markup=False)
    for rule in found.partitions.values():
        console.print(f"[bold]partition {rule.name}[/]: {escape(rule.summary)}")
    if found.plugins.blocked:
        console.print(f"blocked by {BLOCK_VARIABLE}: {', '.join(found.plugins.blocked)}")
    for problem in found.problems:
        console.print(problem, markup=False)


def _capabilities(spec: BackendSpec) -> str:
    """What the backend says of problems that differ in one thing."""
    from ringrt.backend import BackendContext

    try:
        device = CudaDevice(0) if spec.device == "cuda" else HOST
        backend = registry().load(spec.name, BackendContext(threads=1, device=device))
    except BackendUnavailable as error:
        return f"nothing: {error}"
    try:
        return _able(backend)
    except Exception as error:
        return f"nothing: {one_line(error)}"
    finally:
        backend.close()


def _able(backend: Backend) -> str:
    able = [name for name in ITEMSIZE if backend.supports(_small(dtype=name)) is None]
    some = able[0] if able else "float32"
    options = {
        "softcap": _small(dtype=some, softcap=1.0),
        "value_dim ≠ head_dim": _small(dtype=some, value_dim=4),
    }
    able += [name for name, problem in options.items() if backend.supports(problem) is None]
    able += ["backward"] if backend.backward else []
    return ", ".join(able)


def _small(dtype: str, softcap: float | None = None, value_dim: int = 8) -> Problem:
    return Problem(1, 2, 1, 8, value_dim, 8, 8, dtype, Mask.causal(8, 8), 1.0, softcap)


def _describe(problem: Problem) -> str:
    lengths = f"{problem.q_length:,} tokens"
    if problem.kv_length != problem.q_length:
        lengths = f"{problem.q_length:,} queries, {problem.kv_length:,} keys"
    lengths_of = (problem.q_length, problem.kv_length)
    masks = {Mask.full(*lengths_of): "full", Mask.causal(*lengths_of): "causal"}
    mask = masks.get(problem.mask, f"a mask of {len(problem.mask.table):,} pieces")
    dims = f"head_dim {problem.head_dim}"
    if problem.value_dim != problem.head_dim:
        dims += f", value_dim {problem.value_dim}"
    return (
        f"batch {problem.batch}, {lengths}, {problem.q_heads} query heads on {problem.kv_heads} "
        f"KV heads,\n{dims}, {problem.dtype}, {mask}"
    )


def _lies_in(step: Step) -> str:
    if not step.rows:
        return "-"
    return "home" if step.slot == HOME else f"slot {step.slot}"


def _all_pairs(plan: Plan, rank: int, step: Step) -> int:
    """Pairs of the rank's own rows with the whole shard of the step."""
    problem, count = plan.problem, plan.partition.count
    queries, keys = (rank, step.shard) if plan.travel == "kv" else (step.shard, rank)
    q_rows = count(problem.q_length, plan.size, queries)
    return q_rows * count(problem.kv_length, plan.size, keys)


def _hops(link: str, row_bytes: int, *hops: Hop | None) -> str:
    made = [f"{_size(hop.rows.count * row_bytes)} {link} {hop.peer}" for hop in hops if hop]
    return ", ".join(made) or "-"


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


def new_console() -> Console:
    """Never narrower than the tables: a line that the terminal wraps is better than a figure
    that is cut off."""
    console = Console(highlight=False)
    return Console(highlight=False, width=max(console.width, 120), soft_wrap=True)
