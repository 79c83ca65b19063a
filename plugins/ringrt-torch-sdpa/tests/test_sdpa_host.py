"""`torch-sdpa`: what the conformance suite does not look for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ringrt_torch_sdpa.host import STRIP, HostSdpa
from sdpa_support import INF, backward, close, exact, forward, inputs, problem_of, tile_of

import ringrt
from ringrt.plan.bands import shape_of


@pytest.mark.parametrize("upper", [0, 5, STRIP - 1])
@pytest.mark.parametrize("lower", [0, -7])
def test_narrow_windows_are_masked_strips(lower, upper):
    arrays = inputs(2 * STRIP + 9, dtype="float64")
    problem, tile = problem_of(arrays[0], arrays[2]), tile_of(*arrays[:2], lower, upper)
    backend = HostSdpa()
    parts = backend.parts(tile, problem)
    if upper - lower < STRIP:
        assert len(parts) == 3
        assert "band" in {shape_of(part) for part in parts}
    result = forward(backend, *arrays[:3], problem, [tile])
    want = exact(arrays, tile)
    close((*result, *backward(backend, arrays, result, problem, [tile])), want, 1e-12)


def test_wide_windows_are_squares():
    arrays = inputs(3 * STRIP, dtype="float64")
    problem, tile = problem_of(arrays[0], arrays[2]), tile_of(*arrays[:2], 0, STRIP)
    backend = HostSdpa()
    shapes = {shape_of(part) for part in backend.parts(tile, problem)}
    assert {"causal", "flipped"} <= shapes <= {"causal", "flipped", "full"}
    result = forward(backend, *arrays[:3], problem, [tile])
    want = exact(arrays, tile)
    close((*result, *backward(backend, arrays, result, problem, [tile])), want, 1e-12)


def test_any_number_of_squares_is_worth_it():
    q, k, v, _ = inputs(1)
    tile = tile_of(q, k)._replace(q1=1 << 21, k1=1 << 21, lower=0, upper=STRIP)
    assert len(list(HostSdpa().parts(tile, problem_of(q, v)))) > 1 << 14


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_computed_in_32(dtype):
    """The kernel's own 16 bits are off by more than 1e-5 in lse, from 300 keys on."""
    arrays = inputs(300, 600, dtype)
    problem, tile = problem_of(arrays[0], arrays[2]), tile_of(*arrays[:2])
    out, lse = forward(HostSdpa(), *arrays[:3], problem, [tile])
    want_out, want_lse, *_ = exact(arrays, tile)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=2e-6)
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    excess = abs(out.astype(np.float64) - want_out) - unit * abs(want_out)
    assert excess.max() < 1e-6, "rounded once, at the end"


def test_the_error_does_not_grow_with_ranks(host):
    q, k, v, _ = inputs(256, dtype="bfloat16")
    whole = exact((q, k, v, v.repeat(2, axis=2)), tile_of(q, k, lower=0))[0]
    errors = {}
    for ranks in (1, 8):
        out, _ = ringrt.attention(q, k, v, ranks=ranks, causal=True, backend=host)
        errors[ranks] = abs(out.astype(np.float64) - whole).max()
    assert errors[8] <= 1.25 * errors[1]


def rows_of(q, k, v):
    problem = problem_of(q, v)
    return forward(HostSdpa(), q, k, v, problem, [tile_of(q, k)])


def test_a_row_of_endless_scores_is_empty():
    """Of which the kernel says lse 0, as of a single score of 0."""
    q, k, v, _ = inputs(6, 5)
    q[:], k[:] = 1, -INF
    out, lse = rows_of(q, k, v)
    assert np.isneginf(lse).all()
    assert (out == 0).all()
    # Two halves of a row, one of them empty: the other decides.
    k[:, 3:] = 1
    state = HostSdpa().begin(q, problem := problem_of(q, v))
    full = tile_of(q, k[:, :3])
    for keys in (slice(0, 3), slice(3, 5)):
        tile = full._replace(k1=keys.stop - keys.start)
        HostSdpa().accumulate(state, k[:, keys], v[:, keys], [tile])
    out, lse = HostSdpa().finish(state)
    assert problem.kv_length == 5
    np.testing.assert_allclose(lse, 4 + np.log(2), rtol=1e-6)


def test_a_row_whose_scores_are_too_large_for_float32_is_empty():
    q, k, v, _ = inputs(6, 5)
    q[:], k[:] = 1e20, -1e20
    assert np.isneginf(rows_of(q, k, v)[1]).all()


def test_a_score_of_0_beside_endless_ones_is_one():
    q, k, v, _ = inputs(6, 5)
    q[:], k[:] = 1, -INF
    k[:, 3] = 0
    out, lse = rows_of(q, k, v)
    assert (lse == 0).all()
    np.testing.assert_array_equal(out, np.repeat(v[:, 3:4], 2, axis=2).repeat(6, axis=1))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_score_of_0_is_one(value):
    """Of rows of zeros, as padding makes them, with one key."""
    q, k, v, _ = inputs(6, 1)
    q[:], v[:] = 0, value
    out, lse = rows_of(q, k, v)
    assert (lse == 0).all()
    assert (out == value).all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_that_the_kernel_does_not_do(scale):
    """It masks first and scales then: −inf · 0 is not a number, −inf · −0.5 is +inf."""
    arrays = inputs(20, dtype="float64")
    problem, tile = problem_of(arrays[0], arrays[2], scale), tile_of(*arrays[:2], 0)
    q = torch.zeros(1, 1, 2, 8)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert kernel(q, q, q, is_causal=True, scale=scale)[1].isnan().any()
    result = forward(HostSdpa(), *arrays[:3], problem, [tile])
    want = exact(arrays, tile, scale)
    close((*result, *backward(HostSdpa(), arrays, result, problem, [tile])), want, 1e-12)


def test_elements_that_do_not_lie_side_by_side_are_copied():
    """The kernel would read others, without a word."""
    arrays = inputs(20, dtype="float64", dims=(32, 32))
    every_second = [x[..., ::2] for x in arrays]
    tensor = torch.from_numpy(arrays[0]).transpose(1, 2)[..., ::2]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    other, _ = kernel(tensor, tensor, tensor)
    right, _ = kernel(*[tensor.contiguous()] * 3)
    assert (other - right).abs().max() > 0.1
    problem, tile = problem_of(every_second[0], every_second[2]), tile_of(*arrays[:2], 0)
    result = forward(HostSdpa(), *every_second[:3], problem, [tile])
    got = *result, *backward(HostSdpa(), every_second, result, problem, [tile])
    close(got, exact(every_second, tile), 1e-12)


def test_it_refuses_a_softcap_and_nothing_else():
    q, _, v, _ = inputs(4, dtype="float64", dims=(300, 7))
    assert HostSdpa().supports(problem_of(q, v)) is None
    assert HostSdpa().supports(problem_of(q, v, softcap=2.0)) == "softcap is not implemented"


def test_it_uses_its_ranks_threads():
    before = torch.get_num_threads()
    with HostSdpa(before + 2).arrays.running(None):
        assert torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before
