"""Large weights, computed once more from products in float64.

A product in float32 is off by 1e-6 of a score as real models have them, and so is its weight. In
a row with few large weights that is what out is off by, and dq by several times as much: dq is
Σ dS K, where the errors of dS meet K's mean, which the exact ones would cancel (Σ dS = 0). Such
rows have few weights that count, so these are made exact, in both passes, for out and delta must
come from the weights that dS is made of. In rows with many weights errors average out, and
nothing is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from ringrt_backends.cpu.vectors import F32, I1, Body, Value

#: From this part of a row's sum on a weight is large: a row has 64 of them at most. It is the same
#: in both passes, for the same weights must be exact in both.
LARGE = 1 / 64


def any_above(body: Body, weights: Value, limits: Value) -> Value:
    """Whether any lane is above its limit."""
    return any_of(body, body.build.fcmp_ordered(">", weights, limits))


def any_of(body: Body, lanes: Value) -> Value:
    """Whether any of these booleans is true."""
    return body.intrinsic(f"llvm.vector.reduce.or.v{body.width}i1", I1, lanes)


def weights(body: Body, a: Value, b: Value, at: int, depth: int, less: Sequence[Value]) -> Value:
    """2^(scale · A·B − Σ less) of one row of A and the vector of a panel of B that begins at `at`,
    the exponent in float64; scale is an argument of the function."""
    build = body.build

    def step(k: Value, sums: Sequence[Value]) -> Sequence[Value]:
        column = wide(body, body.load(body.step(b, k, body.machine.panel), at))
        scalar = build.load(body.at(a, k), align=4, typ=F32)
        return [body.fma(column, wide(body, body.splat(scalar)), sums[0])]

    zero = ir.Constant(body.doubles, [0.0] * body.width)
    product = body.loop(depth, [zero], step)[0]
    x = build.fmul(product, wide(body, body.splat(body.args["scale"])))
    for term in less:
        x = build.fsub(x, term)
    return body.exp2(build.fptrunc(x, body.vector))


def wide(body: Body, x: Value) -> Value:
    """A vector of float32 in float64."""
    return body.build.fpext(x, body.doubles)
