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
is much larger than it. A tile adds up at most one block of 288 terms in float32; what lives longer
(the value sums y, dq, dk, dv) is float64 in memory, added to by the tile's epilogue, and so is z,
from eight weights on (`sums`). Where weights are rounded to bf16 all of this would be lost on them,
so their sums have one level, and are float32 in memory. Columns of Q and K are taken in an order
(`layout.places_of`), and large weights are made exact (`exact`, `mend_ir`). All of it is for the
bounds of docs/accuracy.md on real data.

**Prefetching.** A block of K or V comes from the third level of the cache, or from memory, and what
a processor foresees by itself is too little of it: a tile of scores took a third longer. So every
step asks for some of what will be read later (`Ahead`): the next tile's rows of A, or a part of
the next panel of B, such that all tiles which use one panel together read the one after it. The
tile's own part of C is asked for shortly before its end: what is asked for at the beginning, its
panel of B drives out of the first level again.

**bf16.** With AVX512-BF16 an element of A and B is a pair of bf16, two consecutive k in 32 bits,
and a step multiplies both. K and Q hold such pairs as they lie in memory; V, and what else is
summed over rows, is interleaved by pairs of rows when it is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir

from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.vectors import F32, I8, I32, I64, LINE, PTR, Body, Value


class Ahead(NamedTuple):
    """What will be needed later: from an address on, so many bytes a step."""

    address: Value
    bytes_a_step: int

    def due(self, number: int, steps: int) -> int | None:
        """The line that step `number` of a chunk of so many asks for, in bytes from the step's own
        part on; None for most steps. Together they ask for every line of theirs once."""
        lines = -(-self.bytes_a_step * steps // LINE)
        line, before = number * lines // steps, (number - 1) * lines // steps
        return None if line == before else line * LINE - number * self.bytes_a_step


#: So many chunks before its end a tile asks for its C. Much earlier, and the panel of B that is
#: read meanwhile drives it out of the first-level cache again.
_NEAR = 8


def part_of_panel(machine: Machine, rows: int) -> int:
    """Bytes a step if the tiles of so many rows, all together, are to read a panel of B that is as
    deep as they are."""
    return -(-4 * machine.panel * machine.rows // rows)


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
    levels: int | None = None,
    less: Sequence[Value] | None = None,
    ahead: Sequence[Ahead] = (),
    near_end: Callable[[], None] | None = None,
) -> list[list[Value]]:
    """The tile A·B as `[rows][vectors]`, the sum over `depth` >= 1 steps. Strides of A in 32-bit
    elements; B is a panel, of which the first `vectors` are taken. `levels`: of the sums, two, or
    with `pairs` one, if not said otherwise. `less`: what is subtracted from every row, one vector
    for each: as the totals begin with it, they stay as small as the difference, and so does their
    rounding. `ahead`: what is read into the cache meanwhile, besides the next tile's rows of A
    where steps are along these (but for the steps after the last whole chunk of a depth that is
    not known). `near_end`: see `in_chunks`."""
    build, rows, levels = body.build, body.machine.rows, levels or (1 if pairs else 2)
    if a_step == 1:
        ahead = [Ahead(body.at(a, rows * a_row), 4 * rows), *ahead]

    def step(k: Value, sums: Sequence[Value], number: int | None) -> Sequence[Value]:
        body.barrier()
        for what in ahead:
            line = None if number is None else what.due(number, body.machine.chunk)
            if line is not None:
                own = body.step(what.address, k, what.bytes_a_step, I8)
                body.prefetch(body.at(own, line, I8))
        return _multiply(body, a, b, k, sums, a_row, a_step, vectors, pairs)

    zeros = [body.floats(0.0)] * (rows * vectors)
    totals = [build.fneg(x) for x in less] * rows if less else zeros
    sums = in_chunks(body, depth, totals, step, levels=levels, near_end=near_end)
    return [list(sums[row * vectors : (row + 1) * vectors]) for row in range(rows)]


#: One more term, the k-th, for each sum, which may be None: nothing so far. At last its number in
#: its chunk, or None where there is no telling.
Step = Callable[[Value, Sequence[Value], int | None], Sequence[Value]]


def in_chunks(
    body: Body,
    count: int | Value,
    totals: Sequence[Value],
    step: Step,
    *,
    levels: int,
    near_end: Callable[[], None] | None,
) -> Sequence[Value]:
    """Totals and the sums of count >= 1 terms. In two levels: a chunk of terms is summed up by
    itself and added to the total, so that few terms meet a sum much larger than they are. In one,
    terms are added to the totals, which is up to 3 % of a pass faster; it is for terms that were
    rounded to bf16.

    The sums take turns, each being added to its total at another step of the chunk. Where totals
    are in memory, all of them at once would hold up the loads of the next steps: 15 % of the time
    of a tile, against 3 % in turns. Where there is no telling how many terms there are, those
    after the last whole chunk are a loop; and `near_end` is done `_NEAR` chunks before that, or
    before all where there are fewer."""
    build, size, width = body.build, body.machine.chunk, len(totals)
    zeros, first = [body.floats(0.0)] * width, ir.Constant(I64, 0)
    kept, sums = _Totals(body, totals if levels == 2 else []), zeros if levels == 2 else totals

    def chunks(
        first: Value, number: int | Value, sums: Sequence[Value], **more: bool
    ) -> list[Value]:
        def chunk(index: Value, carried: Sequence[Value]) -> Sequence[Value]:
            kept.carried = list(carried[width:])
            start = build.mul(build.add(first, index), ir.Constant(I64, size))
            return [*_in_turns(body, start, size, carried[:width], kept, step), *kept.carried]

        carried = body.loop(number, [*sums, *kept.carried], chunk, **more)
        kept.carried = carried[width:]
        return carried[:width]

    if isinstance(count, int):
        if count >= size:
            sums = chunks(first, count // size, sums)
        start = ir.Constant(I64, count // size * size)
        return kept.with_(_in_turns(body, start, count % size, sums, kept, step))
    whole = build.sdiv(count, ir.Constant(I64, size))
    if near_end is not None:
        early = build.sub(whole, ir.Constant(I64, _NEAR))
        early = build.select(build.icmp_signed(">", early, first), early, first)
        sums, first = chunks(first, early, sums, maybe_none=True), early
        near_end()
    sums = chunks(first, build.sub(whole, first), sums, maybe_none=True)
    if levels == 2:
        for turn, part in enumerate(sums):
            kept.add(turn, part)
        sums = zeros
    start = build.mul(whole, ir.Constant(I64, size))
    rest = build.sub(count, start)

    def one_more(k: Value, sums: Sequence[Value]) -> Sequence[Value]:
        return step(build.add(start, k), sums, None)

    return kept.with_(body.loop(rest, sums, one_more, maybe_none=True))


def _in_turns(
    body: Body, start: Value, terms: int, sums: Sequence[Value], kept: _Totals, step: Step
) -> list[Value]:
    """The sums, each of the terms since its turn; of all, where no totals are kept."""
    size, sums = body.machine.chunk, list(sums)
    for number in range(terms):
        sums = list(step(body.build.add(start, ir.Constant(I64, number)), sums, number))
        for turn in range(number * kept.count // size, (number + 1) * kept.count // size):
            kept.add(turn, sums[turn])
            sums[turn] = None
    return [body.floats(0.0) if part is None else part for part in sums]


class _Totals:
    """Totals in registers (or none), which loops hand on as `carried`; or, where there are not
    enough, in memory, aligned: what LLVM itself puts there is not."""

    def __init__(self, body: Body, totals: Sequence[Value]) -> None:
        self._body, self.count = body, len(totals)
        # Two vectors of B and one of A are needed besides.
        self._in_memory = 2 * len(totals) + 3 > body.machine.registers
        self.carried = [] if self._in_memory else list(totals)
        if self._in_memory:
            body.make_room(len(totals))
            for number, total in enumerate(totals):
                body.to_room(total, number)

    def add(self, number: int, part: Value) -> None:
        """Add to one of them."""
        body = self._body
        if self._in_memory:
            body.to_room(body.build.fadd(body.in_room(number), part), number)
        else:
            self.carried[number] = body.build.fadd(self.carried[number], part)

    def with_(self, parts: Sequence[Value]) -> list[Value]:
        """All of them, and what was not yet added; where none are kept, that is all."""
        body, totals = self._body, self.carried
        if self.count == 0:
            return list(parts)
        if self._in_memory:
            totals = [body.in_room(number) for number in range(self.count)]
        return [body.build.fadd(total, part) for total, part in zip(totals, parts, strict=True)]


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
    add, following = body.dot if pairs else body.fma, []
    for row in range(machine.rows):
        scalar = build.load(body.at(from_a, row * a_row), align=4, typ=element)
        every = body.splat(scalar)
        for vector in range(vectors):
            total = sums[row * vectors + vector]
            if total is None and not pairs:
                following.append(build.fmul(every, columns[vector]))
            else:
                following.append(add(every, columns[vector], total or body.floats(0.0)))
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
    later_step: int,
    sums: ir.Type,
    scaled: bool = False,
    pairs: bool = False,
) -> None:
    """Emit name(a, b, c, depth, later[, factor]): C += A·B, or C = factor[r]·C + A·B row by row,
    with C in `sums` (float64 or float32), its row stride `c_row`, and factor in float32. From the
    address `later` on, `later_step` bytes a step are read ahead."""
    extra = {"factor": PTR} if scaled else {}
    body = Body(module, machine, name, a=PTR, b=PTR, c=PTR, depth=I64, later=PTR, **extra)
    a, b, c, depth = (body.args[key] for key in ("a", "b", "c", "depth"))
    tile = product(
        body, a, b, depth,
        a_row=a_row, a_step=a_step, vectors=vectors, pairs=pairs,
        ahead=[Ahead(body.args["later"], later_step)],
        near_end=lambda: _prefetch_rows(body, c, c_row, vectors, sums),
    )  # fmt: skip
    for row, parts in enumerate(tile):
        factor = body.at(body.args["factor"], row) if scaled else None
        _add_row(body, c, row * c_row, parts, factor, sums)
    body.build.ret_void()


def _add_row(
    body: Body, c: Value, at: int, parts: Sequence[Value], factor: Value, sums: ir.Type
) -> None:
    """C = C + parts, or factor·C + parts, for vectors side by side."""
    build, kind = body.build, ir.VectorType(sums, body.width)
    if factor is not None:
        factor = body.splat(build.load(factor, align=4, typ=F32))
        factor = factor if sums == F32 else build.fpext(factor, kind)
    for vector, part in enumerate(parts):
        here = at + vector * body.width
        old, new = body.load(c, here, kind), part if sums == F32 else build.fpext(part, kind)
        total = build.fadd(old, new) if factor is None else body.fma(old, factor, new)
        body.store(total, c, here)


def _prefetch_rows(body: Body, c: Value, c_row: int, vectors: int, sums: ir.Type) -> None:
    """Ask for a tile of sums."""
    size = (4 if sums == F32 else 8) * vectors * body.width
    for row in range(body.machine.rows):
        body.prefetch(body.at(c, row * c_row, sums), size)
