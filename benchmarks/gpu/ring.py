"""Several ranks, over NCCL and staged through the host: every partition against the result of one
rank, forward and backward, and what the ring costs in time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ringrt
from gpu import ring_time
from gpu.cases import Case, on_gpu, on_host
from gpu.oracle import Expected, half_ulp, share_of_bound
from gpu.ring_time import TIMEOUT_S, gpu_of
from ringrt.plan import PARTITIONS
from ringrt.plan.partition import unshard

#: Seconds that a case may take before its process is ended: NCCL may hang.
LIMIT_S = 120.0
TRANSPORTS = ("nccl", "threads")


def rank_counts(gpus: int, simulate: bool) -> Sequence[int]:
    """As many as there are GPUs, up to 4; on one GPU 2 to 4 that share it."""
    if simulate:
        return (2, 3)
    return range(2, (4 if gpus == 1 else min(gpus, 4)) + 1)


def environment(ranks: int, gpus: int) -> dict[str, str]:
    """What NCCL must find set when it is loaded. Ranks that share a GPU need NCCL 2.30; beyond
    two of them NCCL's kernels have to be small to be resident together, each rank's streams need
    a queue of their own, and no kernel may be loaded while another waits for it."""
    if ranks <= gpus:
        return {}
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    shared |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    if ranks > 2 * gpus:
        shared["NCCL_MAX_CTAS"] = "2"
    return {name: os.environ.get(name, value) for name, value in shared.items()}


def cases(transport: str, ranks: int, quick: bool, simulate: bool) -> list[dict[str, Any]]:
    """For one process."""
    how = {"group": transport, "ranks": ranks}
    found = []
    checks = _checks(quick, simulate)
    # On the simulator one check for each partition.
    pairs = (
        zip(PARTITIONS, checks, strict=True) if simulate else itertools.product(PARTITIONS, checks)
    )
    for partition, (base, options) in pairs:
        words = " ".join(f"{name}={value}" for name, value in options.items())
        known = (f"{ranks} ranks", transport, partition, words, base.title)
        title = " ".join(filter(None, known))
        plain = {"case": base.plain(), "partition": partition, "options": options}
        found.append(how | plain | {"title": title})
    length, heads, dim = (48, 2, 64) if simulate else (8192 if quick else 16384, 16, 128)
    dtype = "float16" if simulate else "bfloat16"
    shape = {"length": length, "heads": heads, "dim": dim, "dtype": dtype}
    repeats = 1 if simulate else 7
    for partition in ("striped",) if quick or simulate else ("striped", "zigzag"):
        title = f"{ranks} ranks {transport} {partition} time {dtype} {length} tokens"
        time_it = {"partition": partition, "time": shape, "repeats": repeats, "title": title}
        found.append(how | time_it)
    return found


def _checks(quick: bool, simulate: bool) -> list[tuple[Case, dict[str, Any]]]:
    """Attention, and options of the ring."""
    causal = {"causal": True}
    documents = {"causal": True, "documents": [0, 20, 21, 45]}
    if simulate:
        return [(Case("ring", "float16", 45, mask=causal, arrays="cupy"), {}),
                (Case("ring", "float32", 21, mask=causal, sink=True), {"travel": "q"}),
                (Case("ring", "float16", 45, mask=documents), {"schedule": "direct"})]  # fmt: skip
    wide = dict(batch=2, q_heads=8, kv_heads=2)
    documents = {"causal": True, "documents": [0, 300, 301, 700, 1031]}
    some: list[tuple[Case, dict[str, Any]]] = [
        (Case("ring", "bfloat16", 1031, **wide, head_dim=128, mask=causal, arrays="cupy"), {}),
        (Case("ring", "float16", 1031, **wide, mask=documents, sink=True), {"travel": "q"}),
        (Case("ring", "float32", 515, **wide, softcap=15.0, arrays="cupy"), {"travel": "kv"}),
    ]
    if not quick:
        some += [
            (Case("ring", "float64", 515, **wide, mask=causal), {"schedule": "direct"}),
            (Case("ring", "bfloat16", 1031, **wide, mask=documents), {"schedule": "direct"}),
            (Case("ring", "bfloat16", 3, **wide, mask=causal, arrays="cupy"), {}),
        ]
    return some


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What became of a case."""
    return ring_time.run(case) if "time" in case else _check(case)


@dataclass
class _Whole:
    """The arrays of a case, one rank's results, and what float64 says of both."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    results: dict[str, np.ndarray]
    expected: dict[str, Expected]
    wrong: list[str]


_wholes: dict[str, _Whole] = {}


def _whole(case: Case) -> _Whole:
    """Made once for all partitions."""
    if case.title not in _wholes:
        _wholes[case.title] = _made(case)
    return _wholes[case.title]


def _made(case: Case) -> _Whole:
    q, k, v, dout = case.tensors()
    [results] = _pass(case, (q, k, v, dout), None, 1, {"transport": "threads"})
    oracle, out, lse = case.oracle(q, k, v), results["out"], results["lse"]
    expected = oracle.forward() | oracle.backward(dout, out, lse)
    wrong = _differences(results, expected, "one rank: ", {})
    return _Whole(q, k, v, dout, results, expected, wrong)


def _check(plain: dict[str, Any]) -> dict[str, Any]:
    case, ranks, partition = Case.of(plain["case"]), plain["ranks"], plain["partition"]
    whole = _whole(case)
    how = plain["options"] | {"transport": plain["group"], "partition": partition}
    given = whole.q, whole.k, whole.v, whole.dout
    parts = _pass(case, given, (whole.results["out"], whole.results["lse"]), ranks, how)
    rule = PARTITIONS[partition]
    found = {
        name: unshard([part[name] for part in parts], rule, axis=2 if name == "lse" else 1)
        for name in ("out", "lse", "dq", "dk", "dv")
    }
    if case.sink:
        found["dsink"] = parts[0]["dsink"]
    # Both it and the one rank's result may be off by a bound and a rounding.
    limits = {
        name: Expected(
            one.astype(np.float64), 2 * whole.expected[name].bound + half_ulp(one, one.dtype)
        )
        for name, one in whole.results.items()
    }
    shares: dict[str, float] = {}
    wrong = whole.wrong + _differences(found, limits, "against one rank: ", shares)
    wrong += _differences(found, whole.expected, "", shares)
    same = all(found[name].tobytes() == one.tobytes() for name, one in whole.results.items())
    return {"wrong": wrong, "figures": {"share of bound": shares, "bits of one rank": same}}


def _pass(
    case: Case,
    given: tuple[np.ndarray, ...],
    forward: tuple[np.ndarray, np.ndarray] | None,
    ranks: int,
    how: dict[str, Any],
) -> list[dict[str, np.ndarray]]:
    """Forward and backward on every rank, the results on the host. Where `forward` is given, it is
    the whole out and lse that backward starts from."""

    def on_rank(ring: ringrt.Ring) -> dict[str, np.ndarray]:
        put = on_gpu if case.arrays == "cupy" else np.asarray
        with gpu_of(ring):
            q, k, v, dout = (put(np.ascontiguousarray(ring.cut(x))) for x in given)
            out, lse = ring.attention(q, k, v, **case.options)
            from_ = out, lse
            if forward is not None:
                cut = ring.cut(forward[0]), ring.cut(forward[1], axis=2)
                from_ = tuple(put(np.ascontiguousarray(x)) for x in cut)
            gradients = ring.attention_backward(dout, q, k, v, *from_, **case.options)
            results = out, lse, *gradients
            names = ("out", "lse", "dq", "dk", "dv", "dsink")
            return {n: on_host(x) for n, x in zip(names, results, strict=False)}

    return ringrt.run_threads(on_rank, ranks, backend="cupy", timeout=TIMEOUT_S, **how)


def _differences(
    found: dict[str, np.ndarray],
    expected: dict[str, Expected],
    words: str,
    shares: dict[str, float],
) -> list[str]:
    wrong = []
    for name, want in expected.items():
        share, where = share_of_bound(found[name], want)
        shares[name] = max(shares.get(name, 0.0), share)
        if not share <= 1:
            wrong.append(f"{words}{name}: {share:.3g} times its bound ({where})")
    return wrong
