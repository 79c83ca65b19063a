"""Large weights, computed once more from products in float64.

A product in float32 is off by 1e-6 of a score as real models have them, and so is its weight. In
a row with few large weights that is what out is off by, and dq by several times as much: dq is
Σ dS K, where the errors of dS meet K's mean, which the exact ones would cancel (Σ dS = 0). Such
rows have few weights that count, so these are made exact, in both passes, for out and delta must
come from the weights that dS is made of; and so is the dP − delta that goes with them. In rows
with many weights errors average out, and nothing is done; nor where scores are short sums of small
products, and right by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llvmlite import ir

from ringrt_backends.cpu.calls import inner
from ringrt_backends.cpu.vectors import F32, I1, Body, Value

#: From this part of a row's sum on a weight is large: a row has 32 of them at most.
LARGE = 1 / 32

#: That is for heads whose scores are sums of such a size, in powers of 2, or larger: by Cauchy and
#: Schwarz no sum of some products is larger than scale · |q| · |k|, nor any of its roundings than
#: that times 2^-24. (The heads of the data in docs/accuracy.md: 54 to 96. Standard normal numbers,
#: heads of 64: 19.)
SCORES = 50.0


def part_factors(scale: float) -> tuple[float, float]:
    """What `large_part` is made of, by the scale of the products, in powers of 2."""
    return LARGE, LARGE * (SCORES / scale) ** 2


@inner
def large_part(least, factor, q_square, k_square):  # type: ignore[no-untyped-def]
    """From which part of a row's sum on a weight is large, float32, for some q and k: their longest
    rows, squared. As many weights of that part as there may be, with as many errors of either
    sign, are off by sqrt(part) · error. So the part may grow as the error's square falls. It must
    be the same in both passes, for the same weights must be exact in both."""
    part = factor / (np.float64(q_square) * k_square)
    return np.float32(part if part > least else least)


def mended(pairs: bool, capped: bool) -> bool:
    """Whether large weights are made exact at all: not in pairs, where they are rounded to bf16
    next, nor with a softcap: `weights` knows no tanh."""
    return not (pairs or capped)


def any_above(body: Body, weights: Value, limits: Value) -> Value:
    """Whether any lane is above its limit."""
    return any_of(body, body.build.fcmp_ordered(">", weights, limits))


def any_of(body: Body, lanes: Value) -> Value:
    """Whether any of these booleans is true."""
    return body.intrinsic(f"llvm.vector.reduce.or.v{body.width}i1", I1, lanes)


def weights(body: Body, a: Value, b: Value, at: int, depth: int, less: Sequence[Value]) -> Value:
    """2^(scale · A·B − Σ less), the exponent in float64, of what `product` takes; scale is an
    argument of the function."""
    build = body.build
    x = build.fmul(product(body, a, b, at, depth), wide(body, body.splat(body.args["scale"])))
    for term in less:
        x = build.fsub(x, term)
    return body.exp2(build.fptrunc(x, body.vector))


def product(body: Body, a: Value, b: Value, at: int, depth: int) -> Value:
    """A·B in float64, of one row of A and the vector of a panel of B that begins at `at`."""
    build = body.build

    def step(k: Value, sums: Sequence[Value]) -> Sequence[Value]:
        column = wide(body, body.load(body.step(b, k, body.machine.panel), at))
        scalar = build.load(body.at(a, k), align=4, typ=F32)
        return [body.fma(column, wide(body, body.splat(scalar)), sums[0])]

    zero = ir.Constant(body.doubles, [0.0] * body.width)
    return body.loop(depth, [zero], step)[0]


def wide(body: Body, x: Value) -> Value:
    """A vector of float32 in float64."""
    return body.build.fpext(x, body.doubles)
