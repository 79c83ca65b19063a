"""ringrt's own conformance suite, on each version's stand-in, on the host."""

from __future__ import annotations

import pytest
from ringrt_flash_attn import warm

from ringrt.backend import BackendSpec
from ringrt.conformance.suites import BACKEND_CHECKS, BackendSuite
from ringrt.registry import registry

#: Versions, best first, and the GPU that the plugin takes them to run on.
SETS = [((2,), 80), ((3,), 90), ((4,), 100)]

#: Words of what all of them refuse, and of what version 4 does alone.
ALWAYS = ("dtype float32", "dtype float64", "contains_nan=False")
ONLY_4 = (*ALWAYS, "softcap")


@pytest.fixture
def suite(made, monkeypatch):
    """`suite((2,), 80)`: the suite of such a backend."""

    def suite(versions, capability):
        # It has no compiler to warm up, and the host is slow.
        monkeypatch.setattr(warm, "ROWS", 4)
        spec = BackendSpec(
            name="flash-attn-on-host",
            summary="the stand-ins",
            probe=lambda: None,
            load=lambda context: made(*versions, capability=capability),
            rounds_weights=True,
            contains_nan=False,
        )
        monkeypatch.setitem(registry().backends, spec.name, spec)
        return BackendSuite(spec.name)

    return suite


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize(("versions", "capability"), SETS, ids=str)
def test_conformance(suite, check, versions, capability):
    outcome = suite(versions, capability).run(check)
    assert outcome.state != "failed", outcome.error
    if outcome.state == "refused":
        words = ONLY_4 if versions == (4,) else ALWAYS
        assert any(word in outcome.detail for word in words), outcome.detail
