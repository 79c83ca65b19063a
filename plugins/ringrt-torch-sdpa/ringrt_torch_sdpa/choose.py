"""Which of PyTorch's kernels computes a problem on a GPU. A pure function, so that every case can
be tested without one. What the kernels take is read from PyTorch's `sdp_utils.cpp`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ringrt.plan.problem import ITEMSIZE

Name = Literal["cudnn", "flash", "efficient"]
NAMES: tuple[Name, ...] = get_args(Name)

#: Heads go this far.
MAX_DIM = 256
#: cuDNN before 9.15.1 is wrong where a length is no multiple of 128.
_CUDNN_SINCE, _CUDNN_MAX_DIM = 91501, 128
#: GPUs with little shared memory: flash has no backward pass there for some sizes of heads.
_SMALL, _SMALL_GAP = (86, 87, 89, 120, 121), range(193, 225)


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU (capability 90 is sm_90) and PyTorch on it: cuDNN's version, 0 if it may not be used,
    and whether its other two kernels may."""

    capability: int
    cudnn: int
    flash: bool
    efficient: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of each pass, and that of forward where a part has one key: cuDNN refuses that."""

    forward: Name
    backward: Name
    one_key: Name


def choose(
    dtype: str, head_dim: int, value_dim: int, machine: Machine, only: Name | None = None
) -> Choice | str:
    """The kernels for a problem, or in words why there are none.

    cuDNN is the fastest on Hopper and on data center Blackwell, and slower than flash elsewhere.
    But its backward pass adds up in an order that depends on chance, so flash, which can do
    without, is taken for backward. `only` takes one kernel for both.
    """
    if dtype == "float64":
        return "float64 is not implemented, only float16, bfloat16 and float32"
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if dim > MAX_DIM:
            return f"{name} {dim}: it goes to {MAX_DIM}"
    plain = NAMES[1:]
    forward = NAMES if 90 <= machine.capability < 120 else plain
    backward = one_key = plain
    if only is not None:
        forward = backward = (only,)
        one_key = plain if only == "cudnn" else (only,)
    dim = max(head_dim, value_dim)
    picked: list[Name] = []
    for names, back in ((forward, False), (backward, True), (one_key, False)):
        reasons = [_refusal(name, dtype, dim, machine, back) for name in names]
        if None not in reasons:
            return "; ".join(f"{name}: {why}" for name, why in zip(names, reasons, strict=True))
        picked.append(names[reasons.index(None)])
    return Choice(*picked)


def _refusal(name: Name, dtype: str, dim: int, machine: Machine, backward: bool) -> str | None:
    """Why a kernel cannot do a problem on a machine; None if it can."""
    sm = f"sm_{machine.capability}"
    if name == "efficient":
        if not machine.efficient:
            return "switched off in PyTorch"
        return f"bfloat16 on {sm}" if dtype == "bfloat16" and machine.capability < 80 else None
    if ITEMSIZE[dtype] != 2:
        return f"{dtype}: it takes float16 and bfloat16"
    if machine.capability < 80:
        return f"needs sm_80, this GPU is {sm}"
    if name == "cudnn":
        if machine.cudnn < _CUDNN_SINCE:
            return "cuDNN is older than 9.15.1, or switched off in PyTorch"
        return f"head_dim {dim}: it goes to {_CUDNN_MAX_DIM}" if dim > _CUDNN_MAX_DIM else None
    if not machine.flash:
        return "not in this PyTorch, or switched off"
    if backward and machine.capability in _SMALL and -(-dim // 8) * 8 in _SMALL_GAP:
        return f"head_dim {dim}: no backward pass on {sm}"
    return None
