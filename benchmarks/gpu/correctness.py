"""One rank on the device against float64, forward and backward: dtypes, head dims, masks,
grouped heads, softcap, sinks, strides and odd lengths, NumPy and CuPy arrays; and every variant
of the kernels compiled."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import ringrt
from gpu.cases import LAYOUTS, Case, laid_out, numpy_dtype, on_gpu, on_host
from gpu.oracle import share_of_bound
from ringrt.backend import BackendContext
from ringrt.device.cuda import CudaDevice
from ringrt.device.driver import cupy
from ringrt.plan import Mask, Problem
from ringrt.registry import registry

#: Seconds that a case may take; the first one compiles.
LIMIT_S = 180.0
DTYPES = ("float16", "bfloat16", "float32", "float64")
_DOCUMENTS = [0, 40, 41, 130, 193]
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": [30, 7]},
    {"causal": True, "window": [50, 0], "sink_tokens": 4},
    {"causal": True, "documents": _DOCUMENTS},
    {"documents": [[3, 70], [80, 190]], "window": [9, -1]},
    {"causal": True, "prefix": 33},
]


def cases(quick: bool, simulate: bool) -> list[dict[str, Any]]:
    """All of the section."""
    grids = [_simulated()] if simulate else [_grid(dtype, quick) for dtype in DTYPES]
    attention = [case.plain() for case in itertools.chain(*grids)]
    return _compilations(quick, simulate) + attention


def _simulated() -> list[Case]:
    """Few variants of the kernels: they are compiled for the host."""
    some = []
    for dtype, length in (("float16", 77), ("float32", 53)):
        base = Case("basic", dtype, length, arrays="cupy")
        some += [
            base,
            replace(base, mask={"causal": True}, arrays="numpy", twice=True),
            replace(base, group="masks", mask=MASKS[3]),
            replace(base, group="masks", mask={"causal": True, "documents": [0, 20, 21, length]}),
            replace(base, group="scores", softcap=15.0, sink=True, q_heads=4, kv_heads=2),
            replace(base, group="lengths", length=31, kv_length=21, mask={"causal": True}),
        ]
        layouts = LAYOUTS[1:] if dtype == "float16" else LAYOUTS[2:3]
        some += [replace(base, group="layouts", layout=layout) for layout in layouts]
    return some


def _grid(dtype: str, quick: bool) -> list[Case]:
    causal = {"causal": True}
    base = Case("basic", dtype, 517, batch=2, q_heads=4, kv_heads=2, arrays="cupy")
    dims = [(8, 8), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)]
    grid = [
        replace(base, group="head dims", head_dim=dim, value_dim=value, mask=mask)
        for (dim, value), mask in itertools.product(dims[1:4] if quick else dims, MASKS[:2])
    ]
    long = replace(base, group="long", batch=1, mask=causal, twice=True)
    grid += [replace(long, length=length) for length in ([2049] if quick else [2049, 4096])]
    single = Case("basic", dtype, arrays="cupy")
    for dim in (64,) if quick else (64, 128):
        one = replace(single, head_dim=dim)
        grid += [replace(one, group="masks", mask=mask) for mask in MASKS]
        grid += [replace(one, group="masks", mask=mask, arrays="numpy") for mask in MASKS[1::4]]
        heads = [(6, 6), (6, 2), (6, 1)]
        grid += [replace(one, group="heads", q_heads=q, kv_heads=kv) for q, kv in heads]
        scores: list[dict[str, Any]] = [{"softcap": 15.0}, {"sink": True}, {"scale": -0.3}]
        scores += [{"scale": 0.0}, {"softcap": 3.0, "sink": True, "mask": causal}]
        grid += [replace(one, group="scores", **each) for each in scores]
        grid += [
            replace(one, group="layouts", layout=layout, arrays=arrays, mask=causal)
            for layout, arrays in itertools.product(LAYOUTS, ("cupy", "numpy"))
        ]
        lengths = [1, 31, 32, 33, 63, 64, 65, 127, 128, 129]
        grid += [replace(one, group="lengths", length=n, mask=causal) for n in lengths]
        unequal = [(70, 200), (200, 70), (1, 300), (300, 1)]
        grid += [
            replace(one, group="lengths", length=q, kv_length=kv, mask=mask, sink=kv == 70)
            for (q, kv), mask in itertools.product(unequal, MASKS[:2])
        ]
    return grid


def _compilations(quick: bool, simulate: bool) -> list[dict[str, Any]]:
    found = []
    for dtype in ("float16", "float32") if simulate else DTYPES:
        unit = 64 if dtype in ("float16", "bfloat16") else 32
        sizes = [64] if simulate else range(unit, 257, unit)
        for dk, dv in itertools.product(sizes, sizes):
            if dk == dv or not quick:
                title = f"compile {dtype} {dk} {dv}"
                found.append({"group": "compile", "dtype": dtype, "title": title, "dims": [dk, dv]})
    return found


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What became of a case: `wrong`, a line for each thing that is; `figures`."""
    try:
        return _compile(case) if case["group"] == "compile" else _attend(Case.of(case))
    except Exception:
        _ring.cache_clear()
        raise


def _attend(case: Case) -> dict[str, Any]:
    ring, host = _ring(), case.tensors()
    q, k, v, dout = (laid_out(x, case.layout, case.arrays == "cupy") for x in host)
    oracle = case.oracle(*host[:3])
    expected = oracle.forward()
    wrong: list[str] = []
    found = dict(zip(("out", "lse"), ring.attention(q, k, v, **case.options), strict=True))
    worst = _compare(found, expected, wrong)
    _check_kind(found, q, case, wrong)
    # Backward is judged by itself: it is given the oracle's out and lse, rounded.
    out = expected["out"].value.astype(host[0].dtype)
    lse = expected["lse"].value.astype("float64" if case.dtype == "float64" else "float32")
    results = (on_gpu(x) if case.arrays == "cupy" else x for x in (out, lse))
    given = dout, q, k, v, *results
    names = ("dq", "dk", "dv", "dsink")[: 4 if case.sink else 3]
    gradients = ring.attention_backward(*given, **case.options)
    found = dict(zip(names, gradients, strict=True))
    worst |= _compare(found, oracle.backward(host[3], out, lse), wrong)
    _check_kind(found, q, case, wrong)
    if case.twice:
        again = ring.attention_backward(*given, **case.options)
        for name, x, y in zip(names, gradients, again, strict=True):
            if on_host(x).tobytes() != on_host(y).tobytes():
                wrong.append(f"{name}: other bits in a second run")
    return {"wrong": wrong, "figures": {"share of bound": worst}}


def _compare(found: dict[str, Any], expected: dict[str, Any], wrong: list[str]) -> dict[str, float]:
    worst = {}
    for name, want in expected.items():
        worst[name], where = share_of_bound(on_host(found[name]), want)
        if not worst[name] <= 1:
            wrong.append(f"{name}: {worst[name]:.3g} times its bound ({where})")
    return worst


def _check_kind(found: dict[str, Any], q: Any, case: Case, wrong: list[str]) -> None:
    for name, x in found.items():
        if type(x) is not type(q):
            wrong.append(f"{name}: a {type(x).__name__} for arrays of {case.arrays}")
        if name not in ("lse", "dsink") and x.dtype != numpy_dtype(case.dtype):
            wrong.append(f"{name}: dtype {x.dtype}")


def _compile(case: dict[str, Any]) -> dict[str, Any]:
    from ringrt_backends.cuda_variants import Variant

    dk, dv = case["dims"]
    sizes = dict(batch=1, q_heads=1, kv_heads=1, q_length=8, kv_length=8)
    problem = Problem(
        **sizes, head_dim=dk, value_dim=dv, dtype=case["dtype"], mask=Mask.full(8, 8), scale=1.0
    )
    device = _device()
    backend = registry().load("cupy", BackendContext(1, device))
    refusal = backend.supports(problem)
    if refusal is not None:
        return {"wrong": [], "figures": {}, "refused": refusal}
    backend.prepare(problem)
    figures = {}
    for kernel in Variant.of(problem).all():
        made = device.function(kernel.path, kernel.name, kernel.options, kernel.shared)
        name = " ".join((kernel.name, *(o for o in kernel.options if o.startswith("-DSUMS"))))
        figures[name] = {
            "registers": getattr(made, "num_regs", None),
            "spilled bytes": getattr(made, "local_size_bytes", None),
            "shared bytes": kernel.shared,
        }
    return {"wrong": [], "figures": figures}


@cache
def _device() -> CudaDevice:
    return CudaDevice(0)


@cache
def _ring() -> ringrt.Ring:
    """A ring of one."""
    with cupy().cuda.Device(0):
        return ringrt.Ring(registry().group("threads", 1)[0], backend="cupy")
