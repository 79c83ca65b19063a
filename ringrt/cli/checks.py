"""`ringrt check-backend` and `ringrt check-transport`: what they print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape

from ringrt.cli.tables import new_console
from ringrt.conformance.checks import Check
from ringrt.conformance.suites import Suite, chosen

_STYLES = {"passed": "green", "refused": "yellow", "failed": "red"}


def print_names(checks: Iterable[Check[Any]]) -> None:
    """What checks there are."""
    checks = list(checks)
    width = max(len(check.name) for check in checks)
    for check in checks:
        new_console().print(f"{check.name:<{width}}  {escape(check.summary)}")


def check_and_print(suite: Suite, only: Sequence[str], speaks: bool = True) -> bool:
    """Run checks and print a row for each as it ends, and how many ended how; True if none
    failed. Only a process that `speaks` prints."""
    console = new_console()
    console.quiet = not speaks
    checks = chosen(suite.checks, only)
    width = max(len(check.name) for check in checks)
    counts: Counter[str] = Counter()
    for check in checks:
        console.print(f"{check.name:<{width}}  ", end="")
        outcome = suite.run(check)
        counts[outcome.state] += 1
        state = f"[{_STYLES[outcome.state]}]{outcome.state}[/]"
        pad = " " * (9 - len(outcome.state)) if outcome.detail else ""
        console.print(f"{state}{pad}{escape(outcome.detail)}")
    console.print(", ".join(f"{counts[state]} {state}" for state in _STYLES))
    return not counts["failed"]
