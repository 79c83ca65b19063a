"""`ringrt bench`: its options, what it prints and what it writes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from ringrt.bench.cases import Case, Settings, chosen
from ringrt.bench.chart import chart
from ringrt.bench.cores import can_pin, check_threads
from ringrt.bench.machine import describe
from ringrt.bench.measurement import VERDICTS, Measurement, passed
from ringrt.bench.report import check_writable, to_json
from ringrt.bench.session import session
from ringrt.bench.suites import cases
from ringrt.bench.targets import target
from ringrt.calls import available_cores
from ringrt.cli.tables import new_console
from ringrt.errors import ConfigError
from ringrt.plan.problem import ITEMSIZE
from ringrt.registry import registry

_STYLES = {"reached": "green", "missed": "red", "failed": "red", "no target": "dim"}
#: What `--quick` asks for, where the options do not say otherwise.
_QUICK: dict[str, Any] = {"threads": (1,), "lengths": (1024,), "repeats": 3}


def settings_of(options: Mapping[str, Any]) -> Settings:
    """From the command line; `ConfigError` names a wrong option. None is an option not given."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("threads", "lengths", "head_dims"):
        if name in given:
            given[name] = _numbers(f"--{name.replace('_', '-')}", given[name])
    if "dtypes" in given:
        given["dtypes"] = tuple(part.strip() for part in given["dtypes"].split(","))
        for dtype in given["dtypes"]:
            if dtype not in ITEMSIZE:
                raise ConfigError("--dtypes", " or ".join(ITEMSIZE), repr(dtype))
    given = (_QUICK if given.get("quick") else {}) | given
    given.setdefault("threads", (1, 2) if available_cores() > 1 else (1,))
    check_threads(given["threads"])
    settings = Settings(**given)
    if registry().backend(settings.backend).device != "cpu":
        raise ConfigError("--backend", "a backend of the host", repr(settings.backend))
    return settings


def asked(suite: str, settings: Settings, only: Sequence[str]) -> list[Case]:
    """The rows that are to be measured; `ConfigError` if there are none."""
    found = chosen(cases(suite, settings), only)
    if not found:
        raise ConfigError("--only", "part of the name of a row (see --list)", ", ".join(only))
    return found


def print_list(found: Sequence[Case]) -> None:
    """The names of the rows, and the targets that they have by themselves."""
    console = new_console()
    width = max(len(case.name) for case in found)
    for case in found:
        aim = str(target(case.aim, case.shape.head_dim)) if case.aim else ""
        console.print(f"{case.name:<{width}}  {aim}".rstrip(), markup=False)


def measure(
    found: Sequence[Case], settings: Settings, record: Path | None, picture: Path | None
) -> bool:
    """Measure the rows, print each as it comes, and write the files; True if nothing failed and
    no target was missed."""
    for option, path in (("--json", record), ("--chart", picture)):
        if path is not None:
            check_writable(option, path)
    machine, rows = describe(), []
    table = _Table(found)
    table.begin(machine)
    for row in session(found, settings):
        rows.append(row)
        table.add(row)
    table.end(rows)
    if record is not None:
        record.write_text(to_json(machine, settings, rows))
    if picture is not None:
        picture.write_text(chart(rows, f"ringrt bench: {machine['processor']}"))
    return passed(rows)


class _Table:
    """Lines of columns, each printed when its row is there."""

    def __init__(self, found: Sequence[Case]) -> None:
        self._console = new_console()
        beside = len(" beside float32")
        self._width = max(len(case.name) + beside * (case.kind == "kernel") for case in found)

    def begin(self, machine: Mapping[str, Any]) -> None:
        """The machine, and the headings."""
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        self._console.print(f"{machine['processor']}, {machine['cores']} cores; {versions}")
        if not can_pin():
            self._console.print("threads are not pinned: this system cannot bind them to cores")
        self._console.print(
            "each ratio is the median of the ratios of paired calls, limits are of multiply-adds"
        )
        columns = ("row", "median", "quartiles", "best", "target", "GF/s", "limit", "", "")
        self._console.print(f"[bold]{self._line(*columns).rstrip()}[/]")

    def add(self, row: Measurement) -> None:
        """A row."""
        cells = [row.name, _value(row.value), "", _value(row.best), str(row.target or "")]
        if row.quartiles is not None:
            cells[2] = "–".join(map(_value, row.quartiles))
        rate, share = row.figures.get("GF/s a core"), row.figures.get("% of limit")
        cells += [f"{rate:.1f}" if rate else "-", f"{share:.0f}%" if share else "-"]
        style = _STYLES.get(row.verdict, "yellow")
        verdict = f"[{style}]{row.verdict:<9}[/]"
        self._console.print(escape(self._line(*cells, "", "")).rstrip(), end="  ")
        self._console.print(f"{verdict}  {escape(_remark(row))}".rstrip())

    def end(self, rows: Sequence[Measurement]) -> None:
        """How many ended how."""
        counts = Counter(row.verdict for row in rows)
        said = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
        self._console.print(", ".join(said))

    def _line(self, *cells: str) -> str:
        widths = (8, 15, 8, 7, 6, 5, 9, 0)
        rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths, strict=True))
        return f"{cells[0]:<{self._width}} " + " ".join(rest)


def _value(value: float | None) -> str:
    """Three or four digits."""
    if value is None:
        return "-"
    return (
        f"{value:.3f}"
        if abs(value) < 10
        else f"{value:.1f}"
        if abs(value) < 1000
        else f"{value:.0f}"
    )


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _remark(row: Measurement) -> str:
    """The unit where it is no ratio, the median times, and what is to be said."""
    unit = [] if row.unit == "ratio" else [row.unit]
    times = [f"{name} {_seconds(statistics.median(each))}" for name, each in row.times.items()]
    words = [*unit, row.of, ", ".join(times), row.why]
    return "; ".join(filter(None, words))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(option, "whole numbers of at least 1, with commas between", repr(text))
    return found
