"""The register tile: the one loop in which nearly all the time is spent, and what is laid out
in memory for its sake.

**The tile.** Every product of attention is computed in tiles of 6 rows × 2 vectors that stay in
registers while the sum runs (6 × 32 floats with AVX-512, 6 × 16 with AVX2, 6 × 8 with NEON):

    C[r, c]  =  Σ_k A[r, k] · B[k, c]

A step of k loads two vectors of B, and broadcasts one scalar of A a row; each scalar is used
twice and each vector 6 times, so the multiply-add units do not wait for loads. Twelve sums are
enough to hide the latency of a multiply-add, and where there are 32 registers, twelve totals stay
in registers beside them (see Sums).

**A** is read scalar by scalar, so its layout is free: the strides of r and k may be (ld, 1) or
(1, ld). A transposed operand costs nothing, and no operand is ever transposed for A's sake.
**B** wants its vectors side by side for each k: a *panel*, `[k, 2 vectors]`, packed. All strides
are constants of the compiled code, so an operand takes one register for its address.

**Scores are computed transposed**: keys are rows of the tile, queries its columns.

    Sᵀ = K Qᵀ        A = rows of K           B = panels of Qᵀ, packed once a pass
    O += P V         A = columns of Pᵀ       B = panels of V, packed once a shard
    dPᵀ = V dOᵀ      A = rows of V           B = panels of dOᵀ, packed once a pass
    dV += Pᵀ dO      A = rows of Pᵀ          B = panels of dO, packed once a pass
    dK += dSᵀ Q      A = rows of dSᵀ         B = panels of Q, packed once a pass
    dQ += dS K       A = columns of dSᵀ      B = panels of K, packed once a block of keys

So what circulates in a ring (K and V) is copied at most, and what is transposed stays at home.
The softmax runs down the columns: no sum or maximum ever goes across the lanes of a vector.
What follows a product for each of its elements (the running maximum, exp2, the mask) is done
while the tile is still in registers: its *epilogue*.

**Order of the loops**, forward: block of queries (their state in cache) → block of keys → panel
of queries → rows of keys; backward: block of keys (their dk and dv in cache) → block of queries.

**Sums.** A register adds up a dozen terms, which go to a total; so a term seldom meets a sum that
is much larger than it. A tile adds up at most one block (144 terms in forward, 288 in backward)
in float32; what lives longer (z, the value sums y, dq, dk, dv) is float64 in memory, added to by
the tile's epilogue. Columns of Q and K are taken in an order (`layout.orders_of`), and large
weights are made exact (`exact`). All of it is for the bounds of docs/accuracy.md on real data.

**bf16.** With AVX512-BF16 an element of A and B is a pair of bf16, two consecutive k in 32 bits,
and a step multiplies both. K and Q hold such pairs as they lie in memory; V, and what else is
summed over rows, is interleaved by pairs of rows when it is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.vectors import F32, I32, I64, PTR, Body, Value


def product(
    body: Body,
    a: Value,
    b: Value,
    depth: int | Value,
    *,
    a_row: int,
    a_step: int,
    vectors: int = 2,
    pairs: bool = False,
    less: Sequence[Value] | None = None,
) -> list[list[Value]]:
    """The tile A·B as `[rows][vectors]`, the sum over `depth` >= 1 steps. Strides of A in 32-bit
    elements; B is a panel, of which the first `vectors` are taken. `less`: what is subtracted
    from every row, one vector for each: as the totals begin with it, they stay as small as the
    difference, and so does their rounding."""
    rows = body.machine.rows

    def step(k: Value, sums: Sequence[Value]) -> Sequence[Value]:
        return _multiply(body, a, b, k, sums, a_row, a_step, vectors, pairs)

    zeros = [body.floats(0.0)] * (rows * vectors)
    totals = [body.build.fneg(x) for x in less] * rows if less else None
    sums = in_chunks(body, depth, zeros, step, totals)
    return [list(sums[row * vectors : (row + 1) * vectors]) for row in range(rows)]


def in_chunks(
    body: Body,
    count: int | Value,
    zeros: list[Value],
    step: Callable[[Value, Sequence[Value]], Sequence[Value]],
    totals: Sequence[Value] | None = None,
) -> Sequence[Value]:
    """Sums over count >= 1 steps, in two levels: a chunk of terms is summed up by itself and
    added to the total, so that few terms meet a sum much larger than they are. `totals` are what
    these begin with, by default 0."""
    build, size = body.build, body.machine.chunk
    if isinstance(count, int):
        if count <= size and totals is None:
            return body.loop(count, zeros, step)
        count = ir.Constant(I64, count)
    whole = count

    def chunk(number: Value, totals: Sequence[Value]) -> Sequence[Value]:
        start = build.mul(number, ir.Constant(I64, size))
        rest = build.sub(whole, start)
        full = build.icmp_signed("<", rest, ir.Constant(I64, size))
        steps = build.select(full, rest, ir.Constant(I64, size))
        sums = body.loop(steps, zeros, lambda k, sums: step(build.add(start, k), sums))
        return [build.fadd(total, part) for total, part in zip(totals, sums, strict=True)]

    chunks = build.sdiv(build.add(whole, ir.Constant(I64, size - 1)), ir.Constant(I64, size))
    return body.loop(chunks, totals or zeros, chunk)


def _multiply(
    body: Body,
    a: Value,
    b: Value,
    k: Value,
    sums: Sequence[Value],
    a_row: int,
    a_step: int,
    vectors: int,
    pairs: bool,
) -> Sequence[Value]:
    """One step: column k of A times row k of B, added to the sums."""
    build, machine = body.build, body.machine
    element, kind = (I32, body.ints) if pairs else (F32, body.vector)
    from_b = body.at(b, build.mul(k, ir.Constant(I64, machine.panel)))
    columns = [body.load(from_b, vector * body.width, kind) for vector in range(vectors)]
    from_a = body.at(a, build.mul(k, ir.Constant(I64, a_step)))
    multiply, following = body.dot if pairs else body.fma, []
    for row in range(machine.rows):
        scalar = build.load(body.at(from_a, row * a_row), align=4, typ=element)
        every = body.splat(scalar)
        for vector in range(vectors):
            following.append(multiply(every, columns[vector], sums[row * vectors + vector]))
    return following


def add_product(
    module: ir.Module,
    machine: Machine,
    name: str,
    *,
    a_row: int,
    a_step: int,
    c_row: int,
    vectors: int,
    scaled: bool = False,
    pairs: bool = False,
) -> None:
    """Emit name(a, b, c, depth[, factor]): C += A·B, or C = factor[r]·C + A·B row by row, with C
    in float64 and its row stride `c_row`."""
    extra = {"factor": PTR} if scaled else {}
    body = Body(module, machine, name, a=PTR, b=PTR, c=PTR, depth=I64, **extra)
    a, b, c, depth = (body.args[key] for key in ("a", "b", "c", "depth"))
    sums = product(body, a, b, depth, a_row=a_row, a_step=a_step, vectors=vectors, pairs=pairs)
    build = body.build
    for row, parts in enumerate(sums):
        if scaled:
            scalar = build.load(body.at(body.args["factor"], row), align=4, typ=F32)
            factor = build.fpext(body.splat(scalar), body.doubles)
        for vector, part in enumerate(parts):
            at = row * c_row + vector * body.width
            old, new = body.load(c, at, body.doubles), build.fpext(part, body.doubles)
            body.store(body.fma(old, factor, new) if scaled else build.fadd(old, new), c, at)
    build.ret_void()
