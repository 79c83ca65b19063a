"""Many terms as one: sums of weights, and what is reduced by halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from ringrt_backends.cpu.exact import wide
from ringrt_backends.cpu.vectors import I64, Body, Value

#: So many weights are added up in float32.
FEW = 8


def sums(body: Body, count: Value, weigh: Callable[[Value], list[Value]]) -> list[Value]:
    """Of so many weights of two vectors, in float64; in float32 `FEW` at a time. Where one of these
    is large, `mend_ir` adds what the others lost beside it."""
    build = body.build
    number_of_few = build.sdiv(count, ir.Constant(I64, FEW))
    first = build.mul(number_of_few, ir.Constant(I64, FEW))

    def add(totals: Sequence[Value], parts: Sequence[Value]) -> list[Value]:
        return [build.fadd(t, wide(body, x)) for t, x in zip(totals, parts, strict=True)]

    def few(number: Value, totals: Sequence[Value]) -> list[Value]:
        start = build.mul(number, ir.Constant(I64, FEW))
        rows = [weigh(build.add(start, ir.Constant(I64, i))) for i in range(FEW)]
        return add(totals, [by_halves(column, build.fadd) for column in zip(*rows, strict=True)])

    def one(number: Value, totals: Sequence[Value]) -> list[Value]:
        return add(totals, weigh(build.add(first, number)))

    zeros = [ir.Constant(body.doubles, [0.0] * body.width)] * 2
    totals = body.loop(number_of_few, zeros, few, maybe_none=True)
    return body.loop(build.sub(count, first), totals, one, maybe_none=True)


def by_halves(values: Sequence[Value], two: Callable[[Value, Value], Value]) -> Value:
    """All of them as one, in as few steps after one another as can be."""
    values = list(values)
    while len(values) > 1:
        halves = zip(values[::2], values[1::2], strict=False)
        values = [two(*pair) for pair in halves] + values[len(values) // 2 * 2 :]
    return values[0]
