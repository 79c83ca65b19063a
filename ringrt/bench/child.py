"""A process that measures cases: `python -m ringrt.bench.child FILE [mpi | gloo RANK SIZE STORE]`.
Rows come on stdout as lines of JSON, and a line with "done" after those of each case; where that
is "broken", no more cases can be measured by these processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ringrt.bench.cases import Case, Settings, settings_from_json
from ringrt.bench.check import Wrong
from ringrt.bench.measurement import FAILED, Measurement

#: Which module of the package measures a kind of case.
_MODULES = {
    "kernel": "kernel",
    "sgemm": "limits",
    "torch.mm": "limits",
    "flop limit": "limits",
    "import": "startup",
    "cold": "startup",
    "memory": "memory",
    "one rank": "rings",
    "two ranks": "rings",
    "partitions": "rings",
    "steps": "rings",
    "gloo": "gloo_ring",
    "pieces": "verbs",
    "GQA": "verbs",
    "window": "verbs",
    "documents": "verbs",
}


def rows(case: Case, settings: Settings) -> list[Measurement]:
    """What comes of a case; a wrong result is a row that failed."""
    run = import_module(f"ringrt.bench.{_MODULES[case.kind]}").run
    try:
        return list(run(case, settings))
    except Wrong as error:
        return [case.row(state=FAILED, why=str(error))]


def answers(
    cases: list[Case],
    settings: Settings,
    measure: Callable[[Case, Settings], list[Measurement]] = rows,
) -> Iterator[dict[str, Any]]:
    """A record for each row, and one after each case. What goes wrong fails the case."""
    for case in cases:
        try:
            found = measure(case, settings)
        except Exception as error:
            text = str(error).strip().splitlines()
            why = f"{type(error).__name__}: {text[0] if text else 'no more is known'}"
            found = [case.row(state=FAILED, why=why)]
        yield from (row.to_json() for row in found)
        # Of several processes the others may still be at it, and would not come to a next case.
        broken = case.processes != "one" and any(row.state == FAILED for row in found)
        yield {"done": case.name, "broken": broken}
        if broken:
            return


def main() -> None:
    """The program. Leaves at once when done: threads that hang must not keep it."""
    # Whatever else is printed is no answer.
    to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.loads(Path(sys.argv[1]).read_text())
    leads = _join(sys.argv[2:])
    cases = [Case.from_json(record) for record in asked["cases"]]
    for answer in answers(cases, settings_from_json(asked["settings"])):
        if leads:
            print(json.dumps(answer), file=to, flush=True)
    to.flush()
    if sys.argv[2:] != ["mpi"]:
        os._exit(0)


def _join(group: list[str]) -> bool:
    """Join the other processes; whether this one speaks for all."""
    if not group:
        return True
    if group[0] == "mpi":
        from ringrt.transports import mpi_launch

        launch = mpi_launch()
        return launch is None or launch.rank == 0
    import torch.distributed as dist

    rank, size, store = int(group[1]), int(group[2]), group[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    return rank == 0


if __name__ == "__main__":
    main()
