"""Stand-ins for FlashAttention 2, 3 and 4 on the host: the signatures, checks, windows, lse and
order of addition of the real functions, without a GPU. `flash_signatures.py` says from which
sources; that they are those signatures is a test. Versions 2 and 3 are PyTorch operators, as in
earnest.
"""

from __future__ import annotations

import inspect

import flash_attention32
import torch

_INF = float("inf")
#: What FlashAttention 4 takes the GPU for: 90 for sm_90.
ARCH = 90
#: Name and window of each call, for tests to look at.
CALLS: list[dict] = []


def _check_kernel_inputs(most: int, *tensors: torch.Tensor) -> None:
    """As the kernels: they check some of it, and the rest is read wrongly or not at all."""
    q = tensors[0]
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    for x in tensors:
        if x.dtype != q.dtype:
            raise RuntimeError("query and key must have the same dtype")
        if x.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
        if x.shape[0] < 1 or min(x.shape) < 1:
            raise RuntimeError("batch size must be positive")
        if x.shape[-1] % 8 or x.shape[-1] > most:
            raise RuntimeError(f"head_size {x.shape[-1]}")
        if x.data_ptr() % 16 or any(s <= 0 or s * x.element_size() % 16 for s in x.stride()[:-1]):
            raise RuntimeError("misaligned address")


def _without_gaps(lse: torch.Tensor) -> torch.Tensor:
    """lse as the kernels of versions 2 and 3 read it: by its shape, whatever its strides."""
    heads, rows = lse.shape[1:]
    return torch.as_strided(lse, lse.shape, (heads * rows, rows, 1), lse.storage_offset())


def ordered(x: torch.Tensor, deterministic: bool) -> torch.Tensor:
    """Sums as they come where their order is not asked to be fixed: no two alike."""
    return x if deterministic else x * (1 + torch.rand(()) / 64)


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    batch, keys, heads, dim = x.shape
    return x.reshape(batch, keys, kv_heads, heads // kv_heads, dim).sum(3)


def parameters(function) -> list[str]:
    """Names of what a stand-in takes."""
    return list(inspect.signature(function).parameters)


# --- version 2 ----------------------------------------------------------------------------------


def window2(rows: int, keys: int, causal: bool, left: int, right: int, forward: bool):
    """The bounds as flash_api.cpp makes them. Both passes take a bound of `keys` or more for none,
    and then none, beside another bound, for `keys`."""
    left = -1 if left >= keys else left
    right = -1 if right >= keys else right
    if causal and not (forward and rows == 1):
        right = 0
    if left < 0 and right < 0:
        return None, None
    return (keys if left < 0 else left), (keys if right < 0 else right)


def flash2_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    CALLS.append({"name": "flash2_forward", "window": (window_size_left, window_size_right)})
    _check_kernel_inputs(256, q, k, v)
    assert (dropout_p, alibi_slopes, return_softmax) == (0, None, False)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    rows, keys = q.shape[1], k.shape[1]
    window = window2(rows, keys, causal, window_size_left, window_size_right, True)
    seen = flash_attention32.bottom_right(rows, keys, *window)
    sums, top, total = flash_attention32.forward(q, k, v, softmax_scale, softcap, seen)
    none = (total == 0) | total.isnan()
    inverse = torch.where(none, 1, 1 / total)
    out = (sums * inverse.transpose(1, 2)[..., None]).to(q.dtype)
    lse = torch.where(none, _INF, top + total.log())
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def flash2_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    CALLS.append({"name": "flash2_backward", "window": (window_size_left, window_size_right)})
    _check_kernel_inputs(256, q, k, v, dout, out)
    assert (dropout_p, alibi_slopes) == (0, None)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] == out.shape[-1] == dout.shape[-1]
    rows, keys = q.shape[1], k.shape[1]
    window = window2(rows, keys, causal, window_size_left, window_size_right, False)
    seen = flash_attention32.bottom_right(rows, keys, *window)
    lse = _without_gaps(softmax_lse)
    parts = flash_attention32.backward(dout, q, k, v, out, lse, softmax_scale, softcap, seen)
    # dk and dv are rounded for each query head before they are added up by KV head.
    whole, *heads = (x.to(q.dtype) for x in parts)
    dq.copy_(ordered(whole, deterministic))
    dk.copy_(_grouped(heads[0], k.shape[2]))
    dv.copy_(_grouped(heads[1], k.shape[2]))
    return torch.zeros(q.shape[0], q.shape[2], -(-rows // 128) * 128)


# --- version 3 ----------------------------------------------------------------------------------


def window3(rows: int, keys: int, causal: bool, left: int, right: int):
    """As hopper/flash_api.cpp makes them: every bound that hides something is kept."""
    left = -1 if left >= keys - 1 else left
    right = -1 if right >= rows - 1 else right
    right = 0 if causal else right
    return (None if left < 0 else left), (None if right < 0 else right)


def flash3_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out_: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    CALLS.append({"name": "flash3_forward", "window": (window_size_left, window_size_right)})
    _check_kernel_inputs(256, q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rows, keys = q.shape[1], k.shape[1]
    window = window3(rows, keys, causal, window_size_left, window_size_right)
    seen = flash_attention32.bottom_right(rows, keys, *window)
    sums, top, total = flash_attention32.forward(q, k, v, scale, softcap, seen)
    none = (total == 0) | total.isnan()
    inverse = torch.where(none, 0, 1 / total)
    out = (sums * inverse.transpose(1, 2)[..., None]).to(q.dtype)
    lse = torch.where(none, -_INF, top + total.log())
    return out, lse, torch.tensor([]), torch.tensor([])


def flash3_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sequed_q: torch.Tensor | None = None,
    sequed_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    CALLS.append({"name": "flash3_backward", "window": (window_size_left, window_size_right)})
    _check_kernel_inputs(256, q, k, v, dout, out)
    if deterministic and max(q.shape[-1], v.shape[-1]) > 192:
        raise RuntimeError("Deterministic backward not supported for hdim 256.")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rows, keys = q.shape[1], k.shape[1]
    window = window3(rows, keys, is_causal, window_size_left, window_size_right)
    seen = flash_attention32.bottom_right(rows, keys, *window)
    lse = _without_gaps(softmax_lse)
    whole, *heads = flash_attention32.backward(dout, q, k, v, out, lse, scale, softcap, seen)
    dq.copy_(ordered(whole, deterministic))
    dk.copy_(ordered(_grouped(heads[0], k.shape[2]), deterministic))
    dv.copy_(ordered(_grouped(heads[1], k.shape[2]), deterministic))
    return torch.zeros(q.shape[0], q.shape[2], -(-rows // 128) * 128)


def flash3_early_forward(
    q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
    seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
    rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    raise AssertionError("refused before it is called")


def flash3_early_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
    max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
    deterministic=False, sm_margin=0,
):  # fmt: skip
    raise AssertionError("refused before it is called")


# --- version 4 ----------------------------------------------------------------------------------


def _check4(q, k, v, *more) -> None:
    assert ARCH // 10 in (9, 10, 11, 12), "Unsupported compute capability."
    assert all(x.dtype == v.dtype for x in (q, k, *more)), "inputs must have the same dtype"
    head, value = q.shape[-1], v.shape[-1]
    if ARCH // 10 == 9:
        good = 8 <= head <= 256 and 8 <= value <= 256
    else:
        good = 8 <= head <= 128 and 8 <= value <= 128
        good = good or (head, value) in ((192, 128), (256, 256))
    assert good, f"(head_dim, head_dim_v)=({head}, {value})"


def flash4_forward(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
    causal=False, softcap=None, window_size_left=None, window_size_right=None,
    learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384,
    num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
    block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None,
    aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None,
    scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
):  # fmt: skip
    CALLS.append({"name": "flash4_forward", "window": (window_size_left, window_size_right)})
    _check_kernel_inputs(256, q, k, v)
    _check4(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _seen4(q, k, causal, window_size_left, window_size_right)
    sums, top, total = flash_attention32.forward(q, k, v, scale, softcap, seen)
    none = (total == 0) | total.isnan()
    inverse = torch.where(none, 1, 1 / total)
    out = (sums * inverse.transpose(1, 2)[..., None]).to(q.dtype)
    lse = torch.where(none, -_INF, top + total.log()) if return_lse else None
    return out, lse, None, None, None


def flash4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
    window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128,
    num_threads=256, pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False,
    dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2,
    V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
    score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None,
    block_sparse_tensors=None, dlse=None, learnable_sink=None,
):  # fmt: skip
    CALLS.append({"name": "flash4_backward", "window": (window_size_left, window_size_right)})
    _check_kernel_inputs(256, q, k, v, dout, out)
    _check4(q, k, v, dout, out)
    assert ARCH // 10 != 12 or not deterministic, "not supported on SM 12.0"
    if ARCH // 10 == 9 and q.shape[2] > k.shape[2]:
        assert q.shape[-1] == v.shape[-1], "GQA backward requires head_dim == head_dim_v"
    assert (lse.dtype, lse.shape) == (torch.float32, (q.shape[0], q.shape[2], q.shape[1]))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _seen4(q, k, causal, window_size_left, window_size_right)
    whole, *heads = flash_attention32.backward(dout, q, k, v, out, lse, scale, softcap, seen)
    sums = whole, *(_grouped(x, k.shape[2]) for x in heads)
    return tuple(ordered(x, deterministic).to(q.dtype) for x in sums)


def _seen4(q, k, causal, left, right):
    """As _resolve_causal_local_window: two negative bounds are none, a single one is a bound."""
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    right = 0 if causal else right
    return flash_attention32.bottom_right(q.shape[1], k.shape[1], left, right)


# --- as operators -------------------------------------------------------------------------------

_GRADIENTS = ("dq", "dk", "dv")
FLASH2 = {
    "_flash_attn_forward": torch.library.custom_op(
        "flash_attn::_flash_attn_forward", flash2_forward, mutates_args=()
    ),
    "_flash_attn_backward": torch.library.custom_op(
        "flash_attn::_flash_attn_backward", flash2_backward, mutates_args=_GRADIENTS
    ),
}
FLASH3 = {
    "_flash_attn_forward": torch.library.custom_op(
        "flash_attn_3::_flash_attn_forward", flash3_forward, mutates_args=()
    ),
    "_flash_attn_backward": torch.library.custom_op(
        "flash_attn_3::_flash_attn_backward", flash3_backward, mutates_args=_GRADIENTS
    ),
}
FLASH3_EARLY = {
    "_flash_attn_forward": flash3_early_forward,
    "_flash_attn_backward": flash3_early_backward,
}
FLASH4 = {"_flash_attn_fwd": flash4_forward, "_flash_attn_bwd": flash4_backward}
