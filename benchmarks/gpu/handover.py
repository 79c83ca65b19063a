"""Arrays of PyTorch and JAX on a GPU: taken where they lie, made on a stream that nobody has waited
for, given back on the same device; and gradients by PyTorch's autograd and `jax.grad`. On the
simulator, which neither of them knows, the same on the host."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

import ringrt
from ringrt.device.driver import simulated
from ringrt.ring import Ring

#: Seconds for one case: JAX compiles.
LIMIT_S = 300.0
#: Largest error of results whose size is about 1, by dtype.
_BOUND = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}
_ROWS, _HEADS, _DIM = 300, 4, 64


def cases(quick: bool) -> list[dict[str, Any]]:
    """One for each framework that is installed, dtype and way."""
    dtypes = ("float32", "bfloat16") if quick else tuple(_BOUND)
    return [
        {"group": kind, "title": f"{kind} {dtype} {way}", "dtype": dtype, "way": way}
        for kind in ("torch", "jax")
        if find_spec(kind)
        for dtype in dtypes
        for way in ("ring", "gradients")
    ]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Whether kind, device and numbers are right."""
    framework: Any = _Torch() if case["group"] == "torch" else _Jax()
    if framework.missing is not None:
        return {"wrong": [], "figures": {}, "refused": framework.missing}
    backend = "cpu" if simulated() else "auto"
    work = framework.ring if case["way"] == "ring" else framework.gradients
    inputs = [np.random.default_rng(n).standard_normal((1, _ROWS, _HEADS, _DIM)) for n in range(4)]
    arrays = [framework.array(x, case["dtype"]) for x in inputs]
    wide = [np.asarray(framework.numpy(x), np.float64) for x in arrays]
    [results] = ringrt.run_threads(lambda ring: work(ring, *arrays), 1, backend=backend)
    wrong, worst = [], 0.0
    for name, got, want in zip(("out", "dq", "dk", "dv"), results, _dense(*wide), strict=False):
        if not framework.like(got, arrays[0]):
            wrong.append(f"{name}: of another kind, device or dtype than q")
        error = float(np.abs(framework.numpy(got) - want).max())
        worst = max(worst, error / _BOUND[case["dtype"]])
        if not error <= _BOUND[case["dtype"]]:
            wrong.append(f"{name}: {error:.1e} off, bound {_BOUND[case['dtype']]:.0e}")
    return {"wrong": wrong, "figures": {"share of bound": {case["way"]: worst}}}


class _Torch:
    def __init__(self) -> None:
        import torch

        self._torch = torch
        usable = simulated() or torch.cuda.is_available()
        self.missing = None if usable else "this PyTorch finds no GPU"
        self._stream = None if simulated() else torch.cuda.Stream()

    def array(self, x: Any, dtype: str) -> Any:
        """Made by work that may still be queued when this returns."""
        torch, device = self._torch, "cpu" if simulated() else "cuda"
        with torch.cuda.stream(self._stream):
            wide = torch.from_numpy(x).to(device)
            for _ in range(20):
                wide = wide * 1.0
            return wide.to(getattr(torch, dtype))

    def ring(self, ring: Ring, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        """Both passes by the ring itself."""
        with self._torch.cuda.stream(self._stream):
            out, lse = ring.attention(q, k, v, causal=True)
            return out, *ring.attention_backward(dout, q, k, v, out, lse, causal=True)

    def gradients(self, ring: Ring, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        """By autograd."""
        from ringrt.torch import ring_attention

        with self._torch.cuda.stream(self._stream):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = ring_attention(*leaves, ring=ring, causal=True)
            out.backward(dout)
            return out.detach(), *(x.grad for x in leaves)

    def like(self, x: Any, q: Any) -> bool:
        """Kind, device, dtype."""
        return type(x) is type(q) and (x.device, x.dtype) == (q.device, q.dtype)

    def numpy(self, x: Any) -> Any:
        """On the host, in float64."""
        with self._torch.cuda.stream(self._stream):
            return x.double().cpu().numpy()


class _Jax:
    def __init__(self) -> None:
        import jax

        self._jax = jax
        usable = simulated() or jax.default_backend() == "gpu"
        self.missing = None if usable else "this JAX finds no GPU"

    def array(self, x: Any, dtype: str) -> Any:
        """Made by work that may still be queued when this returns."""
        return (self._jax.numpy.asarray(x, "float32") * 1.0).astype(dtype)

    def ring(self, ring: Ring, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        """Both passes by the ring itself."""
        out, lse = ring.attention(q, k, v, causal=True)
        return out, *ring.attention_backward(dout, q, k, v, out, lse, causal=True)

    def gradients(self, ring: Ring, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        """By `jax.vjp`, outside of `jax.jit`."""
        from ringrt.jax import ring_attention

        out, back = self._jax.vjp(lambda *x: ring_attention(*x, ring=ring, causal=True), q, k, v)
        return out, *back(dout)

    def like(self, x: Any, q: Any) -> bool:
        """Kind, device, dtype."""
        return isinstance(x, self._jax.Array) and (x.device, x.dtype) == (q.device, q.dtype)

    def numpy(self, x: Any) -> Any:
        """On the host, in float64."""
        return np.asarray(x, np.float64)


def _dense(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
    """out, dq, dk and dv of causal attention in float64, from the definition."""
    scale = _DIM**-0.5
    scores = np.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = np.where(np.tri(_ROWS), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    out = np.einsum("bhij,bjhd->bihd", p, v)
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    ds = scale * p * (dp - np.einsum("bihd,bihd->bhi", dout, out)[..., None])
    dq, dk = np.einsum("bhij,bjhd->bihd", ds, k), np.einsum("bhij,bihd->bjhd", ds, q)
    return out, dq, dk, np.einsum("bhij,bihd->bjhd", p, dout)
