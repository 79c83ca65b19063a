"""The signatures of FlashAttention's functions as they were read from its sources, by release.
`check_flash_signatures.py` holds them to a source tree, `test_flash_standins.py` the stand-ins to
them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """Where it was read, the file within that tree, and by function its parameters, with
    defaults, and what it returns."""

    version: int
    read_from: str
    file: str
    functions: dict[str, tuple[str, str]]


FLASH2 = Record(
    2,
    "flash-attn 2.8.3.post2, sdist on PyPI",
    "flash_attn/flash_attn_interface.py",
    {
        "_flash_attn_forward": (
            "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, "
            "softcap, alibi_slopes, return_softmax",
            "out, softmax_lse, S_dmask, rng_state",
        ),
        "_flash_attn_backward": (
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, "
            "window_size_left, window_size_right, softcap, alibi_slopes, deterministic, "
            "rng_state=None",
            "softmax_d",
        ),
    },
)

#: Refused: its backward takes `deterministic` and ignores it.
FLASH3_EARLY = Record(
    3,
    "hopper 3.0.0.b1, in the sdist of flash-attn 2.8.3.post2",
    "hopper/flash_attn_interface.py",
    {
        "_flash_attn_forward": (
            "q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, "
            "seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, "
            "leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, "
            "v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, "
            "softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, "
            "pack_gqa=None, sm_margin=0",
            "out, softmax_lse, *rest",
        ),
        "_flash_attn_backward": (
            "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, "
            "max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, "
            "window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0",
            "dq, dk, dv, softmax_d",
        ),
    },
)

FLASH3 = Record(
    3,
    "hopper at commit 01afd16d248c of Dao-AILab/flash-attention",
    "hopper/flash_attn_interface.py",
    {
        "_flash_attn_forward": (
            "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, "
            "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, "
            "leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, "
            "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
            "window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, "
            "rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, "
            "sm_margin=0",
            "out, softmax_lse, out_accum, softmax_lse_accum",
        ),
        "_flash_attn_backward": (
            "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, "
            "sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, "
            "dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, "
            "window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
            "softmax_d",
        ),
    },
)

FLASH4 = Record(
    4,
    "flash-attn-4 4.0.0b36, wheel on PyPI",
    "flash_attn/cute/interface.py",
    {
        "_flash_attn_fwd": (
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, "
            "seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, "
            "page_table=None, softmax_scale=None, causal=False, softcap=None, "
            "window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, "
            "mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, "
            "pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, "
            "block_sparse_tensors=None, return_lse=False, out=None, lse=None, "
            "aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, "
            "v_descale=None, gather_kv_indices=None, scheduler_metadata=None, "
            "seqlen_k_per_split=None, disable_scheduler_metadata=False, "
            "gather_bwd_recompute_p=False",
            "out, lse, p, row_max, o_lo",
        ),
        "_flash_attn_bwd": (
            "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
            "window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, "
            "num_threads=256, pack_gqa=False, num_stages_Q=2, num_stages_dO=2, "
            "SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, "
            "AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, "
            "cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
            "max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, "
            "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, "
            "aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None",
            "(dq, dk, dv) if learnable_sink is None else (dq, dk, dv, dsink)",
        ),
    },
)

RECORDS = (FLASH2, FLASH3_EARLY, FLASH3, FLASH4)
