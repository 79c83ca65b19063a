"""PyTorch's operators for GPUs in plain PyTorch, for tensors of the host: the same arguments in
the same order, the same results, and what is particular about each.

    cuDNN       causal aligned top-left; lse has a fourth axis of 1; one key is refused, and more
                than 128 dims
    flash       causal aligned bottom-right; lse +inf for a row without a finite score, or with
                NaN; heads in groups; one dim for q, k and v
    efficient   causal aligned top-left; lse 0 for a row without a finite score, rows padded to a
                multiple of 32 with +inf; as many heads for k and v as for q; lse read as if it
                were contiguous

All want dims that are a multiple of 8, elements side by side and rows that begin at multiples of
16 bytes. What a kernel takes from 16-bit inputs is computed in float32 and rounded at the end.
"""

from __future__ import annotations

import torch
from ringrt_torch_sdpa.schemas import CUDNN, EFFICIENT, FLASH

INF = float("inf")


def cudnn(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
          return_debug_mask=False, *, scale=None):  # fmt: skip
    if query.device.type == "meta":
        return real(CUDNN)(query, key, value, attn_bias, compute_log_sumexp, scale=scale)
    check(query, key, value)
    half(query)
    assert key.shape[2] > 1, "cudnn SDPA does not support key/value sequence length 1"
    assert max(query.shape[3], value.shape[3]) <= 128, "head_dim should be no more than 128"
    assert (attn_bias, compute_log_sumexp, dropout_p) == (None, True, 0.0)
    out, lse = attend(query, key, value, top_left(query, key, is_causal), scale)
    rows, keys = query.shape[2], key.shape[2]
    return out, lse[..., None], None, None, rows, keys, long(), long(), None


def cudnn_backward(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset,
                   attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *,
                   scale=None):  # fmt: skip
    check(grad_out, query, key, value, out)
    half(query)
    assert logsumexp.shape == (*query.shape[:3], 1)
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    assert (attn_bias, cum_seq_q, cum_seq_k, dropout_p) == (None, None, None, 0.0)
    seen = top_left(query, key, is_causal)
    return gradients(grad_out, query, key, value, out, logsumexp[..., 0], seen, scale)


def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
          scale=None):  # fmt: skip
    check(query, key, value)
    half(query)
    assert query.shape[3] == key.shape[3] == value.shape[3] <= 256
    assert dropout_p == 0.0
    out, lse = attend(query, key, value, bottom_right(query, key, is_causal), scale)
    lse = torch.where(lse.isneginf() | lse.isnan(), INF, lse)
    state = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    debug = query.new_empty(0)
    return out, lse, None, None, query.shape[2], key.shape[2], *state, debug


def flash_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
                   dropout_p, is_causal, philox_seed, philox_offset, *, scale=None):  # fmt: skip
    check(grad_out, query, key, value, out)
    half(query)
    assert query.shape[3] == key.shape[3] == value.shape[3] <= 256
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    assert (cum_seq_q, cum_seq_k, dropout_p) == (None, None, 0.0)
    assert torch.are_deterministic_algorithms_enabled(), "adds up in any order"
    assert logsumexp.is_contiguous()
    seen = bottom_right(query, key, is_causal)
    return gradients(grad_out, query, key, value, out, logsumexp, seen, scale)


def efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *,
              scale=None):  # fmt: skip
    check(query, key, value)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert query.dtype != torch.float64
    assert (attn_bias, compute_log_sumexp, dropout_p) == (None, True, 0.0)
    out, lse = attend(query, key, value, top_left(query, key, is_causal), scale)
    lse = torch.where(lse.isneginf(), 0.0, lse)
    padding = lse.new_full((*lse.shape[:2], -lse.shape[2] % 32), INF)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, torch.cat((lse, padding), dim=2), long(), long()


def efficient_backward(grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed,
                       philox_offset, dropout_p, grad_input_mask, is_causal=False, *,
                       scale=None):  # fmt: skip
    check(grad_out_, query, key, value, out)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert logsumexp.stride(1) % 8 == 0, "LSE is not correctly aligned (strideH)"
    assert logsumexp.shape[2] == -(-query.shape[2] // 32) * 32
    assert logsumexp[..., query.shape[2] :].isposinf().all()
    assert logsumexp.is_contiguous()
    assert (attn_bias, dropout_p, grad_input_mask) == (None, 0.0, [True, True, True, False])
    assert torch.are_deterministic_algorithms_enabled(), "adds up in any order"
    seen, lse = top_left(query, key, is_causal), logsumexp[..., : query.shape[2]]
    found = gradients(grad_out_, query, key, value, out, lse, seen, scale)
    return *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in found), None


STAND_INS = {
    CUDNN: cudnn,
    f"{CUDNN}_backward": cudnn_backward,
    FLASH: flash,
    f"{FLASH}_backward": flash_backward,
    EFFICIENT: efficient,
    f"{EFFICIENT}_backward": efficient_backward,
}


def real(name):
    return getattr(torch.ops.aten, name).default


def check(*tensors):
    """What all of them ask of tensors `[batch, heads, rows, dim]`."""
    for x in tensors:
        assert x.stride(3) == 1, "elements do not lie side by side"
        assert x.shape[3] % 8 == 0, "head_dim should be a multiple of 8"
        assert x.data_ptr() % 16 == 0
        assert all(stride * x.dtype.itemsize % 16 == 0 for stride in x.stride()[:3])
        assert x.numel(), "no zero-length sequences"


def half(x):
    assert x.dtype in (torch.float16, torch.bfloat16)


def long():
    return torch.empty((), dtype=torch.int64)


def top_left(query, key, causal):
    rows, keys = query.shape[2], key.shape[2]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    return seen.tril() if causal else seen


def bottom_right(query, key, causal):
    rows, keys = query.shape[2], key.shape[2]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    return seen.tril(keys - rows) if causal else seen


def wide(query, *kv):
    """In float32, k and v with as many heads as q."""
    group = query.shape[1] // kv[0].shape[1]
    return query.float(), *(x.float().repeat_interleave(group, dim=1) for x in kv)


def attend(query, key, value, seen, scale):
    q, k, v = wide(query, key, value)
    scores = (q @ k.mT * scale).masked_fill(~seen, -INF)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    out = torch.where(lse.isneginf()[..., None], 0, p @ v)
    return out.to(query.dtype), lse


def gradients(grad_out, query, key, value, out, lse, seen, scale):
    q, k, v = wide(query, key, value)
    dout, out = grad_out.float(), out.float()
    p = ((q @ k.mT * scale).masked_fill(~seen, -INF) - lse[..., None]).exp()
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    dq, dk, dv = ds @ k, ds.mT @ q, p.mT @ dout
    heads = key.shape[1]
    dk, dv = (x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))
    return tuple(x.to(like.dtype) for x, like in ((dq, query), (dk, key), (dv, value)))
