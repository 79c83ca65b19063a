"""What ringrt is told of the backend, before and when it is loaded."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import flash_standins
import pytest
import ringrt_flash_attn
import torch
from ringrt_flash_attn.backend import load

from ringrt.backend import BackendContext
from ringrt.device.cuda import CudaDevice
from ringrt.errors import BackendUnavailable
from ringrt.registry import load as registered

POINT = EntryPoint("ringrt_flash_attn", "ringrt_flash_attn", "ringrt")


@pytest.fixture
def spec():
    """As ringrt finds it."""
    registry = registered([POINT])
    assert not registry.problems
    return registry.backends["flash-attn"]


class FakeGpu(CudaDevice):
    """One of a given capability, with nothing behind it."""

    index, capability = 0, 0

    def __init__(self, capability):
        self.capability = capability


def test_the_spec(spec):
    assert (spec.device, spec.priority) == ("cuda", None)
    assert (spec.rounds_weights, spec.contains_nan) == (True, False)


def test_nothing_heavy_is_imported_before_it_is_loaded():
    code = (
        "import sys, ringrt_flash_attn as it; it.ringrt_register_backends()[0].probe(); "
        "print([name for name in ('torch', 'cupy', 'flash_attn') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture
def here(monkeypatch):
    """A machine that has all that is needed; `here(name=value)` takes something away."""

    def here(torch_found=True, versions=(2,), simulated=False, missing=None, gpu=(8, 0)):
        found = object() if torch_found else None
        monkeypatch.setattr(ringrt_flash_attn, "find_spec", {"torch": found}.get)
        monkeypatch.setattr(ringrt_flash_attn, "installed", lambda: frozenset(versions))
        monkeypatch.setattr(ringrt_flash_attn, "simulated", lambda: simulated)
        monkeypatch.setattr(ringrt_flash_attn, "missing_cuda", lambda: missing)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)

    return here


def test_where_all_is_there_nothing_is_missing(spec, here):
    here()
    assert spec.probe() is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch_found": False}, "PyTorch is not installed: pip install torch"),
        ({"versions": ()}, "FlashAttention is not installed: pip install flash-attn"),
        ({"simulated": True}, "PyTorch cannot use the CUDA simulator: unset RINGRT_CUDASIM"),
        ({"missing": "there is no CUDA GPU"}, "there is no CUDA GPU"),
        ({"gpu": None}, "this PyTorch finds no CUDA GPU: install a build of it for CUDA"),
        ({"gpu": (7, 5)}, "no FlashAttention runs on sm_75: it needs a GPU from sm_80"),
        ({"versions": (3,)}, "FlashAttention 3 does not serve sm_80: pip install flash-attn"),
    ],
)
def test_what_is_missing_is_one_line(spec, here, changes, words):
    here(**changes)
    assert spec.probe().startswith(words)
    assert "\n" not in spec.probe()


def test_a_forced_version_that_is_not_there_is_missing(spec, here, monkeypatch):
    here(gpu=(9, 0))
    monkeypatch.setenv("RINGRT_FLASH_ATTN", "3")
    assert spec.probe().startswith("RINGRT_FLASH_ATTN=3: FlashAttention 3 is not installed (2 is)")


def test_loading_takes_the_versions_that_fit_the_gpu(put, monkeypatch):
    put("flash_attn_interface", flash_standins.FLASH3)
    put("flash_attn.flash_attn_interface", flash_standins.FLASH2)
    monkeypatch.setattr("ringrt_flash_attn.backend.installed", lambda: frozenset({2, 3}))
    for capability, versions in ((90, [3, 2]), (80, [2])):
        backend = load(BackendContext(1, FakeGpu(capability)))
        assert [kernel.version for kernel in backend._kernels] == versions
        assert [kernel.capability for kernel in backend._kernels] == [capability] * len(versions)


def test_a_version_can_be_forced_by_the_environment(spec, put, monkeypatch):
    put("flash_attn.flash_attn_interface", flash_standins.FLASH2)
    monkeypatch.setattr("ringrt_flash_attn.backend.installed", lambda: frozenset({2, 3}))
    monkeypatch.setenv("RINGRT_FLASH_ATTN", "2")
    backend = spec.load(BackendContext(1, FakeGpu(90)))
    assert [kernel.version for kernel in backend._kernels] == [2]
    monkeypatch.setenv("RINGRT_FLASH_ATTN", "4")
    with pytest.raises(BackendUnavailable, match="FlashAttention 4 is not installed"):
        spec.load(BackendContext(1, FakeGpu(90)))


def test_it_has_a_backward_pass_and_wants_out():
    from ringrt_flash_attn.backend import FlashAttnBackend

    assert FlashAttnBackend.backward
    assert FlashAttnBackend.needs_out
