"""The contract of a backend (`ringrt check-backend`), put to every backend of GPUs that runs here,
those of plugins too."""

from __future__ import annotations

from functools import cache
from typing import Any

from ringrt.conformance.suites import BackendSuite
from ringrt.device.driver import simulated
from ringrt.registry import missing_for, registry

#: Seconds for one check: its kernels are compiled first.
LIMIT_S = 300.0
#: On the simulator the rest takes too long.
_FEW = ("does-something", "float16", "backward-float16")


def cases(quick: bool) -> list[dict[str, Any]]:
    """One for each backend and check."""
    suites = [BackendSuite(name) for name in _backends()]
    return [
        {"group": suite.spec.name, "title": f"{suite.spec.name} {check.name}", "check": check.name}
        for suite in suites
        for check in suite.checks
        if not (quick or simulated()) or check.name in _FEW
    ]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What came of one check."""
    suite = _suite(case["group"])
    [check] = [each for each in suite.checks if each.name == case["check"]]
    outcome = suite.run(check)
    result: dict[str, Any] = {"wrong": [], "figures": {}}
    if outcome.state == "failed":
        result["wrong"] = [outcome.detail]
    elif outcome.state == "refused":
        result["refused"] = outcome.detail
    return result


def _backends() -> list[str]:
    """Those whose arrays lie on a GPU. Numba needs a real one, and simulators of its own."""
    found = registry().backends.values()
    return [spec.name for spec in found if spec.device == "cuda" and missing_for(spec) is None]


@cache
def _suite(name: str) -> BackendSuite:
    return BackendSuite(name)
