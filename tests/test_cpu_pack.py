"""Packing: rows of every dtype laid out as the register tile reads them, and rounded at the end."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cpu_support import NAMES, Function, machine_of

from ringrt_backends.cpu import compiled, pack_ir
from ringrt_backends.cpu.vectors import F32, F64
from support import numpy_dtype


def magnitude(x):
    return np.max(abs(x.astype(np.float32)), initial=0)


def longest(x):
    """The square of the longest row."""
    return np.max(np.square(x.astype(np.float32)).sum(axis=1), initial=0)


def assert_size(size, x, lengths):
    """Lengths are asked for where weights may be mended."""
    assert size[0] == magnitude(x)
    np.testing.assert_allclose(size[1], longest(x) if lengths else 0, rtol=1e-6)


def shapes(name):
    for dtype in ("float32", "float16", "bfloat16"):
        for dim in (1, 2, 3, 8, 17, 40):
            machine = machine_of(name)
            yield dtype, dim, compiled.in_pairs(machine, dim, dim, dtype), machine


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("emit", [pack_ir.rows, pack_ir.rows_in_place])
@pytest.mark.parametrize("count", [1, 3, 4, 12, 14])
def test_rows_as_operand_a(name, emit, count):
    """Nothing is written beyond the last one; a size is only ever raised."""
    rng = np.random.default_rng(0)
    for dtype, dim, pairs, machine in shapes(name):
        kind = {"dim": dim, "dtype": dtype, "pairs": pairs}
        function = Function(machine, lambda *module, kind=kind: emit(*module, **kind))
        x = rng.standard_normal((count, dim + 3)).astype(numpy_dtype(dtype))
        depth = dim // 2 if pairs else dim
        target, size = np.full((count + 1, depth), 7, np.uint32), np.zeros(2, np.float32)
        placed = emit is pack_ir.rows_in_place
        place = rng.permutation(depth) if placed else np.arange(depth)
        places = (place,) if placed else ()
        function(x, x.strides[0], count, target, *places, size)
        wide = np.ascontiguousarray(x[:, :dim])
        want = wide.view(np.uint32) if pairs else wide.astype(np.float32).view(np.uint32)
        np.testing.assert_array_equal(target[:count, place], want)
        np.testing.assert_array_equal(target[count], 7)
        assert_size(size, x[:, :dim], lengths=placed and not pairs)
        before = size.copy()
        function(x[:1] * 0, x.strides[0], 1, target, *places, size)
        np.testing.assert_array_equal(size, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_rows_as_panels(name, count):
    """Of pairs of rows a second one that is not there is 0, whatever was there."""
    rng = np.random.default_rng(0)
    for dtype, dim, pairs, machine in shapes(name):
        kind = {"dim": dim, "dtype": dtype, "pairs": pairs}
        function = Function(machine, lambda *module, kind=kind: pack_ir.columns(*module, **kind))
        x = rng.standard_normal((10, dim + 1)).astype(numpy_dtype(dtype))
        panels = -(-dim // machine.panel)
        target, size = np.full((panels, 12, machine.panel), 7, np.uint32), np.zeros(2, np.float32)
        function(x, x.strides[0], count, target, 12 * machine.panel, size)
        wide = np.zeros((count + count % 2, panels * machine.panel), np.float32)
        wide[:count, :dim] = x[:count, :dim].astype(np.float32)
        if pairs:
            both = np.stack((wide[::2], wide[1::2]), -1).astype(ml_dtypes.bfloat16)
            want = both.view(np.uint32)[..., 0]
        else:
            want = wide[:count].view(np.uint32)
        got = target.transpose(1, 0, 2).reshape(12, -1)
        np.testing.assert_array_equal(got[: len(want), :dim], want[:, :dim])
        np.testing.assert_array_equal(got[len(want) :], 7)
        np.testing.assert_array_equal(size, (magnitude(x[:count, :dim]), 0))


@pytest.mark.parametrize("name", NAMES)
def test_rows_turned(name):
    """Rows beyond the last are 0, also where signs are flipped."""
    rng = np.random.default_rng(0)
    for dtype, dim, pairs, machine in shapes(name):
        kind = {"dim": dim, "dtype": dtype, "pairs": pairs}
        function = Function(machine, lambda *module, kind=kind: pack_ir.turned(*module, **kind))
        x = rng.standard_normal((machine.panel, dim + 2)).astype(numpy_dtype(dtype))
        depth = dim // 2 if pairs else dim
        for count in (1, machine.width, machine.panel - 1, machine.panel):
            for flip in (np.uint32(0), np.uint32(0x80008000 if pairs else 0x80000000)):
                place, size = rng.permutation(depth), np.zeros(2, np.float32)
                target = np.full((depth, machine.panel), 7, np.uint32)
                function(x, x.strides[0], count, target, place, flip, size)
                wide = np.ascontiguousarray(-x[:count, :dim] if flip else x[:count, :dim])
                want = wide.view(np.uint32) if pairs else wide.astype(np.float32).view(np.uint32)
                np.testing.assert_array_equal(target[place, :count], want.T)
                np.testing.assert_array_equal(target[:, count:], 0)
                assert_size(size, x[:count, :dim], lengths=not pairs)


@pytest.mark.parametrize("name", ["4", "8", "16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_peaks_are_of_every_element(name, bad):
    """Also of the last ones of a row, and of one that the padding begins after."""
    machine, dim = machine_of(name), 19
    for dtype in ("float32", "bfloat16"):
        for place in range(dim):
            x = np.zeros((5, dim), numpy_dtype(dtype))
            x[4, place] = bad
            wanted = np.abs(x[4, place].astype(np.float32)).view(np.uint32) & np.uint32(0x7FFFFFFF)
            for number, emit in enumerate(PACKING[name, dtype]):
                size, target = np.zeros(2, np.float32), np.zeros((40, 64), np.uint32)
                rest = {
                    0: (),
                    1: (np.arange(dim),),
                    2: (20 * machine.panel,),
                    3: (np.arange(dim), np.uint32(0)),
                }
                emit(x, x.strides[0], 5, target, *rest[number], size)
                assert size.view(np.uint32)[0] == wanted


class _Packing(dict):
    """Compiled when asked for."""

    def __missing__(self, key):
        name, dtype = key
        kind = {"dim": 19, "dtype": dtype, "pairs": False}
        self[key] = [
            Function(machine_of(name), lambda *module, emit=emit: emit(*module, **kind))
            for emit in (pack_ir.rows, pack_ir.rows_in_place, pack_ir.columns, pack_ir.turned)
        ]
        return self[key]


PACKING = _Packing()

#: What is added up over blocks, by the dtype's name.
SUMS = {"float64": F64, "float32": F32}


@pytest.mark.parametrize("name", ["4", "8", "16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_narrow_number_is_widened_and_rounded(name, dtype):
    """All 65536 of them, there and back."""
    machine, kind = machine_of(name), {"dim": 64, "dtype": dtype}
    x = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype)).reshape(1024, 64)
    rows = Function(machine, lambda *module: pack_ir.rows(*module, **kind, pairs=False))
    wide, size = np.empty((1024, 64), np.float32), np.zeros(2, np.float32)
    rows(x, x.strides[0], 1024, wide, size)
    np.testing.assert_array_equal(wide, x.astype(np.float32))
    assert np.isnan(size[0])
    rounded = Function(machine, lambda *module: pack_ir.rounded(*module, **kind, sums=F64))
    out = np.empty_like(x)
    # NaN of any kind is widened to a double without a word.
    exact = np.empty((1024, 64))
    with np.errstate(invalid="ignore"):
        exact[...] = wide
    for row in range(1024):
        rounded(exact[row], out[row], 1.0)
    np.testing.assert_array_equal(out.astype(np.float32), x.astype(np.float32))


@pytest.mark.parametrize("name", ["4", "8", "16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dim", [1, 7, 16, 37])
@pytest.mark.parametrize("sums", SUMS)
def test_rounding(name, dtype, dim, sums):
    """To nearest, ties to even; what is too large is inf."""
    kind = {"dim": dim, "dtype": dtype, "sums": SUMS[sums]}
    rounded = Function(machine_of(name), lambda *module: pack_ir.rounded(*module, **kind))
    rng = np.random.default_rng(0)
    some = np.concatenate((rng.standard_normal(500), [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1e39, -1e39, 7e4, np.inf, np.nan, 0.0, -0.0]))  # fmt: skip
    with np.errstate(over="ignore"):
        some = some.astype(sums)
    for row in np.resize(some, (-(-len(some) // dim), dim)):
        out = np.empty(dim, numpy_dtype(dtype))
        rounded(np.ascontiguousarray(row), out, 0.5)
        with np.errstate(over="ignore"):
            want = (row.astype(float) * 0.5).astype(np.float32).astype(numpy_dtype(dtype))
        np.testing.assert_array_equal(out.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [1, 3, 8, 17, 40])
@pytest.mark.parametrize("sums", SUMS)
def test_rows_are_added_to_those_of_float32(name, dim, sums):
    """Rows of one head among those of others, which stay as they are."""
    machine, rng = machine_of(name), np.random.default_rng(dim)
    row = -(-dim // machine.width) * machine.width
    kind = {"dim": dim, "row": row, "sums": SUMS[sums]}
    added = Function(machine, lambda *module: pack_ir.added(*module, **kind))
    source = rng.standard_normal((9, row)).astype(sums)
    target = rng.standard_normal((9, 3, dim)).astype(np.float32)
    want = target.copy()
    want[:7, 1] = want[:7, 1].astype(float) + 0.3 * source[:7, :dim].astype(float)
    added(source, target[:, 1], target.strides[0], 7, 0.3)
    np.testing.assert_allclose(target, want, rtol=1.2e-7)
