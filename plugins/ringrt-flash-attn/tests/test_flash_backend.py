"""Blocks as the backend hands them over, and what it makes of the results."""

from __future__ import annotations

import flash_attention32
import flash_standins
import numpy as np
import pytest
import torch
from flash_support import problem, tiles
from ringrt_flash_attn import warm

from ringrt.errors import Unsupported
from ringrt.plan import Mask
from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.tiles import Tile

VERSIONS = [2, 3, 4]
WHOLE = Tile(0, 8, 0, 8, -UNBOUNDED, UNBOUNDED)


def inputs(asked, rows=8, keys=8):
    """q, k and v of normal numbers."""
    torch.manual_seed(rows + keys)
    dtype = getattr(torch, asked.dtype)
    heads = (rows, asked.q_heads, asked.head_dim), (keys, asked.kv_heads, asked.head_dim)
    shapes = (*heads, (keys, asked.kv_heads, asked.value_dim))
    return [torch.randn(asked.batch, *shape).to(dtype) for shape in shapes]


def exact(asked, q, k, v, seen):
    """out and lse in float64; rows see at least one key."""
    group = asked.group
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * asked.scale
    if asked.softcap:
        scores = asked.softcap * torch.tanh(scores / asked.softcap)
    scores = scores.masked_fill(~torch.as_tensor(seen), -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1)


def gradients(asked, tensors, dout, seen):
    """dq, dk and dv by PyTorch's autograd in float64."""
    wide = [x.double().requires_grad_() for x in tensors]
    out, _ = exact(asked, *wide, seen)
    return torch.autograd.grad(out, wide, dout.double())


def close(got, want, unit=2.0**-8):
    """Within a few roundings of 16 bits."""
    scale = want.abs().max().clamp(min=1)
    assert got.shape == want.shape
    assert (got.double() - want).abs().max() <= 4 * unit * scale


@pytest.mark.parametrize("version", VERSIONS)
def test_every_band_of_small_tiles(made, version):
    """By the parts that the backend makes of a tile, one after the other."""
    backend, asked = made(version), problem(q_heads=2, kv_heads=1)
    for tile in tiles(3):
        q, k, v = inputs(asked, tile.q1, tile.k1)
        for part in backend.parts(tile, asked):
            seen = np.subtract.outer(np.arange(part.q1 - part.q0), np.arange(part.k1 - part.k0))
            seen = (part.lower <= seen) & (seen <= part.upper)
            rows, keys = slice(part.q0, part.q1), slice(part.k0, part.k1)
            block = q[:, rows], k[:, keys], v[:, keys]
            out, lse = backend.block(*block, part, asked)
            want, want_lse = exact(asked, *block, seen)
            close(out, want)
            close(lse, want_lse, 2.0**-18)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 17},
        {"head_dim": 20, "value_dim": 5},
        {"value_dim": 33, "head_dim": 8},
        {"scale": -0.4},
        {"scale": 0.0},
        {"scale": 3.0},
        {"kv_heads": 4},
        {"kv_heads": 1},
        {"batch": 2},
        {"dtype": "float16"},
        {"softcap": 1.5},
        {"softcap": 1.5, "scale": -0.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("version", VERSIONS)
def test_both_passes_of_one_block(made, version, changes):
    backend, asked = made(version), problem(**changes)
    if version == 4 and asked.softcap:
        assert backend.supports(asked) == "FlashAttention 4: softcap"
        return
    tensors = inputs(asked)
    causal = Tile(0, 8, 0, 8, 0, UNBOUNDED)
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    out, lse = backend.block(*tensors, causal, asked)
    want, want_lse = exact(asked, *tensors, seen)
    close(out, want)
    close(lse, want_lse, 2.0**-18)
    dout = torch.randn_like(out.float()).to(out.dtype)
    got = backend.block_backward(*tensors, out, lse, dout, causal, asked)
    for each, exactly in zip(got, gradients(asked, tensors, dout, seen), strict=True):
        close(each, exactly)


@pytest.mark.parametrize("version", VERSIONS)
def test_inputs_are_aligned_where_they_are_not(made, version):
    """Slices that begin anywhere, heads within rows within batches in any order: the stand-ins
    fail for what the kernels would read wrongly."""
    backend, asked = made(version), problem()
    q, k, v = inputs(asked)
    odd = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view_as(q).copy_(q)
    turned = k.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    spread = torch.zeros(*v.shape[:-1], v.shape[-1] + 3, dtype=v.dtype)[..., : v.shape[-1]]
    spread.copy_(v)
    plain = backend.block(q, k, v, WHOLE, asked)
    moved = backend.block(odd, turned, spread, WHOLE, asked)
    for one, other in zip(plain, moved, strict=True):
        assert torch.equal(one, other)


def test_aligned_inputs_are_not_copied(made, monkeypatch):
    backend, asked = made(2), problem()
    q, k, v = inputs(asked, keys=16)
    given = []
    monkeypatch.setattr(
        backend._kernels[0], "forward", lambda *x: given.extend(x) or (q, q.new_zeros(1, 4, 8))
    )
    backend.block(q, k[:, 8:], v[:, 8:], WHOLE, asked)
    places = [x.data_ptr() for x in (q, k[:, 8:], v[:, 8:])]
    assert [x.data_ptr() for x in given[:3]] == places


@pytest.mark.parametrize("version", VERSIONS)
def test_lse_of_some_rows_is_read_right(made, version):
    backend, asked = made(version), problem()
    q, k, v = inputs(asked, rows=12)
    tile = Tile(4, 12, 0, 8, -UNBOUNDED, UNBOUNDED)
    out, lse = backend.block(q, k, v, Tile(0, 12, 0, 8, -UNBOUNDED, UNBOUNDED), asked)
    block = q[:, 4:], k, v
    got = backend.block_backward(*block, out[:, 4:], lse[..., 4:], out[:, 4:], tile, asked)
    want = gradients(asked, block, out[:, 4:], torch.ones(8, 8, dtype=torch.bool))
    for each, exactly in zip(got, want, strict=True):
        close(each, exactly)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_row_with_nan_or_an_infinite_score_is_not_taken_for_an_empty_one(made, version):
    backend, asked = made(version), problem(q_heads=1, kv_heads=1)
    q, k, v = inputs(asked)
    q[0, 1, 0, 0] = torch.nan
    q[0, 2, 0], q[0, 2, 0, 0] = 0, torch.inf
    k[0, :, 0, 0] = k[0, :, 0, 0].abs() + 1
    out, lse = backend.block(q, k, v, WHOLE, asked)
    assert lse[0, 0, 1:3].isnan().all()
    assert out[0, 1:3].isnan().all()
    assert lse[0, 0, 3:].isfinite().all()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_row_whose_scores_are_all_minus_infinity_is_empty(made, version):
    backend, asked = made(version), problem(q_heads=1, kv_heads=1)
    q, k, v = inputs(asked)
    q[0, 1, 0], q[0, 1, 0, 0] = 0, -torch.inf
    k[0, :, 0, 0] = k[0, :, 0, 0].abs() + 1
    out, lse = backend.block(q, k, v, WHOLE, asked)
    assert lse[0, 0, 1] == -torch.inf
    assert not out[0, 1].any()


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_that_have_no_part_get_no_gradients(made, version):
    backend, asked = made(version), problem()
    q, k, v = inputs(asked)
    out, lse = backend.block(q, k, v, WHOLE, asked)
    lse[..., 3] = torch.inf
    dq, dk, dv = backend.block_backward(q, k, v, out, lse, out, WHOLE, asked)
    kept = [row for row in range(8) if row != 3]
    assert not dq[:, 3].any()
    _, *less = backend.block_backward(
        q[:, kept], k, v, out[:, kept], lse[..., kept], out[:, kept],
        Tile(0, 7, 0, 8, -UNBOUNDED, UNBOUNDED), asked,
    )  # fmt: skip
    for one, other in zip((dk, dv), less, strict=True):
        close(one, other.double(), 2.0**-9)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_batch_needs_no_kernel(made, version):
    backend, asked = made(version), problem(batch=0, value_dim=8)
    q, k, v = inputs(asked)
    out, lse = backend.block(q, k, v, WHOLE, asked)
    assert out.shape == (0, 8, 4, 8)
    assert lse.shape == (0, 4, 8)
    grads = backend.block_backward(q, k, v, out, lse, out, WHOLE, asked)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert not flash_standins.CALLS


@pytest.mark.parametrize(
    ("changes", "version"),
    [({}, 3), ({"head_dim": 200}, 4), ({"head_dim": 200, "softcap": 9.0}, 2)],
)
def test_a_problem_goes_to_the_first_version_that_does_it(made, changes, version):
    backend, asked = made(3, 4, 2, capability=90), problem(**changes)
    assert backend.supports(asked) is None
    backend.block(*inputs(asked), WHOLE, asked)
    assert [call["name"] for call in flash_standins.CALLS] == [f"flash{version}_forward"]


def test_what_no_version_does_is_refused_by_each_in_words(made):
    backend, asked = made(3, 2, capability=90), problem(dtype="float32", head_dim=300)
    words = (
        "FlashAttention 3: dtype float32; it does float16 and bfloat16; "
        "FlashAttention 2: dtype float32; it does float16 and bfloat16"
    )
    assert backend.supports(asked) == words
    with pytest.raises(Unsupported) as caught:
        backend.block(*inputs(asked), WHOLE, asked)
    assert str(caught.value) == f"backend flash-attn: {words}"


@pytest.mark.parametrize("version", [2, 3])
def test_nothing_is_warmed_up_that_is_compiled_already(made, version):
    made(version).prepare(problem())
    assert not flash_standins.CALLS


@pytest.mark.parametrize(
    ("mask", "windows"),
    [
        (Mask.full(8, 8), [(None, None)]),
        (Mask.causal(8, 8), [(None, None), (None, 0), (None, 1)]),
    ],
)
def test_version_4_is_compiled_for_the_kinds_of_windows_a_mask_can_give(
    made, monkeypatch, mask, windows
):
    monkeypatch.setattr(warm, "ROWS", 8)
    backend = made(4)
    backend.prepare(problem(mask=mask))
    passes = [(f"flash4_{name}", each) for each in windows for name in ("forward", "backward")]
    assert [(call["name"], call["window"]) for call in flash_standins.CALLS] == passes
    backend.prepare(problem(mask=mask, q_length=6, kv_length=5))
    assert len(flash_standins.CALLS) == len(passes)
    backend.prepare(problem(mask=mask, head_dim=32))
    assert len(flash_standins.CALLS) == 2 * len(passes)


def test_no_batch_compiles_nothing_and_hides_nothing(made, monkeypatch):
    monkeypatch.setattr(warm, "ROWS", 8)
    backend = made(4)
    backend.prepare(problem(batch=0))
    assert not flash_standins.CALLS
    backend.prepare(problem())
    assert len(flash_standins.CALLS) == 2


def test_a_window_compiles_every_kind(made, monkeypatch):
    from ringrt.plan import Piece

    monkeypatch.setattr(warm, "ROWS", 8)
    made(4).prepare(problem(mask=Mask([Piece(0, 8, 0, 8, 0, 3)])))
    assert {call["window"] for call in flash_standins.CALLS} == {
        (None, None), (None, 0), (None, 1), (1, None), (1, 1),
    }  # fmt: skip


def test_the_windows_of_the_stand_ins_are_aligned_at_the_last_row_and_key():
    seen = flash_attention32.bottom_right(2, 4, 1, 0)
    assert seen.tolist() == [[False, True, True, False], [False, False, True, True]]
