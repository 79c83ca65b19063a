"""The forward kernels: scores with their running maximum, and the online softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llvmlite import ir

from ringrt_backends.cpu import exact
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.mend_ir import NOTES, note
from ringrt_backends.cpu.sums import by_halves, sums
from ringrt_backends.cpu.tile import product
from ringrt_backends.cpu.vectors import F32, I32, I64, PTR, Body, Value


def mask(body: Body, tile: list[list[Value]], group: Value, hidden: float) -> None:
    """Put `hidden` where a key is not within the span [first, last) of a query, in place.

    The function has the arguments first and last, int32 `[2 vectors]`, and row, the first key of
    the first group of rows."""
    build = body.build
    before = build.mul(group, ir.Constant(I64, len(tile)))
    key = body.splat(build.trunc(build.add(body.args["row"], before), I32))
    for vector in range(len(tile[0])):
        at = vector * body.width
        first = build.sub(body.load(body.args["first"], at, body.ints), key)
        last = build.sub(body.load(body.args["last"], at, body.ints), key)
        for r in range(len(tile)):
            number = body.whole([r] * body.width)
            seen = build.and_(
                build.icmp_signed("<=", first, number), build.icmp_signed(">", last, number)
            )
            tile[r][vector] = build.select(seen, tile[r][vector], body.floats(hidden))


#: What `mask` asks of a function's arguments.
SPAN = {"first": PTR, "last": PTR, "row": I64}


def score(
    module: ir.Module,
    machine: Machine,
    name: str,
    *,
    depth: int,
    s_row: int,
    masked: bool,
    capped: bool,
    pairs: bool,
) -> None:
    """Emit name(a, b, s, groups, top, cap[, first, last, row]): S = A·B for groups >= 1 tiles of
    keys, one after the other, or if `capped` tanh(cap·A·B); top = the larger of itself and each
    column's maximum. What is masked is −inf."""
    extra = SPAN if masked else {}
    body = Body(module, machine, name, a=PTR, b=PTR, s=PTR, groups=I64, top=PTR, cap=F32, **extra)
    args, rows = body.args, machine.rows

    def tile_of_scores(group: Value, tops: Sequence[Value]) -> Sequence[Value]:
        a, s = body.step(args["a"], group, rows * depth), body.step(args["s"], group, rows * s_row)
        # Weights will be rounded, but not z, which is their sum, and lse.
        tile = product(body, a, args["b"], depth, a_row=depth, a_step=1, pairs=pairs, levels=2)
        if capped:
            cap_scores(body, tile)
        if masked:
            mask(body, tile, group, -math.inf)
        store_tile(body, tile, s, s_row)
        columns = zip(*tile, tops, strict=True)
        return [by_halves(column, body.larger) for column in columns]

    tops = [body.load(args["top"], v * body.width) for v in range(2)]
    for v, top in enumerate(body.loop(args["groups"], tops, tile_of_scores)):
        body.store(top, args["top"], v * body.width)
    body.build.ret_void()


def store_tile(body: Body, tile: list[list[Value]], pointer: Value, row_step: int) -> None:
    """Rows of floats, `row_step` apart."""
    for r, row in enumerate(tile):
        for v, value in enumerate(row):
            body.store(value, pointer, r * row_step + v * body.width)


def cap_scores(body: Body, tile: list[list[Value]]) -> None:
    """tanh(cap·x) in place of x."""
    cap = body.splat(body.args["cap"])
    for row in tile:
        row[:] = [body.tanh(body.build.fmul(value, cap)) for value in row]


def soft(
    module: ir.Module,
    machine: Machine,
    name: str,
    *,
    s_row: int,
    capped: bool,
    pairs: bool,
) -> None:
    """Emit name(s, p, n, scale, top, m, z, alpha, notes, marks, key, query): the online softmax of
    2 vectors of queries over n >= 1 rows of keys.

        m' = max(m, scale·top),  alpha = 2^(m − m'),  P = 2^(scale·S − m'),  z' = z·alpha + ΣP

    P takes the place of S; top goes back to −inf. m and z are float64; m' is a float32 number
    unless it is beyond them. Large weights are noted; see `mend_ir`. With `pairs`, n counts pairs
    of keys, and p holds them as bf16.
    """
    pointers = {key: PTR for key in ("top", "m", "z", "alpha")}
    body = Body(module, machine, name, s=PTR, p=PTR, n=I64, scale=F32, **pointers, **NOTES)
    build, args, width = body.build, body.args, body.width
    scale = body.splat(args["scale"])
    maxima = (_new_maximum(body, v * width, scale) for v in range(2))
    bests, bases, alphas = zip(*maxima, strict=True)
    minus = [build.fneg(build.fptrunc(base, body.vector)) for base in bases]

    def weigh(i: Value) -> list[Value]:
        """P of the i-th row, or pair of rows; their sums."""
        from_s = body.step(args["s"], i, (2 if pairs else 1) * s_row)
        parts = []
        for v in range(2):
            weights = []
            for at in (v * width, s_row + v * width)[: 2 if pairs else 1]:
                x = body.fma(body.load(from_s, at), scale, minus[v])
                weights.append(body.exp2(x, degree=4 if pairs else 6))
            if pairs:
                to_p = body.step(args["p"], i, s_row)
                body.store(body.pair(*weights), to_p, v * width)
                parts.append(build.fadd(*weights))
            else:
                body.store(weights[0], from_s, v * width)
                parts.append(weights[0])
        return parts

    for v, total in enumerate(sums(body, args["n"], weigh)):
        old = body.load(args["z"], v * width, body.doubles)
        z = body.fma(old, exact.wide(body, alphas[v]), total)
        body.store(z, args["z"], v * width)
        if exact.mended(pairs, capped):
            note(body, v * width, bests[v], bases[v], s_row)
    build.ret_void()


def _new_maximum(body: Body, at: int, scale: Value) -> tuple[Value, Value, Value]:
    """Raise m by the scores' maximum: that, m' in float64 (0 where nothing was seen), and alpha."""
    build, args = body.build, body.args
    old = body.load(args["m"], at, body.doubles)
    best = build.fmul(scale, body.load(args["top"], at))
    body.store(body.floats(-math.inf), args["top"], at)
    new = body.larger(build.fpext(best, body.doubles), old)
    body.store(new, args["m"], at)
    zero = ir.Constant(body.doubles, [0.0] * body.width)
    nothing = build.fcmp_ordered("==", new, ir.Constant(body.doubles, [-math.inf] * body.width))
    base = build.select(nothing, zero, new)
    alpha = body.exp2(build.fptrunc(build.fsub(old, base), body.vector))
    body.store(alpha, args["alpha"], at)
    return best, base, alpha
