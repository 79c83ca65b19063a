"""Backends of this plugin in ringrt's registry, whether it is installed or not."""

from __future__ import annotations

import pytest
import ringrt_torch_sdpa
import sdpa_stand_ins
from ringrt_torch_sdpa.cuda import VARIABLE, CudaSdpa
from sdpa_support import HOPPER

from ringrt.backend import BackendSpec
from ringrt.device.host import HOST
from ringrt.registry import registry


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No environment of the caller's."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("RINGRT_CUDASIM", raising=False)


@pytest.fixture
def host(monkeypatch):
    """The name of the backend for hosts."""
    spec, _ = ringrt_torch_sdpa.ringrt_register_backends()
    monkeypatch.setitem(registry().backends, spec.name, spec)
    return spec.name


@pytest.fixture
def calls(monkeypatch):
    """The names of the operators that were called, in order, and what they got; without questions
    that are asked with tensors without content."""
    made = []
    for name, function in sdpa_stand_ins.STAND_INS.items():
        monkeypatch.setitem(sdpa_stand_ins.STAND_INS, name, _noting(made, name, function))
    return made


def _noting(made, name, function):
    def called(*args, **options):
        if args[0].device.type != "meta":
            made.append((name, args, options))
        return function(*args, **options)

    return called


@pytest.fixture
def stand_in(monkeypatch):
    """`stand_in(machine)`: the name of the backend for GPUs with stand-ins for its operators, on
    the host, as on that machine."""

    def stand_in(machine=HOPPER):
        _, real = ringrt_torch_sdpa.ringrt_register_backends()
        spec = BackendSpec(
            f"{real.name}-on-host",
            real.summary,
            probe=lambda: None,
            load=lambda context: CudaSdpa(HOST, machine, sdpa_stand_ins.STAND_INS),
            rounds_weights=real.rounds_weights,
            contains_nan=real.contains_nan,
        )
        monkeypatch.setitem(registry().backends, spec.name, spec)
        return spec.name

    return stand_in
