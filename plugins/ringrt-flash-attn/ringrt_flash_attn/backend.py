"""The backend: blocks handed to FlashAttention as its kernels want them, results made plain."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence

import torch
from torch.nn.functional import pad

from ringrt.backend import BackendContext
from ringrt.device import Device
from ringrt.device.cuda import CudaDevice
from ringrt.errors import Unsupported
from ringrt.plan.bands import parts as cut
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile
from ringrt.torch_blocks import TorchBlockBackend
from ringrt_flash_attn.choose import VARIABLE, choose, installed
from ringrt_flash_attn.kernels import KERNELS, Kernel, Scores
from ringrt_flash_attn.warm import kinds, warm
from ringrt_flash_attn.windows import window

#: Kernels load 16 bytes at a time.
_ALIGNED = 16


def load(context: BackendContext) -> FlashAttnBackend:
    """With the versions that are installed and fit the context's GPU."""
    device = context.device
    assert isinstance(device, CudaDevice)
    capability = device.capability
    versions = choose(capability, installed(), os.environ.get(VARIABLE))
    return FlashAttnBackend([KERNELS[version](capability) for version in versions], device)


class FlashAttnBackend(TorchBlockBackend):
    """See `ringrt.torch_blocks.TorchBlockBackend`. A problem goes to the first of `kernels` that
    does not refuse it."""

    def __init__(self, kernels: Sequence[Kernel], device: Device) -> None:
        super().__init__(device)
        self._kernels, self._device = tuple(kernels), device
        self._warm: set[Hashable] = set()

    def supports(self, problem: Problem) -> str | None:
        """None if any of the versions does all of it."""
        refusals = [(kernel, kernel.refusal(problem)) for kernel in self._kernels]
        if any(refusal is None for _, refusal in refusals):
            return None
        return "; ".join(f"{kernel}: {refusal}" for kernel, refusal in refusals)

    def prepare(self, problem: Problem) -> None:
        """Have compiled what is compiled at the first call."""
        if not (problem.batch and self._kernel(problem).compiles):
            return
        tiles = kinds(problem)
        key = (problem.dtype, problem.head_dim, problem.value_dim, problem.group, *tiles)
        if key not in self._warm:
            with self.arrays.running(self._device.stream):
                warm(self, problem, tiles)
            self._warm.add(key)

    def parts(self, tile: Tile, problem: Problem) -> list[Tile]:
        """The tile cut to what it shows, and so that the kernel takes its window."""
        kernel = self._kernel(problem)
        return [part for box in cut(tile, windows=True) for part in kernel.parts(box)]

    def block(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, problem: Problem
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BlockBackend.block`."""
        if not problem.batch:
            return q.new_zeros(*q.shape[:3], problem.value_dim), _no_rows(q)
        kernel = self._kernel(problem)
        sign, scores = _scores(problem, tile)
        q, k, v = _fitted(kernel, problem, _signed(q, sign), k, v)
        out, lse = kernel.forward(q, k, v, scores)
        return out[..., : problem.value_dim], _told(out, lse)

    def block_backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        tile: Tile,
        problem: Problem,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `BlockBackend.block_backward`."""
        if not problem.batch:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        kernel = self._kernel(problem)
        sign, scores = _scores(problem, tile)
        q, k, v = _fitted(kernel, problem, _signed(q, sign), k, v)
        _, value_width = kernel.widths(problem)
        dout, out = (_wide(x, value_width) for x in (dout, out))
        # The kernels read lse as if it lay without gaps, whatever its strides are.
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse.contiguous(), scores)
        head, value = problem.head_dim, problem.value_dim
        return _signed(dq[..., :head], sign), dk[..., :head], dv[..., :value]

    def _kernel(self, problem: Problem) -> Kernel:
        for kernel in self._kernels:
            if kernel.refusal(problem) is None:
                return kernel
        raise Unsupported(f"backend flash-attn: {self.supports(problem)}")


def _scores(problem: Problem, tile: Tile) -> tuple[int, Scores]:
    """A sign for q, and what the kernel is asked for. It finds a row's greatest score before the
    scale is applied, and multiplies hidden scores of -inf by it, so that only a scale above 0
    does: q takes the sign, or becomes 0."""
    sign = (problem.scale > 0) - (problem.scale < 0)
    scale = float(abs(problem.scale)) if sign else 1.0
    return sign, (scale, float(problem.softcap or 0), window(tile))


def _signed(x: torch.Tensor, sign: int) -> torch.Tensor:
    """q, or its gradient, times the sign of the scale."""
    return x if sign == 1 else x * sign


def _fitted(
    kernel: Kernel, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As wide and as aligned as the kernel wants them."""
    width, value_width = kernel.widths(problem)
    return _wide(q, width), _wide(k, width), _wide(v, value_width)


def _wide(x: torch.Tensor, width: int) -> torch.Tensor:
    """x with zeros at the end of its last dimension, which change no score and no output; laid
    out so that every vector begins at a multiple of 16 bytes and has no gaps."""
    if x.shape[-1] != width:
        return pad(x, (0, width - x.shape[-1])).contiguous()
    fits = x.stride(-1) == 1 and x.data_ptr() % _ALIGNED == 0
    steps = [stride * x.element_size() for stride in x.stride()[:-1]]
    if fits and all(step > 0 and step % _ALIGNED == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _told(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """lse as ringrt tells it. The kernels report one and the same infinity (+inf from version 2,
    -inf from 3 and 4) for a row without scores above -inf and for one with a NaN or +inf among
    them; in the latter all of out is NaN, and lse is to be."""
    lost = out[..., 0].isnan().swapaxes(1, 2)
    infinite = torch.where(lost, torch.nan, -torch.inf)
    return torch.where(lse.isinf(), infinite, lse)


def _no_rows(q: torch.Tensor) -> torch.Tensor:
    """lse of no batch."""
    batch, rows, heads, _ = q.shape
    return q.new_empty((batch, heads, rows), dtype=torch.float32)
