"""PyTorch's attention on the same numbers, in the layout that suits it best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from ringrt.bench.problems import Inputs
from ringrt.plan.partition import Array


def installed() -> bool:
    """Whether PyTorch is; without it, results are compared with the oracle, and no times are."""
    return find_spec("torch") is not None


def tensor(x: Array) -> Any:
    """`[batch, rows, heads, dim]` as a contiguous tensor `[batch, heads, rows, dim]`."""
    import torch

    turned = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
    if turned.dtype.name == "bfloat16":
        return torch.from_numpy(turned.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(turned)


def array(x: Any) -> Array:
    """A tensor as `[batch, rows, heads, dim]`; 16-bit floats as float32."""
    host = x.detach()
    wide: Array = (host.float() if host.element_size() == 2 else host).numpy()
    return wide.transpose(0, 2, 1, 3)


class TorchPass:
    """`scaled_dot_product_attention`, forward without a graph and backward of one that is kept."""

    def __init__(self, given: Inputs, causal: bool, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._causal = causal
        self._tensors = [tensor(x) for x in (given.q, given.k, given.v)]
        self._dout = tensor(given.dout)
        self._graph: Any = None

    def forward(self) -> Any:
        """out."""
        import torch

        with torch.no_grad():
            return self._attend(self._tensors)

    def backward(self) -> Sequence[Any]:
        """dq, dk and dv."""
        import torch

        if self._graph is None:
            leaves = [x.clone().requires_grad_() for x in self._tensors]
            self._graph = self._attend(leaves), leaves
        out, leaves = self._graph
        grads: Sequence[Any] = torch.autograd.grad(out, leaves, self._dout, retain_graph=True)
        return grads

    def results(self, way: str) -> list[Array]:
        """What a pass gives, as arrays."""
        found = [self.forward()] if way == "forward" else self.backward()
        return [array(x) for x in found]

    def call(self, way: str) -> Callable[[], Any]:
        """The pass of that name. What backward is of is computed before."""
        if way == "forward":
            return self.forward
        self.backward()
        return self.backward

    def _attend(self, tensors: Sequence[Any]) -> Any:
        import torch

        attend = torch.nn.functional.scaled_dot_product_attention
        q, k, v = tensors
        return attend(q, k, v, is_causal=self._causal)
