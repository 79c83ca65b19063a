"""All checks of one backend or transport, ready to be run one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

from ringrt.conformance import (
    backward_checks,
    call_checks,
    exchange_checks,
    fault_checks,
    forward_checks,
    ring_checks,
    transport_ring_checks,
)
from ringrt.conformance.checks import Check, Outcome, attempt
from ringrt.conformance.ranks import Rank
from ringrt.conformance.rings import rings_of
from ringrt.conformance.subject import Subject, new_device
from ringrt.device import Device
from ringrt.errors import ConfigError
from ringrt.registry import registry

#: The checks of a backend, from the plain to the intricate.
BACKEND_CHECKS: tuple[Check[Subject], ...] = tuple(
    check
    for module in (forward_checks, call_checks, backward_checks, ring_checks)
    for check in module.CHECKS
)

#: What is checked of a transport where all goes well, and of what happens where a rank fails.
FAULT_CHECKS: tuple[Check[Rank], ...] = tuple(fault_checks.CHECKS)
TRANSPORT_CHECKS: tuple[Check[Rank], ...] = (
    *exchange_checks.CHECKS,
    *transport_ring_checks.CHECKS,
    *FAULT_CHECKS,
)
#: Rings of so many thread ranks; of faults, one with a bystander.
_SIZES, _FAULT_SIZES = (1, 2, 3, 5), (3,)


class Suite(Protocol):
    """The checks of one subject."""

    checks: Sequence[Check[Any]]

    def run(self, check: Check[Any]) -> Outcome:
        """What comes of one of them."""


@dataclass(frozen=True, slots=True)
class BoundCheck:
    """A check of one subject. Called, it returns an `Outcome`, passed or refused, or raises what
    failed: an `AssertionError` of one line, or the error that came."""

    suite: Suite
    check: Check[Any]

    def __str__(self) -> str:
        return self.check.name

    def __call__(self) -> Outcome:
        outcome = self.suite.run(self.check)
        if outcome.state == "failed":
            assert outcome.error is not None
            raise outcome.error
        return outcome


class BackendSuite:
    """The checks of a backend. Each gets a fresh one, all on one device."""

    def __init__(self, name: str) -> None:
        if name == "auto":
            raise ConfigError("backend", "the name of one", repr(name))
        self.spec = registry().backend(name)
        self.checks: Sequence[Check[Any]] = BACKEND_CHECKS
        self._device: Device | None = None

    def run(self, check: Check[Subject]) -> Outcome:
        """Make a backend, check it, close it."""
        self._device = self._device or new_device(self.spec)
        subject = Subject(self.spec.name, self._device)
        outcome = check.run(subject)
        closed = attempt(check.name, subject.close)
        if outcome.state == "failed" or closed.state == "failed":
            return outcome if outcome.state == "failed" else closed
        if outcome.state == "passed" and subject.refusals:
            words = "; ".join(dict.fromkeys(subject.refusals))
            return replace(outcome, detail=f"in part refused: {words}")
        return outcome

    def bound(self) -> list[BoundCheck]:
        """One for each check."""
        return [BoundCheck(self, check) for check in self.checks]


class TransportSuite:
    """The checks of a transport. Where its launcher started this process, and `processes` is
    True, all processes run them together, and learn of one another what came of each; otherwise
    its ranks are threads."""

    def __init__(self, name: str, processes: bool = False) -> None:
        self.spec = registry().transport(name)
        self.checks: Sequence[Check[Any]] = TRANSPORT_CHECKS
        self._rings = rings_of(self.spec, processes)

    def run(self, check: Check[Rank]) -> Outcome:
        """The check on rings of several sizes, up to the first that fails."""
        outcome = Outcome(check.name, "refused", "it takes 2 ranks at least")
        for size in self._rings.sizes(_FAULT_SIZES if check in FAULT_CHECKS else _SIZES):
            outcome = self._rings.run(check, size)
            if outcome.state == "failed":
                break
        return outcome

    def bound(self) -> list[BoundCheck]:
        """One for each check."""
        return [BoundCheck(self, check) for check in self.checks]

    def leave(self, code: int) -> NoReturn:
        """End the process with a code; call it after the last check, where processes ran them."""
        self._rings.leave(code)


def chosen(checks: Iterable[Check[Any]], only: Sequence[str]) -> list[Check[Any]]:
    """The checks of these names, in their own order, or all; `ConfigError` for a name that is
    none."""
    checks = list(checks)
    names = [check.name for check in checks]
    for name in only:
        if name not in names:
            raise ConfigError("--only", "a name that `--list` shows", repr(name))
    return [check for check in checks if not only or check.name in only]
