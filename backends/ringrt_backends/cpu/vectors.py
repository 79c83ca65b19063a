"""Vector code in LLVM's language: the operations that the kernels are put together from.

Everything is made of vectors of `machine.width` floats; LLVM turns these into the machine's
own, so AVX-512, AVX2 and NEON come from one text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from ringrt_backends.cpu.machine import Machine

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64, PTR = ir.FloatType(), ir.DoubleType(), ir.PointerType()

#: Bytes of a line of the cache.
LINE = 64

#: What memory is aligned to, where it is not 4 bytes.
_ALIGN = {F64: 8, I64: 8, I16: 2, ir.HalfType(): 2}

#: An LLVM value: llvmlite has no types for them.
Value = Any

#: 2^f for |f| <= 1/2, highest power first: minimax polynomials of degree 6, exact at 0, with a
#: relative error of 2e-9 before rounding. For weights that are rounded to bf16, by half a unit of
#: 2e-3, degree 4 (2.8e-6) where their sum counts too, and 3 (7.7e-5, at 0 as well) where it does
#: not.
_EXP2 = {
    6: (
        0.00015353361959569156,
        0.0013398875016719103,
        0.00961843691766262,
        0.055503323674201965,
        0.24022647738456726,
        0.6931471824645996,
        1.0,
    ),
    4: (
        0.009582852944731712,
        0.055906426161527634,
        0.24024099111557007,
        0.6931241750717163,
        1.0,
    ),
    3: (0.05508868, 0.24260405, 0.69327624, 0.99992894),
}

#: (2^f − 1)/f for |f| <= 1/32, likewise (2e-9 of 2^f), and 2^(i/16).
_EXP2_LESS_1 = (0.05550595000386238, 0.24023428559303284, 0.6931471824645996)
_SIXTEENTHS = [2 ** (i / 16) for i in range(16)]

#: tanh(x)/x − 1 over x², for |x| <= 0.625, highest power first (the Cephes library's fit).
_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)
_TANH_SMALL = 0.625


class _BFloat(ir.Type):  # type: ignore[misc]
    """bf16, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


class Body:
    """A function under construction, and what can be done in it. Offsets count floats."""

    def __init__(self, module: ir.Module, machine: Machine, name: str, **arguments: ir.Type):
        kind = ir.FunctionType(ir.VoidType(), list(arguments.values()))
        function = ir.Function(module, kind, name)
        for value, label in zip(function.args, arguments, strict=True):
            value.name = label
            if isinstance(value.type, ir.PointerType):
                value.add_attribute("noalias")
        self.args = dict(zip(arguments, function.args, strict=True))
        self.machine, self.width = machine, machine.width
        self.build = ir.IRBuilder(function.append_basic_block())
        self.vector = ir.VectorType(F32, self.width)
        self.ints = ir.VectorType(I32, self.width)
        self.doubles = ir.VectorType(F64, self.width)
        self._room: Value = None

    # Memory.

    def at(self, pointer: Value, offset: int | Value, element: ir.Type = F32) -> Value:
        """The address so many elements on."""
        if isinstance(offset, int):
            if offset == 0:
                return pointer
            offset = ir.Constant(I64, offset)
        return self.build.gep(pointer, [offset], source_etype=element)

    def step(self, pointer: Value, index: Value, elements: int, element: ir.Type = F32) -> Value:
        """The address index · elements on."""
        return self.at(pointer, self.build.mul(index, ir.Constant(I64, elements)), element)

    def load(self, pointer: Value, offset: int | Value = 0, kind: ir.Type | None = None) -> Value:
        """A vector of floats, or of another kind; offset in its elements."""
        kind = kind or self.vector
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        where = self.at(pointer, offset, element)
        return self.build.load(where, align=_ALIGN.get(element, 4), typ=kind)

    def store(self, value: Value, pointer: Value, offset: int | Value = 0) -> None:
        """A vector; offset in its elements."""
        element = value.type.element
        self.build.store(value, self.at(pointer, offset, element), align=_ALIGN.get(element, 4))

    def make_room(self, count: int) -> None:
        """Memory for so many vectors of the function's own, aligned; once is enough."""
        if self._room is None:
            with self.build.goto_entry_block():
                self._room = self.build.alloca(self.vector, count)
                self._room.align = 4 * self.width

    def in_room(self, number: int) -> Value:
        """One of them, as it is now."""
        return self.build.load(self._vector_of_room(number), align=4 * self.width)

    def to_room(self, value: Value, number: int) -> None:
        """Set one of them."""
        self.build.store(value, self._vector_of_room(number), align=4 * self.width)

    def _vector_of_room(self, number: int) -> Value:
        return self.build.gep(self._room, [ir.Constant(I64, number)])

    def prefetch(self, pointer: Value, size: int = 1) -> None:
        """Have so many bytes read into the cache, line by line; they may lie anywhere."""
        options = [ir.Constant(I32, number) for number in (0, 3, 1)]
        for line in range(0, size, LINE):
            where = self.at(pointer, line, I8)
            self.intrinsic("llvm.prefetch.p0", ir.VoidType(), where, *options)

    def barrier(self) -> None:
        """LLVM moves no load and no store across it; the machine may."""
        nothing = ir.FunctionType(ir.VoidType(), [])
        self.build.call(ir.InlineAsm(nothing, "", "~{memory}", side_effect=True), [])

    # Vectors.

    def floats(self, x: float) -> Value:
        """x in every lane."""
        return ir.Constant(self.vector, [x] * self.width)

    def whole(self, numbers: Sequence[int]) -> Value:
        """Integers, one a lane."""
        return ir.Constant(self.ints, list(numbers))

    def splat(self, scalar: Value) -> Value:
        """A scalar in every lane."""
        kind = ir.VectorType(scalar.type, self.width)
        zero = ir.Constant(I32, 0)
        first = self.build.insert_element(ir.Constant(kind, ir.Undefined), scalar, zero)
        lanes = ir.Constant(self.ints, [0] * self.width)
        return self.build.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a·b + c, rounded once."""
        kind = a.type
        return self.intrinsic(f"llvm.fma.{_suffix(kind)}", kind, a, b, c)

    def larger(self, a: Value, b: Value) -> Value:
        """The larger of two; b where either is NaN, as the machine's own maximum."""
        return self.build.select(self.build.fcmp_ordered(">", a, b), a, b)

    def sum_of(self, x: Value) -> Value:
        """All lanes, in any order."""
        name = f"llvm.vector.reduce.fadd.{_suffix(x.type)}"
        zero = ir.Constant(F32, 0.0)
        return self.intrinsic(name, F32, zero, x, fastmath=("reassoc",))

    def largest_of(self, x: Value) -> Value:
        """The largest lane, NaN aside."""
        return self.intrinsic(f"llvm.vector.reduce.fmax.{_suffix(x.type)}", F32, x)

    def intrinsic(
        self, name: str, kind: ir.Type, *arguments: Value, fastmath: Sequence[str] = ()
    ) -> Value:
        """Call a function of LLVM's."""
        function = self.build.module.globals.get(name)
        if function is None:
            types = [argument.type for argument in arguments]
            function = ir.Function(self.build.module, ir.FunctionType(kind, types), name)
        return self.build.call(function, arguments, fastmath=fastmath)

    def loop(
        self,
        count: int | Value,
        carried: Sequence[Value],
        step: Callable[[Value, Sequence[Value]], Sequence[Value]],
        *,
        maybe_none: bool = False,
    ) -> list[Value]:
        """Do `step(index, values)` count times, at least once unless `maybe_none`; each gives the
        next one's values. What the last one gave."""
        build = self.build
        end = ir.Constant(I64, count) if isinstance(count, int) else count
        before, body = build.block, build.append_basic_block()
        after = build.append_basic_block()
        if maybe_none:
            build.cbranch(build.icmp_signed(">", end, ir.Constant(I64, 0)), body, after)
        else:
            build.branch(body)
        build.position_at_end(body)
        index = build.phi(I64)
        index.add_incoming(ir.Constant(I64, 0), before)
        phis = [build.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        last = list(step(index, list(phis)))
        following, inner = build.add(index, ir.Constant(I64, 1)), build.block
        index.add_incoming(following, inner)
        for phi, value in zip(phis, last, strict=True):
            phi.add_incoming(value, inner)
        build.cbranch(build.icmp_signed("<", following, end), body, after)
        build.position_at_end(after)
        if not maybe_none:
            return last
        results = [build.phi(value.type) for value in carried]
        for result, value, first in zip(results, last, carried, strict=True):
            result.add_incoming(value, inner)
            result.add_incoming(first, before)
        return results

    # Functions of one variable.

    def exp2(self, x: Value, *, degree: int = 6) -> Value:
        """2^x for x <= 127; 0 for x below −126, −inf among them. x = n + f with whole n and
        |f| <= 1/2, so 2^x is a polynomial in f whose exponent n is added to. With a `degree` of 4
        or 3, not 6, it is as exact as weights need be that are rounded to bf16 next."""
        build = self.build
        if self.machine.scalef:
            return self._exp2_scaled(x, degree)
        n = self.intrinsic(f"llvm.rint.{_suffix(self.vector)}", self.vector, x)
        power = self._polynomial(build.fsub(x, n), _EXP2[degree])
        exponent = build.shl(build.fptosi(n, self.ints), self.whole([23] * self.width))
        shifted = build.add(build.bitcast(power, self.ints), exponent)
        seen = build.fcmp_ordered(">=", x, self.floats(-126.0))
        return build.select(seen, build.bitcast(shifted, self.vector), self.floats(0.0))

    def _exp2_scaled(self, x: Value, degree: int) -> Value:
        """By AVX-512's scalef, whose 2^n also takes -inf, where the fraction is NaN: that gives 0.
        For degree 6 n is a multiple of 1/16, whose 2^n is looked up; so |f| <= 1/32, and another
        polynomial, of degree 3, will do: multiply-adds are what there is too little time for."""
        build, bits = self.build, 4 if degree == 6 else 0
        all_lanes, current = ir.Constant(I16, -1), ir.Constant(I32, 4)
        kept = ir.Constant(I32, bits << 4)
        name = "llvm.x86.avx512.mask.rndscale.ps.512"
        n = self.intrinsic(name, self.vector, x, kept, x, all_lanes, current)
        rest = build.fsub(x, n)
        if bits == 0:
            power = self._polynomial(rest, _EXP2[degree])
        else:
            # The sum's last bits count sixteenths.
            place = build.bitcast(build.fadd(n, self.floats(1.5 * 2 ** (23 - bits))), self.ints)
            table = ir.Constant(self.vector, _SIXTEENTHS)
            name = "llvm.x86.avx512.permvar.sf.512"
            root = self.intrinsic(name, self.vector, table, place)
            more = build.fmul(self._polynomial(rest, _EXP2_LESS_1), rest)
            power = self.fma(root, more, root)
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        return self.intrinsic(name, self.vector, power, n, power, all_lanes, current)

    def tanh(self, x: Value) -> Value:
        """A polynomial near 0, where 1 − 2/(e^2x + 1) would cancel; 3e-7 of the result."""
        build = self.build
        square = build.fmul(x, x)
        near = self.fma(build.fmul(self._polynomial(square, _TANH), square), x, x)
        size = self.intrinsic(f"llvm.fabs.{_suffix(self.vector)}", self.vector, x)
        # Beyond 10 tanh is 1 in float32; the limit keeps 2^ within its range.
        limited = build.select(
            build.fcmp_ordered("<", size, self.floats(10.0)), size, self.floats(10.0)
        )
        power = self.exp2(build.fmul(limited, self.floats(2 / math.log(2))))
        one = self.floats(1.0)
        far = build.fsub(one, build.fdiv(self.floats(2.0), build.fadd(power, one)))
        sign = self.intrinsic(f"llvm.copysign.{_suffix(self.vector)}", self.vector, far, x)
        close = build.fcmp_ordered("<", size, self.floats(_TANH_SMALL))
        return build.select(close, near, sign)

    def _polynomial(self, x: Value, powers: Sequence[float]) -> Value:
        total = self.floats(powers[0])
        for power in powers[1:]:
            total = self.fma(total, x, self.floats(power))
        return total

    # Pairs of bf16: 32 bits that hold two consecutive elements of a sum, the first one low.

    def dot(self, a: Value, b: Value, total: Value) -> Value:
        """total + a₀·b₀ + a₁·b₁ for pairs in 32-bit integers, in float32."""
        build = self.build
        if self.machine.pairs == "native":
            kind = ir.VectorType(_BFloat(), 2 * self.width)
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            a, b = build.bitcast(a, kind), build.bitcast(b, kind)
            return self.intrinsic(name, self.vector, total, a, b)
        total = self.fma(self._upper(a), self._upper(b), total)
        return self.fma(self._lower(a), self._lower(b), total)

    def pair(self, first: Value, second: Value) -> Value:
        """Two vectors rounded to bf16, lane by lane one pair."""
        build = self.build
        if self.machine.pairs == "native":
            kind = ir.VectorType(_BFloat(), 2 * self.width)
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            both = self.intrinsic(name, kind, second, first)
            order = [i // 2 + i % 2 * self.width for i in range(2 * self.width)]
            lanes = ir.Constant(ir.VectorType(I32, 2 * self.width), order)
            mixed = build.shuffle_vector(both, ir.Constant(kind, ir.Undefined), lanes)
            return build.bitcast(mixed, self.ints)
        low = build.lshr(self._rounded(first), self.whole([16] * self.width))
        return build.or_(low, build.and_(self._rounded(second), self.whole([-65536] * self.width)))

    def narrow(self, low: Value, high: Value) -> Value:
        """Two vectors rounded to bf16, one after the other: as many 32-bit integers."""
        build, twice = self.build, 2 * self.width
        if self.machine.pairs == "native":
            kind = ir.VectorType(_BFloat(), twice)
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            return build.bitcast(self.intrinsic(name, kind, high, low), self.ints)
        short = ir.VectorType(I16, self.width)
        shift = self.whole([16] * self.width)
        halves = [build.trunc(build.lshr(self._rounded(x), shift), short) for x in (low, high)]
        lanes = ir.Constant(ir.VectorType(I32, twice), list(range(twice)))
        return build.bitcast(build.shuffle_vector(*halves, lanes), self.ints)

    def _rounded(self, x: Value) -> Value:
        """The bits of x with bf16 in the upper half, rounded to nearest, ties to even."""
        build = self.build
        bits = build.bitcast(x, self.ints)
        odd = build.and_(
            build.lshr(bits, self.whole([16] * self.width)), self.whole([1] * self.width)
        )
        return build.add(bits, build.add(odd, self.whole([0x7FFF] * self.width)))

    def _upper(self, pair: Value) -> Value:
        masked = self.build.and_(pair, self.whole([-65536] * self.width))
        return self.build.bitcast(masked, self.vector)

    def _lower(self, pair: Value) -> Value:
        shifted = self.build.shl(pair, self.whole([16] * self.width))
        return self.build.bitcast(shifted, self.vector)


def _suffix(kind: ir.VectorType) -> str:
    return f"v{kind.count}{'f64' if kind.element == F64 else 'f32'}"
