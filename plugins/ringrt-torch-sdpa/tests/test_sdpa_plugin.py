"""The plugin as ringrt finds it: what it brings, and what is missing on a machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ringrt_torch_sdpa
import torch
from ringrt_torch_sdpa.cuda import VARIABLE, CudaSdpa
from sdpa_stand_ins import STAND_INS
from sdpa_support import HOPPER

from ringrt.device.host import HOST
from ringrt.errors import ConfigError
from ringrt.hookspecs import PROTOCOL

HERE = Path(ringrt_torch_sdpa.__file__).parents[1]


def test_two_backends_that_are_not_taken_unasked():
    host, gpu = ringrt_torch_sdpa.ringrt_register_backends()
    assert ringrt_torch_sdpa.RINGRT_PROTOCOL == PROTOCOL
    assert (host.name, host.device, host.priority) == ("torch-sdpa", "cpu", None)
    assert (gpu.name, gpu.device, gpu.priority) == ("torch-sdpa-cuda", "cuda", None)
    assert (host.rounds_weights, gpu.rounds_weights) == (False, True)
    assert (host.contains_nan, gpu.contains_nan) == (False, False)


def test_nothing_heavy_is_imported_before_a_backend_is_asked_for():
    code = (
        "import sys, ringrt_torch_sdpa as plugin\n"
        "specs = plugin.ringrt_register_backends()\n"
        "print([specs[0].probe(), 'torch' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=60, cwd=HERE)  # fmt: skip
    assert done.stdout.strip() == "[None, False]", done.stderr


def test_what_is_missing_is_said_in_words(monkeypatch):
    host, gpu = ringrt_torch_sdpa.ringrt_register_backends()
    assert host.probe() is None
    monkeypatch.setenv("RINGRT_CUDASIM", "1")
    assert "simulator: unset RINGRT_CUDASIM" in gpu.probe()
    monkeypatch.delenv("RINGRT_CUDASIM")
    monkeypatch.setattr(ringrt_torch_sdpa, "missing_cuda", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "does not see the GPU" in gpu.probe()
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.probe() is None
    monkeypatch.setattr(ringrt_torch_sdpa, "missing_cuda", lambda: "there is no GPU")
    assert gpu.probe() == "there is no GPU"
    monkeypatch.setattr(ringrt_torch_sdpa, "find_spec", lambda name: None)
    assert host.probe() == gpu.probe() == "PyTorch is not installed: pip install torch"


def test_a_kernel_that_there_is_not_cannot_be_asked_for(monkeypatch):
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ConfigError, match="RINGRT_TORCH_SDPA: expected cudnn or flash or eff"):
        CudaSdpa(HOST, HOPPER, STAND_INS)
