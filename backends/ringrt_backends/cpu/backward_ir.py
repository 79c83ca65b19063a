"""The backward kernels: weights from scores and lse, and the gradients of the scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from ringrt_backends.cpu import exact
from ringrt_backends.cpu.exact import wide
from ringrt_backends.cpu.forward_ir import SPAN, cap_scores, mask, store_tile
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.sums import by_halves
from ringrt_backends.cpu.tile import Ahead, product
from ringrt_backends.cpu.vectors import F32, I8, I32, I64, PTR, Body, Value


def prob(
    module: ir.Module,
    machine: Machine,
    name: str,
    *,
    depth: int,
    p_row: int,
    later: int,
    masked: bool,
    capped: bool,
    pairs: bool,
) -> None:
    """Emit name(a, b, p, narrow, groups, scale, lse, rest, cap, slope, top, limit[, SPAN]):

        P = 2^(scale·A·B − lse − rest)

    for groups >= 1 tiles of keys, one after the other, 0 where masked; lse as the sum of two
    float32 a column, of which the first will do with `pairs`. If `capped`, t = tanh(cap·A·B) in
    place of A·B, and slope = 1 − t². p and slope have rows of `p_row` floats; with `pairs` P goes
    to narrow as well, in rows of `p_row` bf16, and p and slope are panels. `later` bytes a step are
    read ahead. Vectors with weights above `limit` are computed once more where they are
    `exact.mended`; `top`, one vector, is the largest of all lane by lane.
    """
    extra = SPAN if masked else {}
    body = Body(
        module, machine, name, a=PTR, b=PTR, p=PTR, narrow=PTR, groups=I64, scale=F32, lse=PTR,
        rest=PTR, cap=F32, slope=PTR, top=PTR, limit=F32, **extra,
    )  # fmt: skip
    args, rows = body.args, machine.rows
    row_step = machine.panel if pairs else p_row

    def tile_of_weights(group: Value, tops: Sequence[Value]) -> Sequence[Value]:
        a = body.step(args["a"], group, rows * depth)
        ahead = [_next_panel(body, group, depth, later)]
        tile = product(
            body, a, args["b"], depth, a_row=depth, a_step=1, pairs=pairs, ahead=ahead
        )  # fmt: skip
        if capped:
            cap_scores(body, tile)
            slopes = [[_slope(body, t) for t in row] for row in tile]
            store_tile(body, slopes, body.step(args["slope"], group, rows * row_step), row_step)
        _weights(body, tile, pairs)
        if masked:
            mask(body, tile, group, 0.0)
        store_tile(body, tile, body.step(args["p"], group, rows * row_step), row_step)
        if pairs:
            narrow = body.step(args["narrow"], group, rows * p_row // 2, I32)
            _store_narrow(body, tile, narrow, p_row)
        values = [value for row in tile for value in row]
        return [by_halves([*values, top], body.larger) for top in tops]

    tops = [body.floats(0.0)] if exact.mended(pairs, capped) else []
    for top in body.loop(args["groups"], tops, tile_of_weights):
        body.store(top, args["top"])
        _mend(body, top, p_row, lambda number, at: _exact_weights(body, number, at, depth, p_row))
    body.build.ret_void()


def _next_panel(body: Body, group: Value, depth: int, later: int) -> Ahead:
    """This tile's part of the panel of B that follows."""
    following = body.at(body.args["b"], depth * body.machine.panel)
    return Ahead(body.step(following, group, depth * later, I8), later)


def _mend(body: Body, top: Value, p_row: int, mend: Callable[[Value, int], None]) -> None:
    """Do mend(row, at) for each vector of P with a large weight, if `top` says that there are
    any; `at` counts floats from the row's beginning."""
    build, args = body.build, body.args
    limit = body.splat(args["limit"])

    def row(number: Value, _: Sequence[Value]) -> Sequence[Value]:
        for at in (0, body.width):
            weights = body.load(body.step(args["p"], number, p_row), at)
            with build.if_then(exact.any_above(body, weights, limit)):
                mend(number, at)
        return []

    with build.if_then(exact.any_above(body, top, limit)):
        body.loop(build.mul(args["groups"], ir.Constant(I64, body.machine.rows)), [], row)


def _exact_weights(body: Body, number: Value, at: int, depth: int, p_row: int) -> None:
    """A vector of P from products in float64."""
    args = body.args
    a, p = body.step(args["a"], number, depth), body.step(args["p"], number, p_row)
    less = [wide(body, body.load(args[name], at)) for name in ("lse", "rest")]
    new, old = exact.weights(body, a, args["b"], at, depth, less), body.load(p, at)
    hidden = body.build.fcmp_ordered("==", old, body.floats(0.0))
    body.store(body.build.select(hidden, old, new), p, at)


def _exact_gradients(body: Body, number: Value, at: int, depth: int, p_row: int) -> None:
    """A vector of dS likewise."""
    build, args = body.build, body.args
    a, ds = body.step(args["a"], number, depth), body.step(args["ds"], number, p_row)
    delta = wide(body, body.load(args["delta"], at))
    change = build.fsub(exact.product(body, a, args["b"], at, depth), delta)
    weights = body.load(body.step(args["p"], number, p_row), at)
    body.store(build.fmul(weights, build.fptrunc(change, body.vector)), ds, at)


def _slope(body: Body, t: Value) -> Value:
    """1 − t²."""
    return body.fma(body.build.fneg(t), t, body.floats(1.0))


def _weights(body: Body, tile: list[list[Value]], pairs: bool) -> None:
    """2^(scale·x − lse − rest) in place of x."""
    build, args = body.build, body.args
    scale = body.splat(args["scale"])
    for v in range(2):
        minus = build.fneg(body.load(args["lse"], v * body.width))
        rest = body.load(args["rest"], v * body.width)
        for row in tile:
            x = body.fma(row[v], scale, minus)
            row[v] = body.exp2(x, degree=3) if pairs else body.exp2(build.fsub(x, rest))


def dscore(
    module: ir.Module,
    machine: Machine,
    name: str,
    *,
    depth: int,
    p_row: int,
    later: int,
    capped: bool,
    pairs: bool,
) -> None:
    """Emit name(a, b, ds, p, groups, delta, by_key, slope, top, limit): dS = P·(A·B − delta), times
    slope if `capped`, for groups >= 1 tiles of keys, one after the other; p and slope as `prob`
    has them. With `pairs`, ds has bf16 in rows of `p_row`, and by_key the same in pairs of keys.
    Where `prob` computed weights once more, the same is done here."""
    body = Body(
        module, machine, name, a=PTR, b=PTR, ds=PTR, p=PTR, groups=I64, delta=PTR, by_key=PTR,
        slope=PTR, top=PTR, limit=F32,
    )  # fmt: skip
    args, rows = body.args, machine.rows
    row_step = machine.panel if pairs else p_row

    def tile_of_gradients(group: Value, _: Sequence[Value]) -> Sequence[Value]:
        a = body.step(args["a"], group, rows * depth)
        delta = [body.load(args["delta"], v * body.width) for v in range(2)]
        ahead = [_next_panel(body, group, depth, later)]
        tile = product(
            body, a, args["b"], depth,
            a_row=depth, a_step=1, pairs=pairs, less=delta, ahead=ahead,
        )  # fmt: skip
        factors = ["p", "slope"] if capped else ["p"]
        pointers = [body.step(args[name], group, rows * row_step) for name in factors]
        for factor in pointers:
            for r, row in enumerate(tile):
                for v in range(2):
                    at = r * row_step + v * body.width
                    row[v] = body.build.fmul(row[v], body.load(factor, at))
        if not pairs:
            store_tile(body, tile, body.step(args["ds"], group, rows * p_row), p_row)
            return []
        half = rows * p_row // 2
        _store_narrow(body, tile, body.step(args["ds"], group, half, I32), p_row)
        by_key = body.step(args["by_key"], group, half, I32)
        for r in range(0, rows, 2):
            for v in range(2):
                both = body.pair(tile[r][v], tile[r + 1][v])
                body.store(both, by_key, r // 2 * p_row + v * body.width)
        return []

    body.loop(args["groups"], [], tile_of_gradients)
    if exact.mended(pairs, capped):
        top = body.load(args["top"])
        _mend(body, top, p_row, lambda number, at: _exact_gradients(body, number, at, depth, p_row))
    body.build.ret_void()


def _store_narrow(body: Body, tile: list[list[Value]], pointer: Value, row_step: int) -> None:
    """Rows of bf16; `row_step` counts these."""
    for r, (low, high) in enumerate(tile):
        body.store(body.narrow(low, high), pointer, r * row_step // 2)
