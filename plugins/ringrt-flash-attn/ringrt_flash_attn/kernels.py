"""FlashAttention 2, 3 and 4 behind one interface: what each takes, and how it is called.

The README's table says from which sources the facts here were read. All lay tensors out as
`[batch, rows, heads, dim]` and lse, in natural logarithm and float32, as `[batch, heads, rows]`;
all align windows bottom-right, take KV heads unrepeated, and want 16-bit inputs whose dims are
multiples of 8.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, ClassVar

import torch

from ringrt.errors import BackendUnavailable
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile
from ringrt_flash_attn.windows import Window, sections

#: What a pass of a block is asked for: the factor of q·k, above 0; the softcap, 0 for none; the
#: window.
Scores = tuple[float, float, Window]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: Parameters of both passes of every version, and of the backward of versions 2 and 3.
_SCORES = frozenset({"q", "k", "v", "softmax_scale", "window_size_left", "window_size_right"})
_GRADIENTS = frozenset({"dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"})


class Kernel(ABC):
    """One version of FlashAttention, for GPUs of one capability (90 for sm_90)."""

    version: ClassVar[int]
    #: The module that holds the functions of both passes, and their names.
    module: ClassVar[str]
    functions: ClassVar[tuple[str, str]] = ("_flash_attn_forward", "_flash_attn_backward")
    #: What each is called with; what else it has must have a default.
    forward_names: ClassVar[frozenset[str]]
    backward_names: ClassVar[frozenset[str]]
    #: Whether its kernels are compiled when they are first called.
    compiles: ClassVar[bool] = False
    #: The most that either head dim may be.
    most_dim: ClassVar[int] = 256

    def __init__(self, capability: int) -> None:
        self.capability = capability
        try:
            loaded = import_module(self.module)
            self._forward, self._backward = (getattr(loaded, name) for name in self.functions)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise BackendUnavailable(f"{self}: {self.module}: {reason}") from error
        for function, names in (
            (self._forward, self.forward_names),
            (self._backward, self.backward_names),
        ):
            if missing := sorted(names.difference(parameters(function))):
                raise BackendUnavailable(
                    f"{self}: this release's {self.module} does not take "
                    f"{', '.join(missing)}: {self.mend}"
                )

    #: What to do about a release that is not the one that is known here.
    mend: ClassVar[str] = "install a later one"

    def __str__(self) -> str:
        return f"FlashAttention {self.version}"

    def refusal(self, problem: Problem) -> str | None:
        """What of the problem it does not do, in words; None if nothing."""
        if problem.dtype not in ("float16", "bfloat16"):
            return f"dtype {problem.dtype}; it does float16 and bfloat16"
        for name in ("head_dim", "value_dim"):
            if getattr(problem, name) > self.most_dim:
                return f"{name} {getattr(problem, name)}; it does up to {self.most_dim}"
        return None

    def widths(self, problem: Problem) -> tuple[int, int]:
        """head_dim and value_dim to which inputs are padded with zeros. One and the same, for no
        version takes any two in both passes."""
        width = -(-max(problem.head_dim, problem.value_dim) // 8) * 8
        return width, width

    def parts(self, tile: Tile) -> list[Tile]:
        """A tile, cut to what it shows, as tiles whose windows it can do."""
        return [tile]

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of one block, as the kernel gives them."""

    @abstractmethod
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scores: Scores,
    ) -> Gradients:
        """dq, dk and dv of one block, in the dtype of q, added up in an order that does not
        depend on chance. lse is contiguous, +inf in rows that have no part in it."""


class _IntoGiven(Kernel):
    """Versions whose backward writes into arrays that it is given."""

    @abstractmethod
    def _options(self, scores: Scores) -> dict[str, Any]:
        """By name, what is given to both passes beside the arrays."""

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scores: Scores,
    ) -> Gradients:
        """See `Kernel.backward`."""
        dq, dk, dv = (_like(x) for x in (q, k, v))
        self._backward(
            dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv,
            deterministic=True, **self._options(scores),
        )  # fmt: skip
        return dq, dk, dv


class Flash2(_IntoGiven):
    """Releases 2.7 and later: from there on windows are two numbers."""

    version = 2
    module = "flash_attn.flash_attn_interface"
    forward_names = _SCORES | {"softcap", "dropout_p", "causal", "alibi_slopes", "return_softmax"}
    backward_names = (forward_names - {"return_softmax"}) | _GRADIENTS
    mend = "pip install 'flash-attn>=2.7'"

    def parts(self, tile: Tile) -> list[Tile]:
        """See `sections`."""
        if tile.full or tile.q1 - tile.q0 <= tile.k1 - tile.k0:
            return [tile]
        return sections(tile)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        options = self._options(scores)
        out, lse, _, _ = self._forward(q=q, k=k, v=v, return_softmax=False, **options)
        return out, lse

    def _options(self, scores: Scores) -> dict[str, Any]:
        none = {"dropout_p": 0.0, "alibi_slopes": None, "causal": False}
        return _windowed(scores) | none


class Flash3(_IntoGiven):
    """Hopper. Its backward of fixed order goes to 192, and releases whose window is a tuple
    ignore that it is asked for (hopper/flash_bwd_launch_template.h; issue 1596)."""

    version = 3
    module = "flash_attn_interface"
    forward_names = _SCORES | {"softcap"}
    backward_names = forward_names | _GRADIENTS
    mend = "build a later flash_attn_3, whose backward adds up in a fixed order"
    most_dim = 192

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        out, lse, _, _ = self._forward(q=q, k=k, v=v, **self._options(scores))
        return out, lse

    def _options(self, scores: Scores) -> dict[str, Any]:
        return _windowed(scores)


class Flash4(Kernel):
    """Hopper and Blackwell, compiled at the first call. Here None is no bound, and a negative
    number is a bound like any other."""

    version = 4
    module = "flash_attn.cute.interface"
    functions = ("_flash_attn_fwd", "_flash_attn_bwd")
    forward_names = _SCORES | {"return_lse"}
    # Sinks came into its backward after the order of additions on Hopper had been mended for
    # grouped heads (pull requests 2510 and 2706): a release that lacks them may lack that.
    backward_names = _SCORES | {"dout", "out", "lse", "deterministic", "learnable_sink"}
    mend = "pip install 'flash-attn-4>=4.0.0b36'"
    compiles = True

    def refusal(self, problem: Problem) -> str | None:
        """Beyond the common: its backward with a softcap is known to hang on Blackwell (issue
        2466), and at head_dim 256 there it has no windows."""
        if problem.softcap is not None:
            return "softcap"
        if self._blackwell and (problem.head_dim > 192 or problem.value_dim > 128):
            return (
                f"head_dim {problem.head_dim} with value_dim {problem.value_dim} on "
                f"sm_{self.capability}; it does up to 128, or head_dim up to 192 with value_dim "
                f"up to 128"
            )
        return super().refusal(problem)

    def widths(self, problem: Problem) -> tuple[int, int]:
        """Blackwell knows one pair of dims that differ."""
        width, value = super().widths(problem)
        return (192, 128) if self._blackwell and width > 128 else (width, value)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        out, lse, *_ = self._forward(q=q, k=k, v=v, return_lse=True, **self._options(scores))
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scores: Scores,
    ) -> Gradients:
        """See `Kernel.backward`."""
        dq, dk, dv = self._backward(
            q=q, k=k, v=v, out=out, dout=dout, lse=lse, deterministic=True, **self._options(scores)
        )
        return dq, dk, dv

    @property
    def _blackwell(self) -> bool:
        return self.capability // 10 in (10, 11)

    def _options(self, scores: Scores) -> dict[str, Any]:
        scale, _, (left, right) = scores
        return {
            "softmax_scale": scale,
            "window_size_left": left,
            "window_size_right": right,
        }


#: By version.
KERNELS: dict[int, type[Kernel]] = {kind.version: kind for kind in (Flash2, Flash3, Flash4)}


def parameters(function: Any) -> set[str]:
    """The names of what a function takes. PyTorch's custom operators hide it, and tell it in
    their schema."""
    overload = getattr(function, "_opoverload", None)
    if overload is not None:
        return {argument.name for argument in overload._schema.arguments}
    return set(inspect.signature(function).parameters)


def _like(x: torch.Tensor) -> torch.Tensor:
    """Where gradients of x are to be written."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _windowed(scores: Scores) -> dict[str, Any]:
    """Options of versions 2 and 3, to which -1 is no bound. A window of (None, 0) is what they
    call causal."""
    scale, softcap, (left, right) = scores
    return {
        "softmax_scale": scale,
        "softcap": softcap,
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
    }
