"""Speed on one GPU, beside its peers and in the same run, calls in turn: forward and backward of
16-bit attention on device arrays, and what a large product of matrices reaches here.

A call of ringrt waits for the GPU at its end and plans on the host, so its time holds the host's;
the kernels' own is the sum of the compute spans of the timeline. A peer's call only queues.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

import ringrt
from gpu.cases import numpy_dtype, on_gpu
from gpu.peers import Peer, as_torch, missing_torch, peers
from ringrt.device.driver import cupy
from ringrt.registry import registry

LIMIT_S = 300.0
#: As in the papers of FlashAttention: tokens in all, and heads times head_dim.
_TOKENS, _WIDTH = 16384, 2048
_MATMUL = 8192
_WARM_UP = 3
#: ‖ours − theirs‖ / ‖theirs‖; both round to 16 bits.
_UNLIKE = 0.02


def cases(quick: bool) -> list[dict[str, Any]]:
    """The product of matrices, then attention."""
    found: list[dict[str, Any]] = [{"group": "matmul", "title": f"matmul {_MATMUL}³"}]
    dtypes = ("bfloat16",) if quick else ("bfloat16", "float16")
    lengths = (2048, 8192) if quick else (2048, 8192, 16384)
    for way, dtype, dim, length, causal in itertools.product(
        ("forward", "backward"), dtypes, (64, 128), lengths, (False, True)
    ):
        title = f"{way} {dtype} d{dim} {length} tokens{' causal' if causal else ''}"
        shape = {"dtype": dtype, "dim": dim, "length": length, "causal": causal}
        repeats = 7 if quick else 15
        found.append({"group": way, "title": title, "repeats": repeats, **shape})
    return found


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What became of a case."""
    if case["group"] == "matmul":
        return {"wrong": [], "figures": _matmul()}
    try:
        return _attend(case)
    except Exception as error:
        _ring.cache_clear()
        if "OutOfMemory" not in type(error).__name__:
            raise
        return {"wrong": [], "figures": {}, "refused": "not enough memory"}
    finally:
        _free()


def _attend(case: dict[str, Any]) -> dict[str, Any]:
    length, dim, causal = case["length"], case["dim"], case["causal"]
    batch, heads = _TOKENS // length, _WIDTH // dim
    shape = batch, length, heads, dim
    tensors = [_normal(case["dtype"], seed).reshape(shape) for seed in range(4)]
    backward = case["group"] == "backward"
    ours = _ours(tensors, causal, backward)
    result = ours()
    others, absent = peers(tensors, causal, backward, length)
    wrong = []
    for peer in others:
        apart = _apart(result, peer)
        if not apart <= _UNLIKE:
            wrong.append(f"{peer.name}: results differ from ours by {apart:.3g} of their norm")
    del result
    times = _measured(ours, others, case["repeats"])
    pairs = length * length / (2 if causal else 1)
    flop = 4 * batch * heads * pairs * dim * (2.5 if backward else 1)
    rates = {name: {"ms": ms, "TFLOP/s": flop / ms / 1e9} for name, ms in times.items()}
    best = max((rates[peer.name]["TFLOP/s"] for peer in others), default=None)
    figures = {"rates": rates, "not measured": absent, "best peer": best}
    if best is not None:
        for name in ("ringrt", "ringrt kernels"):
            figures[f"{name} / best peer"] = rates[name]["TFLOP/s"] / best
    return {"wrong": wrong, "figures": figures}


def _ours(tensors: list[Any], causal: bool, backward: bool) -> Callable[[], list[Any]]:
    q, k, v, dout = tensors
    ring = _ring()
    if not backward:
        return lambda: [ring.attention(q, k, v, causal=causal)[0]]
    out, lse = ring.attention(q, k, v, causal=causal)
    return lambda: list(ring.attention_backward(dout, q, k, v, out, lse, causal=causal))


def _measured(ours: Callable[[], list[Any]], others: list[Peer], repeats: int) -> dict[str, float]:
    """Medians in ms, everybody in turn."""
    seen: dict[str, list[float]] = {}
    for turn in range(_WARM_UP + repeats):
        times = {"ringrt": _by_cupy(ours), "ringrt kernels": _kernels()}
        times |= {peer.name: _by_torch(peer.call) for peer in others}
        for name, ms in times.items():
            if turn >= _WARM_UP:
                seen.setdefault(name, []).append(ms)
    return {name: statistics.median(each) for name, each in seen.items()}


def _by_cupy(call: Callable[[], Any]) -> float:
    """By events on the stream that a call comes from and returns to."""
    cuda = cupy().cuda
    begin, end = cuda.Event(), cuda.Event()
    cuda.runtime.deviceSynchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(cuda.get_elapsed_time(begin, end))


def _by_torch(call: Callable[[], Any]) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _kernels() -> float:
    stats = _ring().stats
    assert stats is not None
    return 1e3 * sum(span.end - span.begin for span in stats.timeline if span.what == "compute")


def _apart(ours: list[Any], peer: Peer) -> float:
    """The largest relative distance of a result from a peer's."""
    pairs = zip(ours, peer.call(), strict=True)
    apart = [(as_torch(a).float() - b.float()).norm() / b.float().norm() for a, b in pairs]
    return max(float(each) for each in apart)


def _matmul() -> dict[str, Any]:
    """The rate that shares are of: bf16 by PyTorch, else fp16 by CuPy."""
    size = (_MATMUL, _MATMUL)
    if missing_torch() is None:
        import torch

        a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        by, call, clock = "bfloat16 by PyTorch", lambda: a @ b, _by_torch
    else:
        a, b = (_normal("float16", seed)[: _MATMUL * 1024] for seed in range(2))
        a, b = (cupy().tile(x, 8).reshape(size) for x in (a, b))
        by, call, clock = "float16 by CuPy", lambda: a @ b, _by_cupy
    times = [clock(call) for _ in range(_WARM_UP + 15)][_WARM_UP:]
    return {"by": by, "TFLOP/s": 2 * _MATMUL**3 / statistics.median(times) / 1e9}


@cache
def _normal(dtype: str, seed: int) -> Any:
    """Standard normal elements on the GPU, for every shape."""
    drawn = np.random.default_rng(seed).standard_normal(_TOKENS * _WIDTH, np.float32)
    return on_gpu(drawn.astype(numpy_dtype(dtype)))


@cache
def _ring() -> ringrt.Ring:
    return ringrt.Ring(registry().group("threads", 1)[0], backend="cupy")


def _free() -> None:
    """What one case kept must not be missing in the next."""
    cupy().get_default_memory_pool().free_all_blocks()
    if missing_torch() is None:
        import torch

        torch.cuda.empty_cache()
