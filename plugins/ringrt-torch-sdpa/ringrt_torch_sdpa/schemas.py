"""The operators that are called, as they were when this was written. They are not part of
PyTorch's public face and may change; a call that means something else would be worse than none."""

from __future__ import annotations

from typing import Any

from ringrt.errors import BackendUnavailable

CPU = "_scaled_dot_product_flash_attention_for_cpu"
CUDNN = "_scaled_dot_product_cudnn_attention"
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"

_INPUTS = "Tensor query, Tensor key, Tensor value"
_SAVED = f"{_INPUTS}, Tensor out, Tensor logsumexp"
_LENGTHS = "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k"
_SEEDS = "Tensor philox_seed, Tensor philox_offset"
_SCALE = "*, float? scale=None"
_GRADIENTS = "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"

#: What stands between the name of an operator and the end of its schema, from PyTorch 2.13.
SCHEMAS = {
    CPU: f"({_INPUTS}, float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, "
    "float? scale=None) -> (Tensor output, Tensor logsumexp)",
    f"{CPU}_backward": f"(Tensor grad_out, {_SAVED}, float dropout_p, bool is_causal, *, "
    f"Tensor? attn_mask=None, float? scale=None) -> {_GRADIENTS}",
    CUDNN: f"({_INPUTS}, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
    f"bool is_causal=False, bool return_debug_mask=False, {_SCALE}) -> (Tensor output, "
    f"Tensor logsumexp, {_LENGTHS}, {_SEEDS}, Tensor debug_attn_mask)",
    f"{CUDNN}_backward": f"(Tensor grad_out, {_SAVED}, {_SEEDS}, Tensor attn_bias, {_LENGTHS}, "
    f"float dropout_p, bool is_causal, {_SCALE}) -> (Tensor, Tensor, Tensor)",
    FLASH: f"({_INPUTS}, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, "
    f"{_SCALE}) -> (Tensor output, Tensor logsumexp, {_LENGTHS}, Tensor rng_state, "
    "Tensor unused, Tensor debug_attn_mask)",
    f"{FLASH}_backward": f"(Tensor grad_out, {_SAVED}, {_LENGTHS}, float dropout_p, "
    f"bool is_causal, {_SEEDS}, {_SCALE}) -> {_GRADIENTS}",
    EFFICIENT: f"({_INPUTS}, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
    f"bool is_causal=False, {_SCALE}) -> (Tensor output, Tensor log_sumexp, {_SEEDS})",
    f"{EFFICIENT}_backward": f"(Tensor grad_out_, {_INPUTS}, Tensor attn_bias, Tensor out, "
    f"Tensor logsumexp, {_SEEDS}, float dropout_p, bool[4] grad_input_mask, "
    f"bool is_causal=False, {_SCALE}) -> (Tensor, Tensor, Tensor, Tensor)",
}


def operators(names: tuple[str, ...], aten: Any = None) -> dict[str, Any]:
    """Operators of PyTorch by name, with those of their backward passes; `BackendUnavailable` that
    names one which is gone or takes something else. `aten` is where they are looked for."""
    import torch

    found = {}
    for name in (each + suffix for each in names for suffix in ("", "_backward")):
        operator: Any = getattr(aten or torch.ops.aten, name, None)
        schema = None if operator is None else str(operator.default._schema)
        if schema != f"aten::{name}{SCHEMAS[name]}":
            raise BackendUnavailable(
                f"PyTorch {torch.__version__} has another aten::{name} than this plugin calls "
                f"({schema}): install the one it was tested with, 2.13"
            )
        found[name] = operator.default
    return found
