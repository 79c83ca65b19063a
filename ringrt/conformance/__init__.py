"""The contract of backends and transports as checks that anybody's plugin can be put to.

`ringrt check-backend NAME` and `ringrt check-transport NAME` run them; so does pytest, with
`--ringrt-backend NAME` and `--ringrt-transport NAME`, or in a test of your own:

    import pytest
    from ringrt.conformance import backend_checks

    @pytest.mark.parametrize("check", backend_checks("mine"), ids=str)
    def test_the_contract(check):
        check()

Nothing is imported here that pytest would have to load when it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringrt.conformance.suites import BoundCheck

__all__ = ["backend_checks", "transport_checks"]


def backend_checks(name: str) -> list[BoundCheck]:
    """The checks of a backend, to be called one by one; see `BoundCheck`. Raises `ConfigError`
    or `BackendUnavailable` where there is none of that name, or none that can run here."""
    from ringrt.conformance.suites import BackendSuite

    return BackendSuite(name).bound()


def transport_checks(name: str) -> list[BoundCheck]:
    """The checks of a transport, as above; its ranks are threads. Raises `ConfigError` or
    `TransportUnavailable`."""
    from ringrt.conformance.suites import TransportSuite

    return TransportSuite(name).bound()
