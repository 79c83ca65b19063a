"""The contract as pytest items: `pytest --ringrt-backend NAME --ringrt-transport NAME`.

Each option may be given several times, and needs no test file. An item is one check; what a
backend refuses is passed, and its words are in the report (`pytest -rP` shows them). pytest loads
this module whenever it starts, so it imports nothing but pytest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ringrt.conformance.suites import BoundCheck


_KINDS = ("backend", "transport")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options."""
    group = parser.getgroup("ringrt", "the contract of ringrt's plugins")
    for kind in _KINDS:
        group.addoption(
            f"--ringrt-{kind}",
            action="append",
            default=[],
            metavar="NAME",
            help=f"put this {kind} to the whole contract; may be repeated",
        )


def pytest_configure(config: pytest.Config) -> None:
    """A name that is wrong is told before anything is collected, and only once."""
    for kind, name in _asked(config):
        _checks(kind, name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add an item for each check of each name; before others select among the items."""
    for kind, name in _asked(config):
        label, checks = f"{kind} {name}", _checks(kind, name)
        contract = Contract.from_parent(session, name=label, nodeid=label, checks=checks)
        report = config.hook.pytest_make_collect_report(collector=contract)
        config.hook.pytest_collectreport(report=report)
        items.extend(report.result)


def _asked(config: pytest.Config) -> list[tuple[str, str]]:
    """(kind, name) of what is to be checked."""
    return [(kind, name) for kind in _KINDS for name in config.getoption(f"--ringrt-{kind}")]


def _checks(kind: str, name: str) -> list[BoundCheck]:
    from ringrt.conformance import backend_checks, transport_checks
    from ringrt.errors import RingrtError

    try:
        return backend_checks(name) if kind == "backend" else transport_checks(name)
    except RingrtError as error:
        raise pytest.UsageError(f"--ringrt-{kind}: {error}") from error


class Contract(pytest.Collector):
    """The checks of one backend or transport."""

    def __init__(self, *, checks: Sequence[BoundCheck], **options: Any) -> None:
        super().__init__(**options)
        self._checks = checks

    def collect(self) -> Iterator[pytest.Item]:
        """An item each."""
        for check in self._checks:
            yield ContractItem.from_parent(self, name=str(check), check=check)


class ContractItem(pytest.Item):
    """One check."""

    def __init__(self, *, check: BoundCheck, **options: Any) -> None:
        super().__init__(**options)
        self._check = check

    def runtest(self) -> None:
        """Raises what failed."""
        outcome = self._check()
        if outcome.detail:
            self.add_report_section("call", "ringrt", f"{outcome.state}: {outcome.detail}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """One line for what a check found; a traceback for anything else."""
        from ringrt.conformance.checks import Failed

        if isinstance(excinfo.value, Failed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """By its own name: it lies in no file."""
        return self.path, None, self.nodeid
