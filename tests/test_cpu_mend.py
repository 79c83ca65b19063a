"""Large weights: noted, mended when the keys are through, and z beside them."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_support import (
    CASE,
    Function,
    backward,
    cpu,
    delta_of,
    forward,
    machine_of,
    pieces_of,
    seen_by,
)

import oracle
from ringrt_backends.cpu import backward_ir, compiled, disk, exact, forward_ir, mend_ir, tile
from ringrt_backends.cpu.compiled import KEYS
from ringrt_backends.cpu.sums import FEW, sums
from ringrt_backends.cpu.vectors import I64, PTR, Body

WIDTHS = ["4", "8", "8-low", "16"]


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("dim", [1, 3, 4, 21])
def test_a_note_s_large_weights_become_exact(name, dim):
    """However wrong the noted ones were: z and y change by what is missing, in the lanes whose
    weight is large, at the maxima of now."""
    machine, rng = machine_of(name), np.random.default_rng(dim)
    width, value_row, stride = machine.width, 3 * machine.width, 5 * machine.panel
    mend = Function(machine, lambda *m: mend_ir.mend(*m, depth=dim, value_row=value_row))
    k = rng.standard_normal(dim).astype(np.float32)
    q = rng.standard_normal((dim, machine.panel)).astype(np.float32)
    noted = rng.standard_normal(width).astype(np.float32)
    m = noted + rng.integers(0, 2, width)
    z = np.where(np.arange(width) % 3 == 0, 1e4, rng.uniform(1, 2, width))
    y = rng.standard_normal((width, value_row))
    v = rng.standard_normal((2, stride)).astype(np.float32)
    old = rng.uniform(0.2, 0.9, width).astype(np.float32)
    old[1] = 0  # masked: it was no weight
    scale, limit = np.float32(0.3), np.float32(1 / 50)
    since = np.exp2(noted - m)
    new = np.exp2(float(scale) * (k.astype(float) @ q[:, :width]) - noted)
    change = np.where(old * since > z * limit, (new - old) * since, 0)
    values = np.concatenate((v[0, : machine.panel], v[1, :width])).astype(float)
    want_z, want_y = z + change, y + change[:, None] * values
    assert (change != 0).any()
    assert (change == 0).any()
    note = np.concatenate((old, noted))
    mend(note, k, q, scale, m, z, y, v, stride, limit)
    np.testing.assert_allclose(z, want_z, rtol=1e-6)
    np.testing.assert_allclose(y, want_y, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("count", [1, FEW - 1, FEW, FEW + 1, 5 * FEW + 3])
def test_sums_of_weights(name, count):
    machine = machine_of(name)

    def emit(module, machine, name):
        body = Body(module, machine, name, x=PTR, n=I64, y=PTR)
        x = body.args["x"]
        totals = sums(
            body, body.args["n"],
            lambda i: [body.load(body.step(x, i, machine.panel), v * machine.width) for v in (0, 1)],
        )  # fmt: skip
        for v, total in enumerate(totals):
            body.store(total, body.args["y"], v * machine.width)
        body.build.ret_void()

    x = np.random.default_rng(count).integers(0, 99, (count, machine.panel)).astype(np.float32)
    y = np.zeros(machine.panel)
    Function(machine, emit)(x, count, y)
    np.testing.assert_array_equal(y, x.sum(axis=0, dtype=float))


@pytest.fixture
def crude(monkeypatch):
    """Scores, and dP − delta, are off by a hundredth, and so are weights and dS until they are
    mended."""

    def product(body, *operands, **how):
        rows = tile.product(body, *operands, **how)
        return [[body.build.fmul(x, body.floats(1.01)) for x in row] for row in rows]

    monkeypatch.setattr(forward_ir, "product", product)
    monkeypatch.setattr(backward_ir, "product", product)
    monkeypatch.setattr(disk, "load", lambda key: None)
    monkeypatch.setattr(disk, "store", lambda key, binary: None)
    for code in (compiled.forward_code, compiled.backward_code):
        code.cache_clear()
    yield
    for code in (compiled.forward_code, compiled.backward_code):
        code.cache_clear()


@pytest.fixture
def any_size(monkeypatch):
    """Large weights are mended whatever the size of the scores."""
    monkeypatch.setattr(exact, "SCORES", 0.0)


def errors_of(name, case, arrays):
    """The largest of out, and of the gradients relative to the largest of each."""
    made, x = cpu(machine_of(name)), arrays
    how = {"seen": seen_by(pieces_of(case), case.rows, case.keys), "scale": case.problem.scale}
    out, lse = oracle.attention(x.q, x.k, x.v, **how)
    wanted = oracle.gradients(x.dout, x.q, x.k, x.v, **how)[:3]
    errors = [abs(forward(made, case, x)[0] - out).max()]
    for got, want in zip(backward(made, case, x, lse, delta_of(x, out)), wanted, strict=True):
        errors.append(abs(got - want).max() / abs(want).max())
    made.close()
    return errors


def few_keys():
    """12 keys a row, or fewer, of like weights."""
    case = CASE.but(batch=2, rows=230, keys=230).banded(0, 11)
    arrays = case.arrays()
    arrays.q[...] *= 0.1
    return case, arrays


@pytest.mark.parametrize("name", WIDTHS)
def test_all_weights_of_rows_with_few_keys_are_mended(crude, any_size, name):
    """In every block of queries, panel and row, of every head and batch."""
    assert max(errors_of(name, *few_keys())) < 2e-6


def test_without_mending_the_test_before_fails(crude, any_size, monkeypatch):
    """Where all are taken for small."""
    monkeypatch.setattr(exact, "LARGE", 10.0)
    assert min(errors_of("8", *few_keys())) > 1e-4


@pytest.mark.parametrize("name", WIDTHS)
def test_more_notes_than_there_is_room_for(crude, any_size, name):
    """Every key has a large weight for a sixteenth of the queries, and those of a block are larger
    than all before: all are noted, and some must be mended before the end."""
    dim, blocks = 16, 7
    case = CASE.but(q_heads=1, kv_heads=1, head_dim=dim, rows=96, keys=blocks * KEYS)
    arrays, key = case.arrays(), np.arange(case.keys)
    unlike = np.random.default_rng(0).uniform(0, 0.25, case.keys)
    arrays.q[0, :, 0] = 8 * np.eye(dim)[np.arange(case.rows) % dim]
    arrays.k[0, :, 0] = (25 * (1 + key // KEYS) - unlike)[:, None] * np.eye(dim)[key % dim]
    assert errors_of(name, case, arrays)[0] < 2e-6


def test_the_smaller_the_scores_the_fewer_weights_are_large():
    """By the square of their size, and never less than 1/32 of a row's sum."""
    scale, limit = 0.18, exact.large_part.py_func
    factors = exact.part_factors(scale)
    for size, part in ((50, 1 / 32), (25, 4 / 32), (12.5, 16 / 32), (100, 1 / 32), (1e18, 1 / 32)):
        q, k = np.float32(4), np.float32(size / scale / 4)
        assert limit(*factors, q * q, k * k) == pytest.approx(part)
        assert limit(*factors, k * k, q * q) == pytest.approx(part)
    with np.errstate(divide="ignore"):
        assert limit(*factors, np.float32(0), np.float32(7)) == np.inf
    for other in (np.nan, np.inf):
        assert limit(*factors, np.float32(other), np.float32(1)) == np.float32(1 / 32)


#: Weights of a row relative to the largest, and q's length such that from 1/32, 1/4 or 1 of their
#: sum on they are large.
PARTS = np.array([1.0, 0.5, 0.125, 0.03])
LENGTHS = {1 / 32: 100.0, 1 / 4: 17.7, 1.0: 8.8}


def rows_of_known_weights(length):
    """One q row in the midst is so long, by a column that no key has, and all keys have the length
    1; the first few keys have all that counts of the weights."""
    case = CASE.but(q_heads=1, kv_heads=1, head_dim=8, value_dim=8, rows=300, keys=400)
    arrays, scale = case.arrays(), case.problem.scale / np.log(2)
    q, k = arrays.q[0, :, 0], arrays.k[0, :, 0]
    q[...], k[...] = 0, 0
    q[:, 0] = 5.9 / scale
    q[150, 7] = np.sqrt(max(0, (length / scale) ** 2 - q[150, 0] ** 2))
    k[:, 0] = -0.98
    k[: len(PARTS), 0] = 0.9 + np.log2(PARTS) / 5.9
    k[:, 6] = np.sqrt(1 - k[:, 0] ** 2)
    return case, arrays


def partly_crude(scores, limit):
    """Weights of scores in powers of 2 that are exact where they are large, and lse."""
    weights = np.exp2(scores)
    large = weights > limit * weights.sum(axis=1, keepdims=True)
    weights = np.where(large, weights, np.exp2(1.01 * scores))
    return weights, np.log(weights.sum(axis=1))


@pytest.mark.parametrize("limit", LENGTHS, ids=str)
def test_both_passes_mend_the_same_weights(crude, limit):
    """By the longest rows of q and k, wherever they are. Beside them a row's error is seen."""
    case, x = rows_of_known_weights(LENGTHS[limit])
    scores = (x.q[0, :, 0].astype(float) @ x.k[0, :, 0].T) * case.problem.scale / np.log(2)
    weights, lse = partly_crude(scores, limit)
    p = weights / weights.sum(axis=1, keepdims=True)
    made = cpu(machine_of("8"))
    got_out, got_lse = forward(made, case, x)
    np.testing.assert_allclose(got_lse[0, 0], lse, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got_out[0, :, 0], p @ x.v[0, :, 0], rtol=0, atol=1e-5)
    grads = backward(made, case, x, lse[None, None], delta_of(x, got_out))
    want = p.T @ x.dout[0, :, 0].astype(float)
    np.testing.assert_allclose(grads[2][0, :, 0], want, rtol=0, atol=1e-4)
    assert abs(p - np.exp2(scores) / np.exp2(scores).sum(axis=1, keepdims=True)).max() > 1e-3
    made.close()


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("rows", [FEW + 3, 5 * FEW])
def test_small_weights_beside_a_large_one_are_not_lost(name, rows):
    """One weight of 1, and others of 2^-26, of which a float32 sum with the large one has none: z
    has them all."""
    machine, large = machine_of(name), FEW - 2
    soft = Function(
        machine,
        lambda *module: forward_ir.soft(*module, s_row=machine.panel, capped=False, pairs=False),
    )
    s = np.full((rows, machine.panel), -26, np.float32)
    s[large] = 0
    top, alpha = np.zeros(machine.panel, np.float32), np.zeros(machine.panel, np.float32)
    m, z = np.full(machine.panel, -np.inf), np.zeros(machine.panel)
    notes, marks = np.zeros((rows, 2, 2 * machine.width), np.float32), np.zeros(99, np.int64)
    limit = np.float32(1 / 2)
    soft(s, s, rows, np.float32(1), top, m, z, alpha, notes, marks, 1000, 50, limit)
    np.testing.assert_array_equal(z, 1 + (rows - 1) * 2.0**-26)
    assert marks[0] == 2
    keys_and_queries = [1000 + large, 50, 1000 + large, 50 + machine.width]
    np.testing.assert_array_equal(marks[1:5], keys_and_queries)
    np.testing.assert_array_equal(notes[0, :, : machine.width].ravel()[: machine.width], 1)
