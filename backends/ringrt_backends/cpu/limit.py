"""What the multiply-add units of one core can do: the register tile by itself, its operands in the
first-level cache."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from llvmlite import ir

from ringrt_backends.cpu.calls import base, call, driver
from ringrt_backends.cpu.compiled import compile_module, shape_of
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.tile import add_product

#: Steps of a tile, calls of a sample, and samples, of which the fastest counts.
_DEPTH, _CALLS, _SAMPLES = 128, 4000, 15


@driver
def _repeat(address, a, b, c, depth, count):  # type: ignore[no-untyped-def]
    for _ in range(count):
        call(address, (base(a), base(b), base(c), depth, base(b)))


def flop_limit(machine: Machine, dtype: str) -> float | None:
    """FLOP/s for fp32, or for bf16 multiplied in pairs; None for other dtypes."""
    pairs = dtype == "bfloat16" and machine.pairs != ""
    if dtype != "float32" and not pairs:
        return None
    module = ir.Module()
    plain = replace(machine, chunk=None)
    add_product(
        module, plain, "tile", a_row=_DEPTH, a_step=1, c_row=plain.panel, vectors=2, pairs=pairs
    )
    code = compile_module(module, plain, shape_of(plain, 1, 1, pairs), ("tile",))
    a = np.zeros((plain.rows, _DEPTH), np.uint32)
    b = np.zeros((_DEPTH, plain.panel), np.uint32)
    c = np.zeros((plain.rows, plain.panel))
    arguments = code.addresses[0], a, b, c, _DEPTH
    _repeat(*arguments, 10)
    times = []
    for _ in range(_SAMPLES):
        begun = time.perf_counter()
        _repeat(*arguments, _CALLS)
        times.append(time.perf_counter() - begun)
    terms = plain.rows * plain.panel * _DEPTH * (2 if pairs else 1)
    return 2 * terms * _CALLS / min(times)
