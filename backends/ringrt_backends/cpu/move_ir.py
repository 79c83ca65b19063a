"""Rows of elements in and out: widened from fp16 and bf16, laid out as the register tile reads
them, rounded back at the end. An element of a packed operand is 32 bits; see `tile`."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.vectors import F32, F64, I16, I32, I64, PTR, Body, Value

_ELEMENTS = {"float32": F32, "float16": ir.HalfType(), "bfloat16": I16}

#: Names of the functions, in the order of their addresses.
NAMES = (
    *(f"widen_{dtype}" for dtype in _ELEMENTS),
    *(f"round_{dtype}" for dtype in _ELEMENTS),
    "copy_pairs",
    "spread",
    "interleave",
    "turn",
    "reorder",
)

#: All bits of a float32 but its sign, and the same of a pair of bf16.
_MAGNITUDE, _HIGH_MAGNITUDE = 0x7FFFFFFF, 0x7FFF0000


def emit(module: ir.Module, machine: Machine) -> None:
    """Emit them all."""
    for dtype, element in _ELEMENTS.items():
        _widen(Body(module, machine, f"widen_{dtype}", **_READER), element)
        _round(Body(module, machine, f"round_{dtype}", **_ROW, factor=F64), element)
    _copy_pairs(Body(module, machine, "copy_pairs", **_READER))
    _spread(Body(module, machine, "spread", row=PTR, **_PANELS))
    _interleave(Body(module, machine, "interleave", row=PTR, second=PTR, **_PANELS))
    _turn(Body(module, machine, "turn", block=PTR, target=PTR, order=PTR, depth=I64, flip=I32))
    _reorder(Body(module, machine, "reorder", row=PTR, target=PTR, order=PTR, depth=I64))


_ROW = {"source": PTR, "target": PTR, "n": I64}
_READER = {**_ROW, "peak": PTR}
_PANELS = {"target": PTR, "count": I64, "stride": I64, "flip": I32}


def _widen(body: Body, element: ir.Type) -> None:
    """name(source, target, n, peak): n elements as fp32. `peak`, an int32, is raised to the bits
    of the largest magnitude: without their sign, numbers are ordered as their bits are, and NaN
    comes last."""
    build, args = body.build, body.args

    def some(i: Value, top: Value, lanes: int) -> Value:
        x = _load(body, args["source"], i, element, lanes)
        if element == ir.HalfType():
            x = build.fpext(x, _wide(F32, lanes))
        elif element == I16:
            x = build.shl(build.zext(x, _wide(I32, lanes)), _all(16, lanes))
        bits = build.bitcast(x, _wide(I32, lanes))
        build.store(bits, body.at(args["target"], i, I32), align=4)
        return _larger(body, top, build.and_(bits, _all(_MAGNITUDE, lanes)))

    _raise_peak(body, some, args["n"])


def _copy_pairs(body: Body) -> None:
    """name(source, target, n, peak): n bf16 as they are, and the peak as fp32."""
    build, args = body.build, body.args

    def some(i: Value, top: Value, lanes: int) -> Value:
        x = _load(body, args["source"], i, I16, lanes)
        build.store(x, body.at(args["target"], i, I16), align=2)
        bits = build.shl(build.zext(x, _wide(I32, lanes)), _all(16, lanes))
        return _larger(body, top, build.and_(bits, _all(_HIGH_MAGNITUDE, lanes)))

    _raise_peak(body, some, args["n"])


def _raise_peak(body: Body, some: Callable[[Value, Value, int], Value], n: Value) -> None:
    build, peak = body.build, body.args["peak"]
    top = build.alloca(body.ints)
    build.store(_all(0, body.width), top)
    one = build.alloca(I32)
    build.store(build.load(peak, typ=I32), one)

    def each(i: Value, lanes: int) -> None:
        kind, where = (body.ints, top) if lanes > 1 else (I32, one)
        build.store(some(i, build.load(where, typ=kind), lanes), where)

    _each(body, n, each)
    tops = build.load(top, typ=body.ints)
    largest = body.intrinsic(f"llvm.vector.reduce.umax.v{body.width}i32", I32, tops)
    build.store(_larger(body, build.load(one, typ=I32), largest), peak)
    build.ret_void()


def _round(body: Body, element: ir.Type) -> None:
    """name(source, target, n, factor): factor · source, float64, in the nearest numbers."""
    build, args = body.build, body.args
    factor = args["factor"]

    def each(i: Value, lanes: int) -> None:
        exact = _load(body, args["source"], i, F64, lanes)
        scaled = build.fmul(exact, body.splat(factor) if lanes > 1 else factor)
        x = build.fptrunc(scaled, _wide(F32, lanes))
        if element == ir.HalfType():
            x = build.fptrunc(x, _wide(element, lanes))
        elif element == I16:
            x = _to_bfloat(body, x, lanes)
        build.store(x, body.at(args["target"], i, element), align=2 if element != F32 else 4)

    _each(body, args["n"], each)
    build.ret_void()


def _to_bfloat(body: Body, x: Value, lanes: int) -> Value:
    """The nearest bf16, ties to even; NaN stays NaN."""
    build = body.build
    bits = build.bitcast(x, _wide(I32, lanes))
    upper = build.lshr(bits, _all(16, lanes))
    odd = build.and_(upper, _all(1, lanes))
    near = build.lshr(build.add(bits, build.add(odd, _all(0x7FFF, lanes))), _all(16, lanes))
    chosen = build.select(
        build.fcmp_ordered("ord", x, x), near, build.or_(upper, _all(0x40, lanes))
    )
    return build.trunc(chosen, _wide(I16, lanes))


def _spread(body: Body) -> None:
    """name(row, target, count, stride, flip): a row cut into `count` panels, `stride` elements
    apart; `flip` is XORed to each element."""
    _to_panels(body, lambda at: body.load(body.args["row"], at, body.ints))


def _interleave(body: Body) -> None:
    """name(row, second, target, count, stride, flip): the same for two rows of bf16, in pairs."""
    build, args = body.build, body.args
    short = ir.VectorType(I16, body.width)

    def pair(at: Value) -> Value:
        low, high = (
            build.zext(body.load(args[key], at, short), body.ints) for key in ("row", "second")
        )
        return build.or_(low, build.shl(high, _all(16, body.width)))

    _to_panels(body, pair)


def _to_panels(body: Body, element: Callable[[Value], Value]) -> None:
    build, args, panel = body.build, body.args, body.machine.panel
    flip = body.splat(args["flip"])

    def step(p: Value, _: list[Value]) -> list[Value]:
        target = body.at(args["target"], build.mul(p, args["stride"]), I32)
        for vector in range(2):
            offset = ir.Constant(I64, vector * body.width)
            x = element(build.add(build.mul(p, ir.Constant(I64, panel)), offset))
            body.store(build.xor(x, flip), target, vector * body.width)
        return []

    body.loop(args["count"], [], step)
    build.ret_void()


def _turn(body: Body) -> None:
    """name(block, target, order, depth, flip): a panel of rows `[panel, depth]` as `[depth,
    panel]`, of which row d is column order[d]."""
    build, args, panel = body.build, body.args, body.machine.panel
    flip = body.splat(args["flip"])

    def step(d: Value, _: list[Value]) -> list[Value]:
        from_column = body.load(args["order"], d, I64)
        column = body.at(args["block"], from_column, I32)
        target = body.at(args["target"], build.mul(d, ir.Constant(I64, panel)), I32)
        for first in (0, body.width):
            x = ir.Constant(body.ints, ir.Undefined)
            for lane in range(body.width):
                row = build.mul(args["depth"], ir.Constant(I64, first + lane))
                one = build.load(body.at(column, row, I32), align=4, typ=I32)
                x = build.insert_element(x, one, ir.Constant(I32, lane))
            body.store(build.xor(x, flip), target, first)
        return []

    body.loop(args["depth"], [], step)
    build.ret_void()


def _reorder(body: Body) -> None:
    """name(row, target, order, depth): target[d] = row[order[d]]."""
    build, args = body.build, body.args

    def step(d: Value, _: list[Value]) -> list[Value]:
        one = build.load(body.at(args["row"], body.load(args["order"], d, I64), I32), typ=I32)
        build.store(one, body.at(args["target"], d, I32))
        return []

    body.loop(args["depth"], [], step)
    build.ret_void()


def _each(body: Body, n: Value, each: Callable[[Value, int], None]) -> None:
    """Do `each(index, lanes)` for n elements, a vector of them at a time, the rest one by one."""
    build, width = body.build, ir.Constant(I64, body.width)
    vectors = build.sdiv(n, width)
    done = build.mul(vectors, width)

    def wide(i: Value, _: list[Value]) -> list[Value]:
        each(build.mul(i, width), body.width)
        return []

    def one(i: Value, _: list[Value]) -> list[Value]:
        each(build.add(done, i), 1)
        return []

    with build.if_then(build.icmp_signed(">", vectors, ir.Constant(I64, 0))):
        body.loop(vectors, [], wide)
    with build.if_then(build.icmp_signed(">", n, done)):
        body.loop(build.sub(n, done), [], one)


def _load(body: Body, pointer: Value, i: Value, element: ir.Type, lanes: int) -> Value:
    align = {F64: 8, F32: 4}.get(element, 2)
    return body.build.load(body.at(pointer, i, element), align=align, typ=_wide(element, lanes))


def _wide(element: ir.Type, lanes: int) -> ir.Type:
    return ir.VectorType(element, lanes) if lanes > 1 else element


def _all(number: int, lanes: int) -> Value:
    """The integer in every lane."""
    return ir.Constant(_wide(I32, lanes), [number] * lanes if lanes > 1 else number)


def _larger(body: Body, a: Value, b: Value) -> Value:
    return body.build.select(body.build.icmp_unsigned(">", a, b), a, b)
