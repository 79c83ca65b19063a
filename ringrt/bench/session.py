"""From what is asked to the rows, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec

from ringrt.bench import children
from ringrt.bench.cases import Case, Settings
from ringrt.bench.measurement import SKIPPED, Measurement
from ringrt.calls import available_cores

Measure = Callable[[Sequence[Case], Settings], Iterable[Measurement]]

#: What installs a module.
_EXTRAS = {"torch": "pip install torch", "mpi4py": "pip install 'ringrt[mpi]'"}


def session(
    cases: Sequence[Case], settings: Settings, measure: Measure = children.measured
) -> Iterator[Measurement]:
    """The rows of the cases, as they are measured. Cases that want the same cores and processes
    share them."""
    seen: list[Measurement] = []
    for key, together in itertools.groupby(cases, _alike):
        batch = list(together)
        lacking = {case.name: _lacking(case) for case in batch}
        if key[0] == "best":
            rows: Iterable[Measurement] = [_best(case, seen) for case in batch]
        else:
            rows = measure([case for case in batch if lacking[case.name] is None], settings)
        for row in itertools.chain(rows, _skipped(batch, lacking)):
            seen.append(row)
            yield row


def _skipped(cases: Sequence[Case], lacking: Mapping[str, str | None]) -> Iterator[Measurement]:
    for case in cases:
        if (why := lacking[case.name]) is not None:
            yield case.row(state=SKIPPED, why=why)


def _alike(case: Case) -> tuple[object, ...]:
    derived = case.kind if case.kind == "best" else ""
    return derived, case.suite, case.processes, case.cores


def _lacking(case: Case) -> str | None:
    """What a case needs that is not there."""
    for name in case.needs:
        if find_spec(name) is None:
            return f"{name} is not installed: {_EXTRAS[name]}"
    if case.processes == "mpi" and children.mpirun() is None:
        return f"there is no mpirun: {_EXTRAS['mpi4py']}"
    if case.cores > available_cores():
        return f"it needs {case.cores} cores"
    return None


def _best(case: Case, seen: Iterable[Measurement]) -> Measurement:
    """The largest share of the limit among the kernel's rows of the group so far."""
    shares = [
        row.figures["% of limit"]
        for row in seen
        if (row.group, row.threads) == (case.group, case.cores) and "% of limit" in row.figures
    ]
    if not shares:
        return case.row(unit="% of limit", why="the backend does not say what its limit is")
    return case.row(unit="% of limit", value=max(shares), best=max(shares))
