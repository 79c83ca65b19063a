"""`torch-sdpa-cuda`: PyTorch's kernels for GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ringrt.device import Device
from ringrt.device.cuda import CudaDevice
from ringrt.errors import ConfigError
from ringrt.plan import bands
from ringrt.plan.bands import shape_of
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile
from ringrt.torch_blocks import Tensor
from ringrt_torch_sdpa.blocks import SdpaBackend, padded
from ringrt_torch_sdpa.choose import NAMES, Choice, Machine, Name, choose
from ringrt_torch_sdpa.kernels import Kernel, kernels
from ringrt_torch_sdpa.schemas import CUDNN, EFFICIENT, FLASH, operators

#: One of the kernels, to be used for both passes in place of those that are chosen.
VARIABLE = "RINGRT_TORCH_SDPA"
#: Kernels read so many bytes at a time.
_ALIGNED = 16


class CudaSdpa(SdpaBackend):
    """See `ringrt.backend.Backend`. The machine and the operators are found by themselves; tests
    hand over others."""

    def __init__(
        self,
        device: Device,
        machine: Machine | None = None,
        found: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(device)
        self._machine = machine or machine_of(device)
        self._only = _forced()
        self._kernels = kernels(found or operators((CUDNN, FLASH, EFFICIENT)))

    def supports(self, problem: Problem) -> str | None:
        """What one of the kernels does."""
        if problem.softcap is not None:
            return "softcap is not implemented"
        choice = self._choose(problem)
        return choice if isinstance(choice, str) else None

    def parts(self, tile: Tile, problem: Problem) -> Iterable[Tile]:
        """Full parts and causal squares: the kernels align others differently."""
        return bands.parts(tile)

    def forward(
        self, qkv: list[Tensor], scale: float, tile: Tile, problem: Problem
    ) -> tuple[Tensor, Tensor]:
        """See `SdpaBackend.forward`."""
        choice = self._choose(problem)
        assert isinstance(choice, Choice)
        kernel = self._kernels[choice.one_key if tile.k1 - tile.k0 == 1 else choice.forward]
        qkv = _readable(qkv, (0, 0, 1), kernel, problem)
        out, lse = kernel.forward(qkv, shape_of(tile) != "full", scale)
        return out[..., : problem.value_dim], lse

    def backward_of(
        self, tensors: list[Tensor], lse: Tensor, scale: float, tile: Tile, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SdpaBackend.backward_of`."""
        choice = self._choose(problem)
        assert isinstance(choice, Choice)
        kernel = self._kernels[choice.backward]
        dout, *qkv, out = _readable(tensors, (1, 0, 0, 1, 1), kernel, problem)
        dq, dk, dv = kernel.backward(dout, qkv, out, lse, shape_of(tile) != "full", scale)
        dim = problem.head_dim
        return dq[..., :dim], dk[..., :dim], dv[..., : problem.value_dim]

    def _choose(self, problem: Problem) -> Choice | str:
        shape = problem.dtype, problem.head_dim, problem.value_dim
        choice = choose(*shape, self._machine, self._only)
        if self._only is not None and isinstance(choice, str):
            return f"{VARIABLE}={self._only}: {choice}"
        return choice


def machine_of(device: Device) -> Machine:
    """A GPU, and what PyTorch has for it and is allowed to use."""
    import torch

    assert isinstance(device, CudaDevice)
    cuda: Any = torch.backends.cuda
    version: Any = torch.backends.cudnn.version
    cudnn = version() if cuda.cudnn_sdp_enabled() else None
    return Machine(
        device.capability,
        cudnn=cudnn or 0,
        flash=cuda.is_flash_attention_available() and cuda.flash_sdp_enabled(),
        efficient=cuda.mem_efficient_sdp_enabled(),
    )


def _forced() -> Name | None:
    name = os.environ.get(VARIABLE, "")
    if not name:
        return None
    for known in NAMES:
        if name == known:
            return known
    raise ConfigError(VARIABLE, " or ".join(NAMES), repr(name))


def _readable(
    tensors: list[Tensor], of_value: tuple[int, ...], kernel: Kernel, problem: Problem
) -> list[Tensor]:
    """The tensors as a kernel reads them: dims (that of the value, or that of the head) a multiple
    of 8, and the same for all where it wants that, and aligned."""
    dims = [-(-dim // 8) * 8 for dim in (problem.head_dim, problem.value_dim)]
    if kernel.one_dim:
        dims = [max(dims)] * 2
    return [_aligned(padded(x, dims[of])) for x, of in zip(tensors, of_value, strict=True)]


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy if elements do not lie side by side or rows do not begin at multiples of 16
    bytes."""
    import torch

    step = _ALIGNED // x.dtype.itemsize
    fine = x.stride(-1) == 1 and x.data_ptr() % _ALIGNED == 0
    if fine and all(stride % step == 0 for stride in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)
