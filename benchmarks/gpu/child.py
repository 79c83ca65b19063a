"""The cases of a section one by one, in this process. As a program: cases from stdin, results as
lines of JSON to the file descriptor that is named after the section's module."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

Result = dict[str, Any]


def known(module: str, case: dict[str, Any]) -> Result:
    """What a result says of its case."""
    section = module.rpartition(".")[2]
    return {"section": section, "group": case["group"], "title": case["title"]}


def results(module: str, cases: list[dict[str, Any]]) -> Iterator[Result]:
    """What became of every case. A failing one stops the rest only where nothing can be done in
    this process any more: then its result is the last, and `broken`."""
    run = import_module(module).run
    for case in cases:
        result = known(module, case)
        try:
            result |= run(case)
        except Exception as error:
            text = str(error) or "no more is known"
            line = f"{type(error).__name__}: {text.splitlines()[0]}"
            result |= {"wrong": [line], "figures": {}, "broken": module == "gpu.ring" or _broken()}
        yield result
        if result.get("broken"):
            return


def _broken() -> bool:
    """Whether CUDA is out of order here: after a fault in a kernel it stays so."""
    from ringrt.device.driver import cupy

    try:
        cupy().cuda.runtime.deviceSynchronize()
    except Exception:
        return True
    return False


def main() -> None:
    """The program. Leaves at once when done: threads that hang must not keep it."""
    module, pipe = sys.argv[1], int(sys.argv[2])
    with os.fdopen(pipe, "w") as to:
        for result in results(module, json.load(sys.stdin)):
            print(json.dumps(result), file=to, flush=True)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
