"""The pieces that the compiled kernels are put together from, called by themselves."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from cpu_support import (
    CASE,
    NAMES,
    PAIRS,
    Function,
    assert_gradients,
    backward,
    cpu,
    expected,
    expected_gradients,
    forward,
    machine_of,
)
from hypothesis import given, settings, strategies as st
from llvmlite import ir

from ringrt_backends.cpu import memory, spans, tiled_backward, tiled_forward
from ringrt_backends.cpu.tile import Ahead, add_product
from ringrt_backends.cpu.vectors import F32, F64, I16, I32, PTR, Body
from support import assert_close


def of_one_variable(machine, operation):
    """A function of a vector, applied to many numbers."""

    def emit(module, machine, name):
        body = Body(module, machine, name, x=PTR, y=PTR)
        body.store(operation(body, body.load(body.args["x"])), body.args["y"])
        body.build.ret_void()

    function = Function(machine, emit)

    def apply(numbers):
        padded = np.zeros(-(-len(numbers) // machine.width) * machine.width, np.float32)
        padded[: len(numbers)] = numbers
        y = np.empty_like(padded)
        for at in range(0, len(padded), machine.width):
            function(padded[at:], y[at:])
        return y[: len(numbers)]

    return apply


# Functions of one variable.


@pytest.mark.parametrize("name", ["4", "8", "16"])
@pytest.mark.parametrize(("degree", "bound"), [(6, 1.5e-7), (4, 3e-6), (3, 8e-5)])
def test_powers_of_two(name, degree, bound):
    exp2 = of_one_variable(machine_of(name), lambda body, x: body.exp2(x, degree=degree))
    # Just below 2^-126 floats have no more than 23 bits.
    lowest = -126 if degree > 3 else -125
    x = np.concatenate((np.linspace(lowest, 127, 5000), np.linspace(-1, 1, 999)))
    x = x.astype(np.float32)
    exact = np.exp2(x.astype(float))
    assert (abs(exp2(x) - exact) / exact).max() <= bound
    whole = np.arange(-126, 128, dtype=np.float32)
    if degree > 3:
        np.testing.assert_array_equal(exp2(whole), np.ldexp(np.float32(1), whole.astype(int)))
    small = np.array([-126.5, -127, -150, -1e4, -3e38, -np.inf], np.float32)
    assert exp2(small).max() <= 2.0**-126
    np.testing.assert_array_equal(exp2(small[1:]), 0)


@pytest.mark.parametrize("name", ["4", "8", "16"])
def test_tanh(name):
    tanh = of_one_variable(machine_of(name), lambda body, x: body.tanh(x))
    x = np.concatenate((np.linspace(-12, 12, 5001), np.geomspace(1e-30, 1, 1000), [0.625, -0.625]))
    x = x.astype(np.float32)
    exact = np.tanh(x.astype(float))
    assert (abs(tanh(x) - exact) <= 3.5e-7 * abs(exact)).all()
    large = np.array([10, 1e3, 3e38, np.inf, -10, -1e3, -3e38, -np.inf], np.float32)
    np.testing.assert_array_equal(tanh(large), [1] * 4 + [-1] * 4)


# Products.


def packed_pairs(x):
    """fp32 numbers along the last axis, as pairs of bf16."""
    narrow = np.ascontiguousarray(x.astype(ml_dtypes.bfloat16))
    return narrow.view(np.uint32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products(name, vectors, scaled, dtype):
    """Rows and columns of A, whole panels and half ones, around the lengths of chunks, and of the
    last few, before which a tile asks for its C."""
    machine = machine_of(name)
    pairs, rows, ld = machine.pairs != "", machine.rows, 140
    rng = np.random.default_rng(0)
    for a_row, a_step in ((ld, 1), (1, rows + 3)):
        function = Function(
            machine,
            lambda module, machine, name, a_row=a_row, a_step=a_step: add_product(
                module, machine, name, a_row=a_row, a_step=a_step, c_row=machine.panel + 2,
                vectors=vectors, sums=F32 if dtype == "float32" else F64, scaled=scaled,
                pairs=pairs, later_step=8,
            ),
        )  # fmt: skip
        for depth in (1, 2, 11, 12, 13, 33, 64, 96, 107, 108, 130):
            each = 2 if pairs else 1
            wide_a = rng.integers(-8, 8, (rows, depth, each)).astype(np.float32)
            wide_b = rng.integers(-8, 8, (depth, machine.panel, each)).astype(np.float32)
            pack = packed_pairs if pairs else lambda x: x.view(np.uint32)
            a = np.zeros((rows, ld) if a_step == 1 else (depth, rows + 3), np.uint32)
            given = pack(wide_a)[..., 0]
            a[:, :depth] = given if a_step == 1 else a[:, :depth]
            if a_step != 1:
                a[:, :rows] = given.T
            b = np.ascontiguousarray(pack(wide_b)[..., 0])
            c = rng.integers(-8, 8, (rows, machine.panel + 2)).astype(dtype)
            factor = rng.integers(-8, 8, rows).astype(np.float32)
            want, width = c.copy(), vectors * machine.width
            product = np.einsum("rke,kce->rc", wide_a, wide_b)[:, :width]
            want[:, :width] = want[:, :width] * (factor[:, None] if scaled else 1) + product
            function(a, b, c, depth, b, *([factor] if scaled else []))
            np.testing.assert_array_equal(c, want)


def test_pairs_are_rounded_to_nearest_even():
    def emit(module, machine, name):
        body = Body(module, machine, name, x=PTR, y=PTR, pairs=PTR, rows=PTR)
        x, y = body.load(body.args["x"]), body.load(body.args["y"])
        body.store(body.pair(x, y), body.args["pairs"])
        body.store(body.narrow(x, y), body.args["rows"])
        body.build.ret_void()

    function, width = Function(PAIRS, emit), PAIRS.width
    x = np.random.default_rng(0).standard_normal((2, width)).astype(np.float32)
    x[:, :2] = 1 + 2**-8, 1 + 3 * 2**-8
    pairs, rows = np.empty(2 * width, ml_dtypes.bfloat16), np.empty(2 * width, ml_dtypes.bfloat16)
    function(x[0], x[1], pairs, rows)
    want = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(pairs, want.T.reshape(-1))
    np.testing.assert_array_equal(rows, want.reshape(-1))
    assert (ir.FloatType(), ir.IntType(16), ir.IntType(32)) == (F32, I16, I32)


@given(st.integers(0, 8), st.integers(1, 64), st.integers(1, 24), st.integers(1, 5))
def test_every_line_is_read_ahead_once(first, a_step, steps, chunks):
    """Wherever in a line the first byte is."""
    asked, first = [], 8 * first
    for start in range(0, steps * chunks, steps):
        for number in range(steps):
            line = Ahead(None, a_step).due(number, steps)
            if line is not None:
                asked.append(first + (start + number) * a_step + line)
    needed = {at // 64 for at in range(first, first + steps * chunks * a_step)}
    found = [at // 64 for at in asked]
    # The last line of a chunk is the first of the next; that of all may be begun and not asked for.
    assert needed - set(found) <= {max(needed)}
    assert len(found) <= -(-steps * a_step // 64) * chunks


# Spans of keys.


#: Tiles of 6 keys by 8 queries, and blocks of 24.
SMALL = SimpleNamespace(rows=6, panel=8)


def set_spans(*arguments):
    """Without compiling: the spans of 24 queries, and their ends."""
    found = spans.spans_of(24, SMALL)
    python = {name: getattr(spans, name).py_func for name in ("_set_groups", "_set_panels")}
    with patch.multiple(spans, **python):
        return found, spans.set_spans.py_func(*arguments, SMALL, found)


@settings(max_examples=200)
@given(st.data())
def test_spans(data):
    """What each query of a block sees of a band tile, by its definition."""
    row0, key0 = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40))
    rows, keys = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    lower, upper = (data.draw(st.integers(-50, 50)) for _ in range(2))
    q0, from_key = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 60))
    to_key = from_key + data.draw(st.integers(1, 60))
    tile = np.array([row0, row0 + rows, key0, key0 + keys, lower, upper])
    found, (low, high) = set_spans(tile, q0, from_key, to_key)
    first, last = found.first, found.last
    seen = []
    for i in range(24):
        mine = [
            j - from_key for j in range(max(key0, from_key), min(key0 + keys, to_key))
            if row0 <= q0 + i < row0 + rows and lower <= q0 + i - row0 - (j - key0) <= upper
        ]  # fmt: skip
        if mine:
            assert (first[i], last[i]) == (mine[0], mine[-1] + 1)
        else:
            assert (first[i], last[i]) == (spans.NEVER, -spans.NEVER)
        seen += mine
    assert (low >= high) if not seen else (low, high) == (min(seen), max(seen) + 1)


@settings(max_examples=200)
@given(st.integers(-30, 30), st.integers(0, 40), st.integers(0, 40), st.integers(0, 30))
def test_panels(lower, width, begin, size):
    """Scores are computed of what any query sees whose group touches the panel, from the first key
    of a tile on; no query of it is masked in what all see in full."""
    tile = np.array([2, 21, 3, 50, lower, lower + width])
    found, (low, high) = set_spans(tile, 0, 0, 60)
    if low >= high:
        return
    end = begin + size
    for panel in range(3):
        touching = range(panel * 8 // 6 * 6, -(-(panel * 8 + 8) // 6) * 6)
        keys = {j for i in touching for j in range(found.first[i], found.last[i])}
        bottom, top = spans.panel_range.py_func(panel, 6, found, begin, end)
        needed = {j for j in keys if begin <= j < end}
        assert needed <= set(range(bottom, top))
        assert (bottom - begin) % 6 == 0
        assert not needed or (bottom > min(needed) - 6 and top == max(needed) + 1)
        own = range(panel * 8, panel * 8 + 8)
        full = [j for j in range(60) if all(found.first[i] <= j < found.last[i] for i in own)]
        assert full == list(range(found.full_from[panel], found.full_to[panel]))


@settings(max_examples=200)
@given(st.integers(0, 300), st.integers(0, 50), st.sampled_from([4, 6, 12]), st.integers(0, 400), st.integers(0, 400))  # fmt: skip
def test_runs(first, count, rows, full_from, full_to):
    """The groups in the middle are seen in full, and as many as there are."""
    panels = SimpleNamespace(full_from=[full_from], full_to=[full_to])
    a, b = spans.runs.py_func(0, first, count, rows, panels)
    assert 0 <= a <= b <= count
    full = [
        group for group in range(count)
        if full_from <= first + group * rows and first + (group + 1) * rows <= full_to
    ]  # fmt: skip
    assert list(range(a, b)) == full or (a == b and not full)


# Memory that passes hand on.


def test_memory_is_handed_on():
    kept = memory.Memory()

    class Owner:
        pass

    owner, array = Owner(), kept.take((3, 5), np.float64)
    array[...] = 4
    address = array.ctypes.data
    kept.give_back_with(owner, [array])
    assert kept.take((3, 5), np.float64).ctypes.data != address, "its owner lives"
    del owner
    again = kept.take((5, 6), np.uint32)
    assert again.ctypes.data == address, "as many bytes"
    assert kept.take((5, 6), np.uint32).ctypes.data != address


def test_memory_does_not_pile_up(monkeypatch):
    monkeypatch.setattr(memory, "_KEPT", 1000)
    kept = memory.Memory()
    for size in range(1, 40):
        owner = type("Owner", (), {})()
        kept.give_back_with(owner, [kept.take((size, 100), np.uint8)])
        del owner
    assert sum(block.nbytes for block in kept._kept) <= 1000


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_in_fresh_memory(name, monkeypatch):
    """NaN in all that is not set when it is made."""

    def poisoned(shape, dtype=float):
        array = np.zeros(shape, dtype)
        array.view(np.uint8)[...] = 0xFF
        return array

    class Poisoning:
        def __getattr__(self, name):
            return poisoned if name == "empty" else getattr(np, name)

    for module in (memory, tiled_forward, tiled_backward):
        monkeypatch.setattr(module, "np", Poisoning())
    dtype = "bfloat16" if name == "pairs" else "float32"
    base = CASE.but(dtype=dtype, head_dim=6, value_dim=4)
    cases = (
        base.causal(),
        base.banded(30, 60),
        base.but(q_heads=8, kv_heads=8, edges=(33, 34)).causal(),
        base.but(rows=31, keys=7, softcap=2.0),
        base.but(rows=290, keys=301).banded(-7, 100),
        # Whole blocks of queries that see nothing.
        base.but(rows=600, keys=40, q_heads=8, kv_heads=8).banded(None, 10),
        base.but(pieces=()),
    )
    for case in cases:
        made = cpu(machine_of(name), 2)
        out, lse = forward(made, case)
        if name == "pairs":
            np.testing.assert_allclose(out.astype(float), expected(case)[0], rtol=0, atol=0.04)
            assert_gradients(backward(made, case), expected_gradients(case), 0.03)
        else:
            assert_close((out, lse), expected(case))
            assert_gradients(backward(made, case), expected_gradients(case))
        made.close()
