"""FlashAttention's modules, as if they were installed, and backends made of them on the host."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import flash_standins as standins
import pytest
import torch
from ringrt_flash_attn.choose import VARIABLE

from ringrt.device.host import HOST

#: The functions of each version by its module, and the GPU it is tried for first.
MODULES = {
    2: ("flash_attn.flash_attn_interface", standins.FLASH2, 80),
    3: ("flash_attn_interface", standins.FLASH3, 90),
    4: ("flash_attn.cute.interface", standins.FLASH4, 100),
}


# The tensors are small: more threads would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No environment, and no GPU of an earlier test."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("RINGRT_CUDASIM", raising=False)
    monkeypatch.setattr(standins, "ARCH", 90)
    standins.CALLS.clear()


@pytest.fixture
def put(monkeypatch):
    """`put(name, functions)` makes a module that can be imported, and the packages above it."""

    def put(name, functions):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            module = ModuleType(path)
            module.__spec__ = ModuleSpec(path, None, is_package=end < len(parts))
            monkeypatch.setitem(sys.modules, path, module)
        for key, function in functions.items():
            setattr(module, key, function)

    return put


@pytest.fixture
def made(put, monkeypatch):
    """`made(2, 3)` is a backend on the host with the stand-ins of these versions, best first."""

    def made(*versions, capability=None):
        from ringrt_flash_attn.backend import FlashAttnBackend
        from ringrt_flash_attn.kernels import KERNELS

        kernels = []
        for version in versions:
            name, functions, default = MODULES[version]
            put(name, functions)
            kernels.append(KERNELS[version](capability or default))
        monkeypatch.setattr(standins, "ARCH", capability or MODULES[versions[0]][2])
        return FlashAttnBackend(kernels, HOST)

    return made
