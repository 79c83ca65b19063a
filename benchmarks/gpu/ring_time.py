"""What a ring costs in time, and how much of its exchanges fell into computing."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import ringrt
from gpu.cases import numpy_dtype, on_gpu
from ringrt.device.driver import cupy
from ringrt.engine.stats import PassStats, Span
from ringrt.plan import PARTITIONS

#: The deadline of every wait between ranks.
TIMEOUT_S = 30.0


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Medians of repeated calls, each as long as its slowest rank."""
    ranks, gpus = case["ranks"], cupy().cuda.runtime.getDeviceCount()
    one = _timed(case, 1, "threads")
    ring = _timed(case, ranks, case["group"])
    figures: dict[str, Any] = {"ranks": ranks, "GPUs": min(ranks, gpus)}
    for name in ("forward", "backward"):
        seconds, alone = ring[name]["seconds"], one[name]["seconds"]
        figures[name] = ring[name] | {
            "one rank": one[name],
            # 1 is a ring that costs nothing, on as many GPUs as ranks.
            "overhead": seconds / (alone / ranks),
            # The same by the GPUs there are.
            "overhead by GPUs": seconds / (alone / min(ranks, gpus)),
        }
    return {"wrong": [], "figures": figures}


def _timed(case: dict[str, Any], ranks: int, transport: str) -> dict[str, dict[str, float]]:
    shape, repeats = case["time"], case["repeats"]
    warm_up = 1 if repeats == 1 else 2
    together = threading.Barrier(ranks)
    notes: list[list[tuple[float, PassStats]]] = [[] for _ in range(ranks)]

    def on_rank(ring: ringrt.Ring) -> None:
        rows = PARTITIONS[case["partition"]].count(shape["length"], ranks, ring.rank)
        rng, size = np.random.default_rng(ring.rank), (1, rows, shape["heads"], shape["dim"])
        with gpu_of(ring):
            q, k, v, dout = (
                on_gpu(rng.standard_normal(size, np.float32).astype(numpy_dtype(shape["dtype"])))
                for _ in range(4)
            )
            calls = [lambda: ring.attention(q, k, v, causal=True)]
            out, lse = calls[0]()
            calls.append(
                lambda: ring.attention_backward(dout, q, k, v, out, lse, causal=True)  # type: ignore[arg-type]
            )
            for call, turn in itertools.product(calls, range(warm_up + repeats)):
                together.wait(TIMEOUT_S)
                begin = time.perf_counter()
                call()
                seconds = time.perf_counter() - begin
                if turn >= warm_up:
                    notes[ring.rank].append((seconds, ring.stats))

    how = {"partition": case["partition"], "transport": transport}
    ringrt.run_threads(on_rank, ranks, backend="cupy", timeout=TIMEOUT_S, **how)
    result = {}
    for name, first in (("forward", 0), ("backward", repeats)):
        mine = [each[first : first + repeats] for each in notes]
        calls = [max(rank[i][0] for rank in mine) for i in range(repeats)]
        passes = [max(rank[i][1].seconds for rank in mine) for i in range(repeats)]
        shares = [overlap([rank[i][1] for rank in mine]) for i in range(repeats)]
        seen = [share for share in shares if share is not None]
        result[name] = {
            "seconds": statistics.median(calls),
            "pass seconds": statistics.median(passes),
            "overlap": statistics.median(seen) if seen else None,
        }
    return result


def overlap(stats: Sequence[PassStats]) -> float | None:
    """The share of the time of all ranks' exchanges in which the rank itself computed; None if
    nothing was exchanged."""
    both, total = 0.0, 0.0
    for each in stats:
        computing, moving = (
            [span for span in each.timeline if span.what == what]
            for what in ("compute", "exchange")
        )
        total += sum(span.end - span.begin for span in moving)
        both += sum(_common(a, b) for a in moving for b in computing)
    return both / total if total else None


def _common(a: Span, b: Span) -> float:
    return max(0.0, min(a.end, b.end) - max(a.begin, b.begin))


def gpu_of(ring: ringrt.Ring) -> Any:
    """The GPU of a rank: they take them in turn, as ringrt does for arrays of the host."""
    count = cupy().cuda.runtime.getDeviceCount()
    return cupy().cuda.Device(ring.transport.local_rank % count)
