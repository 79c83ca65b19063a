"""Rows of elements in and out: widened from fp16 and bf16, laid out as the register tile reads
them, and rounded back at the end. An element of a packed operand is 32 bits: an fp32, or a pair of
bf16; see `tile`.

One head's rows lie far apart, a row of all heads from one another, and nothing in the processor
foresees where the next one is: they are prefetched.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.transpose import transposed
from ringrt_backends.cpu.vectors import F32, F64, I8, I16, I32, I64, PTR, Body, Value

_ELEMENTS = {"float32": F32, "float16": ir.HalfType(), "bfloat16": I16}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: Rows that are prefetched ahead. With heads of 128 they are often a power of two apart, and of one
#: set of the first-level cache, which has room for 8.
_AHEAD = 6
#: Rows of K that are put in place together.
_AT_ONCE = 4


def rows(
    module: ir.Module, machine: Machine, name: str, *, dim: int, dtype: str, pairs: bool
) -> None:
    """Emit name(source, stride, count, target, size): rows of V as operand A, side by side.
    `stride` is in bytes, `count` >= 1. `size` is raised to the largest magnitude."""
    body = Body(module, machine, name, **_SOURCE, size=PTR)
    args, depth = body.args, dim // 2 if pairs else dim

    def row(number: Value, tops: Sequence[Value]) -> Sequence[Value]:
        source = _row(body, args["source"], number, dim, dtype)
        target = body.step(args["target"], number, depth, I32)
        for at in range(0, depth, body.width):
            lanes = min(body.width, depth - at)
            bits = _vector(body, source, at, lanes, dtype, pairs)
            _store_lanes(body, bits, target, at, lanes)
            tops = [_largest(body, tops[0], bits, pairs)]
        return tops

    _raise_size(body, *body.loop(args["count"], [_zero(body)], row))


def rows_in_place(
    module: ir.Module, machine: Machine, name: str, *, dim: int, dtype: str, pairs: bool
) -> None:
    """Emit name(source, stride, count, target, place, size): likewise rows of K, each element in
    its place, int64: target[r, place[d]] = source[r, d]. `size`, two floats, is raised to the
    largest magnitude and, unless in pairs, to the square of the longest row."""
    body = Body(module, machine, name, **_SOURCE, place=PTR, size=PTR)
    build, args, depth = body.build, body.args, dim // 2 if pairs else dim

    def some(number: Value, tops: Sequence[Value], count: int) -> Sequence[Value]:
        """So many rows: places are looked up once for all of them."""
        numbers = [build.add(number, ir.Constant(I64, r)) for r in range(count)]
        sources = [_row(body, args["source"], r, dim, dtype, ahead=_AT_ONCE) for r in numbers]
        targets = [body.step(args["target"], r, depth, I32) for r in numbers]

        def element(d: Value, _: Sequence[Value]) -> Sequence[Value]:
            place = body.load(args["place"], d, I64)
            for source, target in zip(sources, targets, strict=True):
                one = _element(body, source, d, dtype, pairs)
                build.store(one, body.at(target, place, I32))
            return []

        body.loop(depth, [], element)
        for source in sources:
            tops = _sized(body, tops, source, depth, dtype, pairs)
        return tops

    each = ir.Constant(I64, _AT_ONCE)
    groups = build.sdiv(args["count"], each)
    whole = build.mul(groups, each)
    tops: Sequence[Value] = [_zero(body)] + ([] if pairs else [ir.Constant(F32, 0.0)])
    tops = body.loop(
        groups, tops, lambda i, now: some(build.mul(i, each), now, _AT_ONCE), maybe_none=True
    )
    left = build.sub(args["count"], whole)
    tops = body.loop(left, tops, lambda i, now: some(build.add(whole, i), now, 1), maybe_none=True)
    _raise_size(body, *tops)


def _sized(
    body: Body, tops: Sequence[Value], source: Value, depth: int, dtype: str, pairs: bool
) -> list[Value]:
    """The largest magnitudes, and the square of the longest row, with another row."""
    top, squares = tops[0], body.floats(0.0)
    for at in range(0, depth, body.width):
        bits = _vector(body, source, at, min(body.width, depth - at), dtype, pairs)
        top, squares = _largest(body, top, bits, pairs), _squared(body, bits, squares)
    return [top] if pairs else [top, body.larger(body.sum_of(squares), tops[1])]


def _store_lanes(body: Body, bits: Value, target: Value, at: int, lanes: int) -> None:
    """The first lanes of a vector: what comes after them is not this row's."""
    if lanes == body.width:
        body.store(bits, target, at)
        return
    for lane in range(lanes):
        one = body.build.extract_element(bits, ir.Constant(I32, lane))
        body.build.store(one, body.at(target, at + lane, I32))


def columns(
    module: ir.Module, machine: Machine, name: str, *, dim: int, dtype: str, pairs: bool
) -> None:
    """Emit name(source, stride, count, target, panel_stride, size): rows as operand B that is
    summed over rows: panels `panel_stride` elements apart, of which row r of the source is row r,
    or in pairs rows 2r and 2r + 1; where there is no second one, it is 0. `size` is raised to the
    largest magnitude."""
    body = Body(module, machine, name, **_SOURCE, panel_stride=I64, size=PTR)
    build, args = body.build, body.args
    each = 2 if pairs else 1

    def some(number: Value, tops: Sequence[Value], there: int) -> Sequence[Value]:
        first = build.mul(number, ir.Constant(I64, each))
        sources = [
            _row(body, args["source"], build.add(first, ir.Constant(I64, r)), dim, dtype)
            for r in range(there)
        ]
        target = body.step(args["target"], number, machine.panel, I32)
        for at in range(0, dim, body.width):
            lanes = min(body.width, dim - at)
            parts = [_vector(body, source, at, lanes, dtype, False) for source in sources]
            bits = _paired(body, parts) if pairs else parts[0]
            panel = body.step(target, args["panel_stride"], at // machine.panel, I32)
            body.store(bits, panel, at % machine.panel)
            tops = [_largest(body, tops[0], bits, pairs)]
        return tops

    top = build.alloca(body.ints)
    build.store(_zero(body), top)
    full = build.sdiv(args["count"], ir.Constant(I64, each))
    with build.if_then(build.icmp_signed(">", full, ir.Constant(I64, 0))):
        build.store(body.loop(full, [_zero(body)], lambda n, tops: some(n, tops, each))[0], top)
    if pairs:
        odd = build.and_(args["count"], ir.Constant(I64, 1))
        with build.if_then(build.icmp_signed(">", odd, ir.Constant(I64, 0))):
            build.store(some(full, [build.load(top, typ=body.ints)], 1)[0], top)
    _raise_size(body, build.load(top, typ=body.ints))


def turned(
    module: ir.Module, machine: Machine, name: str, *, dim: int, dtype: str, pairs: bool
) -> None:
    """Emit name(source, stride, count, target, place, flip, size): up to a panel of rows
    transposed, as operand B that is summed over columns: target[place[d], r] = source[r, d] XOR
    flip; beyond the last row 0. `size` as for `rows_in_place`."""
    body = Body(module, machine, name, **_SOURCE, place=PTR, flip=I32, size=PTR)
    build, args = body.build, body.args
    depth, width = dim // 2 if pairs else dim, body.width
    size = _BYTES[dtype] * (2 if pairs else 1)
    flip, counts = body.splat(args["flip"]), body.splat(build.trunc(args["count"], I32))
    sources = _rows_of_panel(body)

    def some(d: Value, tops: Sequence[Value], count: int) -> Sequence[Value]:
        """So many columns from the d-th on: one, or a vector's lanes."""
        tops = list(tops)
        if count > 1:
            _prefetch_next_panel(body, sources, d, depth, size)
        for v in range(2):
            half = sources[v * width : (v + 1) * width]
            if count == 1:
                found = [_gathered(body, half, d, dtype, pairs)]
            else:
                vectors = [_vector(body, source, d, width, dtype, pairs) for source in half]
                found = transposed(body, vectors)
            there = build.icmp_signed("<", body.whole(range(v * width, (v + 1) * width)), counts)
            for number, bits in enumerate(found):
                bits = build.select(there, bits, _zero(body))
                tops[0] = _largest(body, tops[0], bits, pairs)
                if not pairs:
                    tops[1 + v] = _squared(body, bits, tops[1 + v])
                place = body.load(args["place"], build.add(d, ir.Constant(I64, number)), I64)
                flipped = build.select(there, build.xor(bits, flip), _zero(body))
                body.store(flipped, body.step(args["target"], place, machine.panel), v * width)
        return tops

    whole = depth // width
    tops: Sequence[Value] = [_zero(body)] + ([] if pairs else [body.floats(0.0)] * 2)
    if whole:
        each = ir.Constant(I64, width)
        tops = body.loop(whole, tops, lambda n, now: some(build.mul(n, each), now, width))
    if depth % width:
        first = ir.Constant(I64, whole * width)
        tops = body.loop(depth % width, tops, lambda n, now: some(build.add(n, first), now, 1))
    _raise_size(body, tops[0], *[body.largest_of(x) for x in tops[1:]])


def _prefetch_next_panel(
    body: Body, sources: Sequence[Value], d: Value, depth: int, size: int
) -> None:
    """What will be read and written for these columns when the rows that follow have their turn."""
    build, machine = body.build, body.machine
    rows = build.mul(body.args["stride"], ir.Constant(I64, machine.panel))
    where = build.add(rows, build.mul(d, ir.Constant(I64, size)))
    for source in sources:
        body.prefetch(body.at(source, where, I8))
    target = body.at(body.args["target"], depth * machine.panel)
    target = body.step(target, d, machine.panel)
    body.prefetch(target, 4 * machine.panel * machine.width)


def _rows_of_panel(body: Body) -> list[Value]:
    """Where they begin; those beyond the last are the last."""
    build, args = body.build, body.args
    last, rows = build.sub(args["count"], ir.Constant(I64, 1)), []
    for r in range(body.machine.panel):
        number = ir.Constant(I64, r)
        number = build.select(build.icmp_signed("<", number, last), number, last)
        rows.append(body.at(args["source"], build.mul(number, args["stride"]), I8))
    return rows


def rounded(
    module: ir.Module, machine: Machine, name: str, *, dim: int, dtype: str, sums: ir.Type
) -> None:
    """Emit name(source, target, factor): factor · source, `sums` (float64 or float32), in the
    nearest numbers of the dtype, one row."""
    body = Body(module, machine, name, source=PTR, target=PTR, factor=F64)
    build, args, element = body.build, body.args, _ELEMENTS[dtype]
    for at, lanes in _cuts(dim, body.width):
        factor = args["factor"] if lanes == 1 else body.splat(args["factor"])
        exact = _double(body, args["source"], at, lanes, sums)
        x = build.fptrunc(build.fmul(exact, factor), _wide(F32, lanes))
        if dtype == "float16":
            x = build.fptrunc(x, _wide(element, lanes))
        elif dtype == "bfloat16":
            x = _to_bfloat(body, x, lanes)
        build.store(x, body.at(args["target"], at, element), align=_BYTES[dtype])
    build.ret_void()


def added(
    module: ir.Module, machine: Machine, name: str, *, dim: int, row: int, sums: ir.Type
) -> None:
    """Emit name(source, target, stride, count, factor): target += factor · source, for count >= 1
    rows of `sums` (float64 or float32), `row` elements apart, and of float32, `stride` bytes
    apart."""
    body = Body(
        module, machine, name, source=PTR, target=PTR, stride=I64, count=I64, factor=F64
    )  # fmt: skip
    build, args = body.build, body.args

    def one(number: Value, _: Sequence[Value]) -> Sequence[Value]:
        source = body.step(args["source"], number, row, sums)
        target = _row(body, args["target"], number, dim, "float32")
        for at, lanes in _cuts(dim, body.width):
            kind = F64 if lanes == 1 else body.doubles
            factor = args["factor"] if lanes == 1 else body.splat(args["factor"])
            exact = _double(body, source, at, lanes, sums)
            old = build.load(body.at(target, at), align=4, typ=_wide(F32, lanes))
            new = build.fadd(build.fpext(old, kind), build.fmul(exact, factor))
            build.store(build.fptrunc(new, _wide(F32, lanes)), body.at(target, at), align=4)
        return []

    body.loop(args["count"], [], one)
    build.ret_void()


def _double(body: Body, source: Value, at: int, lanes: int, element: ir.Type) -> Value:
    """A float64, or so many, which are float64 or float32 in memory; `at` counts these."""
    loaded = body.load(source, at, _wide(element, lanes))
    return loaded if element == F64 else body.build.fpext(loaded, _wide(F64, lanes))


_SOURCE = {"source": PTR, "stride": I64, "count": I64, "target": PTR}


def _cuts(dim: int, width: int) -> list[tuple[int, int]]:
    """(first, lanes): whole vectors, and the rest one by one."""
    whole = dim // width * width
    vectors = [(at, width) for at in range(0, whole, width)]
    return vectors + [(at, 1) for at in range(whole, dim)]


def _row(
    body: Body, first: Value, number: Value, dim: int, dtype: str, ahead: int = _AHEAD
) -> Value:
    """The address of a row, `number` strides after the first; one further on is prefetched."""
    build, args = body.build, body.args
    source = body.at(first, build.mul(number, args["stride"]), I8)
    far = build.mul(args["stride"], ir.Constant(I64, ahead))
    body.prefetch(body.at(source, far, I8), dim * _BYTES[dtype])
    return source


def _element(body: Body, source: Value, index: Value, dtype: str, pairs: bool) -> Value:
    """One element, widened, as a 32-bit integer."""
    element = I32 if pairs else _ELEMENTS[dtype]
    align = 4 if element == F32 else 2
    x = body.build.load(body.at(source, index, element), align=align, typ=element)
    return _widened(body, x, 1, dtype, pairs)


def _vector(
    body: Body, source: Value, at: int | Value, lanes: int, dtype: str, pairs: bool
) -> Value:
    """A vector of elements likewise, 0 where there are none."""
    build, element = body.build, I32 if pairs else _ELEMENTS[dtype]
    if lanes == body.width:
        x = body.load(source, at, ir.VectorType(element, lanes))
        return _widened(body, x, lanes, dtype, pairs)
    bits = _zero(body)
    for lane in range(lanes):
        one = _element(body, source, ir.Constant(I64, at + lane), dtype, pairs)
        bits = build.insert_element(bits, one, ir.Constant(I32, lane))
    return bits


def _widened(body: Body, x: Value, lanes: int, dtype: str, pairs: bool) -> Value:
    build, ints = body.build, _wide(I32, lanes)
    if pairs:
        return x
    if dtype == "float16":
        x = build.fpext(x, _wide(F32, lanes))
    elif dtype == "bfloat16":
        x = build.shl(build.zext(x, ints), _all(16, lanes))
    return build.bitcast(x, ints)


def _gathered(body: Body, sources: Sequence[Value], index: Value, dtype: str, pairs: bool) -> Value:
    """One element of each of some rows."""
    bits = _zero(body)
    for lane, source in enumerate(sources):
        one = _element(body, source, index, dtype, pairs)
        bits = body.build.insert_element(bits, one, ir.Constant(I32, lane))
    return bits


def _paired(body: Body, widened: Sequence[Value]) -> Value:
    """Pairs of two rows of bf16 that were widened; the second may be missing."""
    low = body.build.lshr(widened[0], _all(16, body.width))
    return body.build.or_(low, widened[1]) if len(widened) > 1 else low


def _largest(body: Body, top: Value, bits: Value, pairs: bool) -> Value:
    """The largest magnitude so far, lane by lane."""
    build, lanes = body.build, body.width
    if not pairs:
        return _larger(body, top, build.and_(bits, _all(0x7FFFFFFF, lanes)))
    high = _all(0x7FFF0000, lanes)
    top = _larger(body, top, build.and_(bits, high))
    return _larger(body, top, build.and_(build.shl(bits, _all(16, lanes)), high))


def _squared(body: Body, bits: Value, total: Value) -> Value:
    """The squares of floats, by their bits, added to a total."""
    x = body.build.bitcast(bits, body.vector)
    return body.fma(x, x, total)


def _raise_size(body: Body, tops: Value, *squares: Value) -> None:
    """The end of a function: `size` is raised to the largest magnitude, by its bits (without their
    sign, numbers are ordered as these are, and NaN comes last), and to the largest square."""
    build, size = body.build, body.args["size"]
    largest = body.intrinsic(f"llvm.vector.reduce.umax.v{body.width}i32", I32, tops)
    build.store(_larger(body, build.load(size, typ=I32), largest), size)
    longest = body.at(size, 1)
    for square in squares:
        build.store(body.larger(square, build.load(longest, typ=F32)), longest)
    build.ret_void()


def _to_bfloat(body: Body, x: Value, lanes: int) -> Value:
    """The nearest bf16, ties to even; NaN stays NaN."""
    build = body.build
    bits = build.bitcast(x, _wide(I32, lanes))
    upper = build.lshr(bits, _all(16, lanes))
    odd = build.and_(upper, _all(1, lanes))
    near = build.lshr(build.add(bits, build.add(odd, _all(0x7FFF, lanes))), _all(16, lanes))
    quiet = build.or_(upper, _all(0x40, lanes))
    chosen = build.select(build.fcmp_ordered("ord", x, x), near, quiet)
    return build.trunc(chosen, _wide(I16, lanes))


def _wide(element: ir.Type, lanes: int) -> ir.Type:
    return ir.VectorType(element, lanes) if lanes > 1 else element


def _zero(body: Body) -> Value:
    return _all(0, body.width)


def _all(number: int, lanes: int) -> Value:
    """The integer in every lane."""
    return ir.Constant(_wide(I32, lanes), [number] * lanes if lanes > 1 else number)


def _larger(body: Body, a: Value, b: Value) -> Value:
    return body.build.select(body.build.icmp_unsigned(">", a, b), a, b)
