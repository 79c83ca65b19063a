"""What the multiply-add units of one core can do, with operands that stay in registers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from llvmlite import ir

from ringrt_backends.cpu.calls import base, call, driver
from ringrt_backends.cpu.compiled import compile_module, shape_of
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.memory import zeros
from ringrt_backends.cpu.vectors import I64, PTR, Body, Value

#: Steps of a call, calls of a sample, and samples, of which the fastest counts.
_STEPS, _CALLS, _SAMPLES = 8192, 60, 15


@driver
def _repeat(address, a, b, c, steps, count):  # type: ignore[no-untyped-def]
    for _ in range(count):
        call(address, (base(a), base(b), base(c), steps))


def flop_limit(machine: Machine, dtype: str) -> float | None:
    """FLOP/s for fp32, or for bf16 multiplied in pairs; None for other dtypes."""
    pairs = dtype == "bfloat16" and machine.pairs != ""
    if dtype != "float32" and not pairs:
        return None
    module = ir.Module()
    _emit(module, machine, "tile", pairs)
    code = compile_module(module, machine, shape_of(machine, 1, 1, pairs), ("tile",))
    a, b = (zeros((machine.width,), np.uint32) for _ in range(2))
    arguments = code.addresses[0], a, b, zeros((machine.rows, machine.panel), np.float32), _STEPS
    _repeat(*arguments, 2)
    times = []
    for _ in range(_SAMPLES):
        begun = time.perf_counter()
        _repeat(*arguments, _CALLS)
        times.append(time.perf_counter() - begun)
    terms = machine.rows * machine.panel * _STEPS * (2 if pairs else 1)
    return 2 * terms * _CALLS / min(times)


def _emit(module: ir.Module, machine: Machine, name: str, pairs: bool) -> None:
    """Emit name(a, b, c, steps): so many steps of multiply-adds of the vectors a and b, each to as
    many sums as a tile has, which go to c. With the loads of a tile's step besides, LLVM found an
    order of these that needs more than 16 registers, and AVX2 came to a third of its limit."""
    body = Body(module, machine, name, a=PTR, b=PTR, c=PTR, steps=I64)
    kind = body.ints if pairs else body.vector
    a, b = (body.load(body.args[key], kind=kind) for key in ("a", "b"))
    add = body.dot if pairs else body.fma

    def step(_: Value, sums: Sequence[Value]) -> Sequence[Value]:
        return [add(a, b, total) for total in sums]

    sums = [body.floats(0.0)] * (2 * machine.rows)
    for number, total in enumerate(body.loop(body.args["steps"], sums, step)):
        body.store(total, body.args["c"], number * machine.width)
    body.build.ret_void()
