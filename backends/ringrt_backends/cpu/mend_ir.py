"""Large weights of the forward pass (see `exact`): noted when they are computed, and mended when
all keys at hand have been absorbed.

At first every weight is a large part of its row's sum. So a note is kept of those that are for now,
and what is still large at the end is computed once more: z and y then change by the difference.

A note is two vectors of floats, the weights of one key and as many queries as a vector has lanes,
and the maxima m that they are relative to. `marks`, int64, has the number of notes, and for each
the key's and the first query's number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llvmlite import ir

from ringrt_backends.cpu import exact
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.sums import FEW, by_halves
from ringrt_backends.cpu.vectors import F32, F64, I64, PTR, Body, Value

#: What `note` asks of a function's arguments besides the scores s, their number of rows n, and z:
#: the number of the first row's key, and of the first column's query, and which part of z is large.
NOTES = {"notes": PTR, "marks": PTR, "key": I64, "query": I64, "limit": F32}


def note(body: Body, at: int, best: Value, base: Value, s_row: int) -> None:
    """Note the vectors of P, `at` floats from the beginning of its rows, that have a weight which
    is large for now. Where z is large, relative to the largest weight so far, which is 1, none is;
    nor where that of the best score of these keys is not. `base`: the maxima, float64."""
    build, args = body.build, body.args
    z = body.load(args["z"], at, body.doubles)
    part = build.fmul(build.fptrunc(z, body.vector), body.splat(args["limit"]))
    below_1 = build.fcmp_ordered("<", part, body.floats(1.0))
    concentrated = build.and_(below_1, build.fcmp_ordered(">", part, body.floats(0.0)))
    limits = build.select(concentrated, part, body.floats(math.inf))

    few = build.sdiv(args["n"], ir.Constant(I64, FEW))
    rest = build.mul(few, ir.Constant(I64, FEW))

    def row(number: Value) -> Sequence[Value]:
        weights = body.load(body.step(args["s"], number, s_row), at)
        with build.if_then(exact.any_above(body, weights, limits)):
            _append(body, at, number, weights, build.fptrunc(base, body.vector))
        return []

    def together(number: Value, _: Sequence[Value]) -> Sequence[Value]:
        """Rows that `sums` has added up in float32."""
        start = build.mul(number, ir.Constant(I64, FEW))
        rows = [build.add(start, ir.Constant(I64, i)) for i in range(FEW)]
        weights = [body.load(body.step(args["s"], number, s_row), at) for number in rows]
        with build.if_then(exact.any_above(body, by_halves(weights, body.larger), limits)):
            _add_lost(body, at, weights)
            body.loop(FEW, [], lambda i, _: row(build.add(start, i)))
        return []

    with build.if_then(exact.any_of(body, concentrated)):
        largest = build.fsub(exact.wide(body, best), base)
        largest = body.exp2(build.fptrunc(largest, body.vector))
        with build.if_then(exact.any_above(body, largest, limits)):
            body.loop(few, [], together, maybe_none=True)
            left = build.sub(args["n"], rest)
            body.loop(left, [], lambda i, _: row(build.add(rest, i)), maybe_none=True)


def _add_lost(body: Body, at: int, weights: list[Value]) -> None:
    """Small weights lose bits in a float32 sum with a large one. A row may have one weight that is
    nearly all of z, and y is right to more than what is lost: out would be off by that, and dq
    by many times as much, for it would no longer be that Σ dS = 0."""
    build, z = body.build, body.args["z"]
    lost = build.fneg(exact.wide(body, by_halves(weights, body.build.fadd)))
    for weight in weights:
        lost = build.fadd(lost, exact.wide(body, weight))
    body.store(build.fadd(body.load(z, at, body.doubles), lost), z, at)


def _append(body: Body, at: int, number: Value, weights: Value, maxima: Value) -> None:
    build, args, one = body.build, body.args, ir.Constant(I64, 1)
    count = build.load(args["marks"], align=8, typ=I64)
    to = body.step(args["notes"], count, 2 * body.width)
    body.store(weights, to)
    body.store(maxima, to, body.width)
    mark = body.at(args["marks"], build.add(build.shl(count, one), one), I64)
    build.store(build.add(args["key"], number), mark, align=8)
    query = build.add(args["query"], ir.Constant(I64, at))
    build.store(query, body.at(mark, 1, I64), align=8)
    build.store(build.add(count, one), args["marks"], align=8)


def mend(module: ir.Module, machine: Machine, name: str, *, depth: int, value_row: int) -> None:
    """Emit name(note, k, q, scale, m, z, y, v, v_stride, limit): of a note's weights, those that
    are large now, above `limit` · z, are computed once more, from the row `k` of operand A and the
    vector of a panel of operand B that begins at `q`; z and the rows of y change by the difference.
    m, z and y, rows of `value_row`, are float64. `v` is the key's row in the first panel of V, and
    the next one's is `v_stride` floats on. The note is lost."""
    pointers = {key: PTR for key in ("m", "z", "y", "v")}
    body = Body(
        module, machine, name, note=PTR, k=PTR, q=PTR, scale=F32, **pointers, v_stride=I64,
        limit=F32,
    )  # fmt: skip
    build, args = body.build, body.args
    old, noted = body.load(args["note"]), body.load(args["note"], body.width)
    noted = exact.wide(body, noted)
    since = build.fsub(noted, body.load(args["m"], 0, body.doubles))
    since = body.exp2(build.fptrunc(since, body.vector))
    z = body.load(args["z"], 0, body.doubles)
    limit = build.fmul(build.fptrunc(z, body.vector), body.splat(args["limit"]))
    large = build.fcmp_ordered(">", build.fmul(old, since), limit)
    with build.if_then(exact.any_of(body, large)):
        new = exact.weights(body, args["k"], args["q"], 0, depth, [noted])
        change = build.fmul(build.fsub(new, old), since)
        change = build.select(large, change, body.floats(0.0))
        body.store(build.fadd(z, exact.wide(body, change)), args["z"])
        body.store(change, args["note"])
        _change_values(body, value_row)
    build.ret_void()


def _change_values(body: Body, value_row: int) -> None:
    """y += change · V, for each lane that has a change; these are where the note was."""
    build, args = body.build, body.args

    def lane(number: Value, _: Sequence[Value]) -> Sequence[Value]:
        scalar = build.load(body.at(args["note"], number), align=4, typ=F32)
        with build.if_then(build.fcmp_unordered("!=", scalar, ir.Constant(F32, 0.0))):
            change = exact.wide(body, body.splat(scalar))
            y = body.step(args["y"], number, value_row, F64)
            for at in range(0, value_row, body.width):
                number_of_panel = ir.Constant(I64, at // body.machine.panel)
                v = body.at(args["v"], build.mul(args["v_stride"], number_of_panel))
                values = exact.wide(body, body.load(v, at % body.machine.panel))
                total = body.fma(values, change, body.load(y, at, body.doubles))
                body.store(total, y, at)
        return []

    body.loop(body.width, [], lane)
