"""Results as tables, lines and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu.child import Result

_NARROW = 120


def console() -> Console:
    """Of a terminal's width; a file gets lines that hold a table."""
    made = Console(highlight=False, soft_wrap=True)
    return made if made.is_terminal else Console(highlight=False, soft_wrap=True, width=_NARROW)


def lines(result: Result) -> Iterable[str]:
    """One for each thing that is wrong."""
    for words in result["wrong"]:
        yield f"wrong: {result['section']}: {result['title']}: {words}"


def tables(section: str, results: list[Result]) -> list[Table]:
    """Of a section."""
    makers = {
        "correctness": _counts,
        "contract": _contract,
        "handover": _counts,
        "ring": _ring,
        "speed": _speed,
    }
    return [table for table in makers[section](results) if table.row_count]


def save(path: Path, report: dict[str, Any]) -> None:
    """At once or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, path)


def _counts(results: list[Result]) -> list[Table]:
    table = Table("group", "dtype", "right", "wrong", "refused", "largest share of bound", "where")
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        dtype = next(word for word in result["title"].split() if "float" in word)
        groups.setdefault((result["group"], dtype), []).append(result)
    for (group, dtype), some in groups.items():
        wrong = sum(bool(each["wrong"]) for each in some)
        refused = sum("refused" in each for each in some)
        right = len(some) - wrong - refused
        table.add_row(group, dtype, str(right), str(wrong), str(refused), *_largest(some))
    return [table]


def _contract(results: list[Result]) -> list[Table]:
    table = Table("backend", "passed", "refused", "failed")
    for name in dict.fromkeys(result["group"] for result in results):
        some = [result for result in results if result["group"] == name]
        failed = sum(bool(each["wrong"]) for each in some)
        refused = sum("refused" in each for each in some)
        table.add_row(name, str(len(some) - failed - refused), str(refused), str(failed))
    return [table]


def _largest(results: list[Result]) -> tuple[str, str]:
    shares = [
        (share, name)
        for each in results
        for name, share in each["figures"].get("share of bound", {}).items()
    ]
    return (f"{max(shares)[0]:.2f}", max(shares)[1]) if shares else ("", "")


def _ring(results: list[Result]) -> list[Table]:
    counts = Table("ranks", "transport", "right", "wrong", "largest share of bound", "where")
    times = Table("ranks", "GPUs", "transport", "partition", "pass", "one rank\nms", "ring\nms",
                  "overhead", "overhead\nby GPUs", "exchange under\ncompute")  # fmt: skip
    times.title = "overhead: ring / (one rank / ranks), or / GPUs; 1 is a ring that costs nothing"
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        ranks = result["title"].split()[0]
        groups.setdefault((ranks, result["group"]), []).append(result)
    for (ranks, transport), some in groups.items():
        wrong = sum(bool(each["wrong"]) for each in some)
        largest = _largest(some)
        counts.add_row(ranks, transport, str(len(some) - wrong), str(wrong), *largest)
        for each in some:
            partition = (each["title"].split() + [""] * 3)[3]
            for way in ("forward", "backward"):
                if way in each["figures"]:
                    figures = each["figures"][way]
                    times.add_row(
                        ranks, str(each["figures"]["GPUs"]), transport, partition, way,
                        f"{1e3 * figures['one rank']['seconds']:.2f}",
                        f"{1e3 * figures['seconds']:.2f}", f"{figures['overhead']:.2f}",
                        f"{figures['overhead by GPUs']:.2f}", _percent(figures["overlap"]),
                    )  # fmt: skip
    return [counts, times]


def _speed(results: list[Result]) -> list[Table]:
    matmul = next((r["figures"] for r in results if r["group"] == "matmul" and r["figures"]), None)
    attention = [each for each in results if "rates" in each["figures"]]
    peers = sorted({n for r in attention for n in r["figures"]["rates"]} - _OURS)
    share = "share of\nmatmul" if matmul else "matmul\nnot measured"
    names = (name.replace(" ", "\n") for name in peers)
    table = Table("TFLOP/s", "ringrt", "ringrt\nkernels", share, *names, "ringrt /\nbest",
                  "kernels /\nbest")  # fmt: skip
    if matmul:
        table.title = f"matmul: {matmul['TFLOP/s']:.0f} TFLOP/s, {matmul['by']}"
    for each in attention:
        figures = each["figures"]
        rates = {name: rate["TFLOP/s"] for name, rate in figures["rates"].items()}
        whole = _percent(rates["ringrt"] / matmul["TFLOP/s"]) if matmul else ""
        ratios = (figures.get(f"{name} / best peer") for name in ("ringrt", "ringrt kernels"))
        table.add_row(
            each["title"].replace(" tokens", ""),
            *(f"{rates[name]:.0f}" for name in ("ringrt", "ringrt kernels")),
            whole,
            *(f"{rates[name]:.0f}" if name in rates else "-" for name in peers),
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    why = Table("not measured", "why")
    absent = {name: text for r in attention for name, text in r["figures"]["not measured"].items()}
    for name, text in sorted(absent.items()):
        why.add_row(name, text[:90])
    return [table, why]


_OURS = {"ringrt", "ringrt kernels"}


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"
