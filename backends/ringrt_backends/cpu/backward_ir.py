"""The backward kernels: weights from scores and lse, and the gradients of the scores."""

from __future__ import annotations

from llvmlite import ir

from ringrt_backends.cpu.forward_ir import SPAN, cap_scores, mask
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.tile import product
from ringrt_backends.cpu.vectors import EXP2, EXP2_SHORT, F32, PTR, Body, Value


def prob(
    module: ir.Module,
    machine: Machine,
    name: str,
    *,
    depth: int,
    p_row: int,
    masked: bool,
    capped: bool,
    pairs: bool,
) -> None:
    """Emit name(a, b, p, narrow, scale, lse, rest, cap, slope[, first, last, row]):

        P = 2^(scale·A·B − lse − rest)

    for rows of keys, 0 where masked; lse as the sum of two float32 a column. If
    `capped` t = tanh(cap·A·B) in place of A·B, and slope = 1 − t². With `pairs`, P goes to `narrow` as
    well, in bf16: p is then one tile, and narrow has rows of `p_row` bf16.
    """
    extra = SPAN if masked else {}
    body = Body(
        module, machine, name, a=PTR, b=PTR, p=PTR, narrow=PTR, scale=F32, lse=PTR, rest=PTR,
        cap=F32, slope=PTR, **extra,
    )  # fmt: skip
    build, args, width = body.build, body.args, body.width
    tile = product(body, args["a"], args["b"], depth, a_row=depth, a_step=1, pairs=pairs)
    row_step = machine.panel if pairs else p_row
    if capped:
        cap_scores(body, tile)
        for r, row in enumerate(tile):
            for v, t in enumerate(row):
                slope = body.fma(build.fneg(t), t, body.floats(1.0))
                body.store(slope, args["slope"], r * row_step + v * width)
    scale = body.splat(args["scale"])
    for v in range(2):
        minus = build.fneg(body.load(args["lse"], v * width))
        rest = body.load(args["rest"], v * width)
        for row in tile:
            x = build.fsub(body.fma(row[v], scale, minus), rest)
            row[v] = body.exp2(x, EXP2_SHORT if pairs else EXP2)
    if masked:
        mask(body, tile, 0.0)
    _store(body, tile, args["p"], row_step)
    if pairs:
        _store_narrow(body, tile, args["narrow"], p_row)
    build.ret_void()


def dscore(
    module: ir.Module,
    machine: Machine,
    name: str,
    *,
    depth: int,
    p_row: int,
    capped: bool,
    pairs: bool,
) -> None:
    """Emit name(a, b, ds, p, delta, by_key, slope): dS = P·(A·B − delta), times slope if `capped`,
    for rows of keys. With `pairs`, ds has bf16 in rows of `p_row`, and by_key the same in pairs of keys."""
    body = Body(
        module, machine, name, a=PTR, b=PTR, ds=PTR, p=PTR, delta=PTR, by_key=PTR, slope=PTR
    )
    build, args, width = body.build, body.args, body.width
    tile = product(body, args["a"], args["b"], depth, a_row=depth, a_step=1, pairs=pairs)
    row_step = machine.panel if pairs else p_row
    for v in range(2):
        delta = body.load(args["delta"], v * width)
        for r, row in enumerate(tile):
            at = r * row_step + v * width
            row[v] = build.fmul(build.fsub(row[v], delta), body.load(args["p"], at))
            if capped:
                row[v] = build.fmul(row[v], body.load(args["slope"], at))
    if not pairs:
        _store(body, tile, args["ds"], p_row)
    else:
        _store_narrow(body, tile, args["ds"], p_row)
        for r in range(0, len(tile), 2):
            for v in range(2):
                both = body.pair(tile[r][v], tile[r + 1][v])
                body.store(both, args["by_key"], r // 2 * p_row + v * width)
    build.ret_void()


def _store(body: Body, tile: list[list[Value]], pointer: Value, row_step: int) -> None:
    for r, row in enumerate(tile):
        for v, value in enumerate(row):
            body.store(value, pointer, r * row_step + v * body.width)


def _store_narrow(body: Body, tile: list[list[Value]], pointer: Value, row_step: int) -> None:
    """Rows of bf16; `row_step` counts these."""
    for r, (low, high) in enumerate(tile):
        body.store(body.narrow(low, high), pointer, r * row_step // 2)
