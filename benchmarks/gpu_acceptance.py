"""Accepts ringrt's path on CUDA GPUs: is it right, does it run over several ranks, how fast is it?

    python benchmarks/gpu_acceptance.py [--quick] [--json gpu.json] [--sections ...] [--simulate]

Five sections (benchmarks/gpu): correctness against float64 on one rank, the contract put to every
backend of GPUs that is installed (plugins too), arrays handed over by PyTorch and JAX, the ring
over NCCL and staged through the host, and speed beside PyTorch's SDPA and flash-attn. What is wrong
is one line each and never stops the rest. Needs no network. Exit status: 0 if all is accepted, 1 if
anything was wrong, 2 without a GPU (0 with --allow-missing). With --simulate all but speed run at
small sizes on the CUDA simulator. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SECTIONS = ("correctness", "contract", "handover", "ring", "speed")
#: How a section's cases are run: its module, the cases, the environment, and seconds for each.
Run = Callable[[str, list[dict[str, Any]], Mapping[str, str], float], Iterable[dict[str, Any]]]


def main(arguments: Sequence[str] | None = None, run: Run | None = None) -> int:
    """The exit status. Cases are run in processes of their own unless `run` does it otherwise."""
    options = _options(arguments)
    if options.simulate:
        os.environ["RINGRT_CUDASIM"] = "1"
        os.environ.setdefault("RINGRT_CUDASIM_DEVICES", "2")
    try:
        from ringrt.device.driver import missing_cuda, simulated
        from ringrt.registry import registry
    except ImportError as error:
        print(f"gpu acceptance: this Python cannot import ringrt: {error}")
        return 1
    options.simulate = simulated()
    missing = missing_cuda()
    if missing is not None:
        print(f"gpu acceptance: nothing was run: {missing}")
        return 0 if options.allow_missing else 2
    if "cupy" not in registry().backends:
        print("gpu acceptance: ringrt is not installed in this Python: its plugins are not found")
        return 1
    return _Acceptance(options, run).status()


class _Acceptance:
    def __init__(self, options: argparse.Namespace, run: Run | None) -> None:
        from gpu import children, machine, report

        self._options, self._run = options, run or children.run
        self._report, self._console = report, report.console()
        self._machine = machine.describe()
        self._console.print(f"gpu acceptance: {machine.line(self._machine)}")
        self._results: dict[str, list[dict[str, Any]]] = {}
        self._begin = time.monotonic()

    def status(self) -> int:
        """All sections; 1 if anything was wrong."""
        asked = [name for name in SECTIONS if name in self._options.sections]
        for name in asked:
            if name == "speed" and self._options.simulate:
                self._console.print("speed: not run: the simulator has none to measure")
                continue
            self._section(name)
        self._save(finished=True)
        wrong, cases = self._wrong(), sum(map(len, self._results.values()))
        if not cases:
            self._console.print("gpu acceptance: nothing was run")
            return 1
        seconds = time.monotonic() - self._begin
        verdict = "accepted" if not wrong else f"not accepted: {wrong} wrong"
        simulated = ", simulated" if self._options.simulate else ""
        self._console.print(
            f"gpu acceptance: {verdict}, {cases} cases in {seconds:.0f} s{simulated}"
        )
        return int(wrong > 0)

    def _section(self, name: str) -> None:
        results = self._results[name] = []
        try:
            for result in self._results_of(name):
                results.append(result)
                for line in self._report.lines(result):
                    self._console.print(line, markup=False)
        except Exception as error:
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            known = {"section": name, "group": "section", "title": "the section itself"}
            results.append(known | {"wrong": [words], "figures": {}})
            self._console.print(*self._report.lines(results[-1]), markup=False)
        if name == "ring" and self._options.simulate:
            self._console.print("ring: times on the simulator say nothing")
        for table in self._report.tables(name, [r for r in results if r["group"] != "section"]):
            self._console.print(table)
        self._save()

    def _results_of(self, name: str) -> Iterator[dict[str, Any]]:
        quick, simulate = self._options.quick, self._options.simulate
        if name == "correctness":
            from gpu import correctness

            yield from self._run(
                correctness.__name__, correctness.cases(quick, simulate), {}, correctness.LIMIT_S
            )
        elif name == "contract":
            from gpu import contract

            cases = contract.cases(quick)
            yield from self._run(contract.__name__, cases, {}, contract.LIMIT_S)
        elif name == "handover":
            from gpu import handover

            cases = handover.cases(quick)
            # JAX would take most of the GPU's memory for itself.
            environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            yield from self._run(handover.__name__, cases, environment, handover.LIMIT_S)
        elif name == "speed":
            from gpu import speed

            yield from self._run(speed.__name__, speed.cases(quick), {}, speed.LIMIT_S)
        else:
            yield from self._rings()

    def _rings(self) -> Iterator[dict[str, Any]]:
        """Every transport and number of ranks in a process of its own: NCCL may hang, and finds
        its settings in the environment."""
        from gpu import ring

        from ringrt.device.driver import missing_nccl

        quick, simulate = self._options.quick, self._options.simulate
        gpus = len(self._machine["gpus"])
        for transport in ring.TRANSPORTS:
            missing = missing_nccl() if transport == "nccl" else None
            if missing is not None:
                case = {"section": "ring", "group": transport, "title": f"all {transport}"}
                yield case | {"wrong": [f"not run: {missing}"], "figures": {}}
                continue
            for ranks in ring.rank_counts(gpus, simulate):
                cases = ring.cases(transport, ranks, quick, simulate)
                environment = ring.environment(ranks, gpus) if transport == "nccl" else {}
                yield from self._run(ring.__name__, cases, environment, ring.LIMIT_S)

    def _wrong(self) -> int:
        return sum(bool(r["wrong"]) for results in self._results.values() for r in results)

    def _save(self, finished: bool = False) -> None:
        """After every section too, so that what was found outlives what comes next."""
        if self._options.json is None:
            return
        report = {
            "accepted": finished and bool(self._results) and not self._wrong(),
            "options": {"quick": self._options.quick, "sections": list(self._results)},
            "machine": self._machine,
            "sections": self._results,
        }
        self._report.save(self._options.json, report)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all that was found there")
    parser.add_argument("--allow-missing", action="store_true", help="no GPU is no error")
    parser.add_argument("--simulate", action="store_true", help="small, on the CUDA simulator")
    parser.add_argument("--sections", type=_sections, default=SECTIONS, metavar="NAME,...",
                        help=f"some of {','.join(SECTIONS)}")  # fmt: skip
    return parser.parse_args(arguments)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; there are {SECTIONS}")
    return names


if __name__ == "__main__":
    sys.exit(main())
