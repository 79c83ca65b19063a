"""The two operators, `ringrt::attention` and `ringrt::attention_backward`, as PyTorch knows them.

A compiler sees them as opaque: it needs the shapes of the results (the fakes), the gradient, and
that they are not free of effects. They talk to other ranks, so a compiled program must run them in
the order in which it was written, and neither drop one whose result is not used, nor merge two that
look alike: what another rank's compiler makes of its part, with shards of other lengths, is its own
affair. Hence the ordered effect. CUDA graphs of PyTorch must not hold them: the host takes part.

A `Ring` goes in as its number, `documents` and `mask` as int64 tensors, what is None as None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ringrt.errors import Unsupported
from ringrt.plan import Mask
from ringrt.ring_keys import ring_of

try:
    from torch._library.effects import EffectType
except ImportError as error:
    raise ImportError(
        f"ringrt.torch: PyTorch {torch.__version__} cannot keep operators in order; 2.13 can"
    ) from error

_OPTIONS = (
    "Tensor? sink, Tensor? documents, Tensor? k_documents, Tensor? mask, SymInt ring, bool causal, "
    "int[]? window, int prefix, int sink_tokens, float? scale, float? softcap"
)
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)"
_BACKWARD = (
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
)
#: Where the ring is among the operator's inputs; in backward four tensors more come before it.
_RING = 7
_TAGS = (torch.Tag.cudagraph_unsafe,)


@custom_op("ringrt::attention", mutates_args=(), schema=_FORWARD, tags=_TAGS)
def attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out and lse of `Ring.attention`, contiguous."""
    ring, named = _named(*options)
    out, lse = ring.attention(q.detach(), k.detach(), v.detach(), **named)
    return out.contiguous(), lse.contiguous()


@custom_op("ringrt::attention_backward", mutates_args=(), schema=_BACKWARD, tags=_TAGS)
def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink of `Ring.attention_backward`, contiguous; dsink is empty without
    sinks."""
    ring, named = _named(*options)
    arrays = [x.detach() for x in (dout, q, k, v, out, lse)]
    gradients = ring.attention_backward(*arrays, dlse=_detached(dlse), **named)
    dq, dk, dv = (x.contiguous() for x in gradients[:3])
    sink = options[0]
    return dq, dk, dv, q.new_empty(0) if sink is None else gradients[3].to(sink.device)


@attention.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    # Shapes that do not fit are the operator's own to refuse, when it runs.
    if q.ndim != 4 or v.ndim != 4:
        return torch.empty_like(q), torch.empty_like(q)
    batch, rows, heads, _ = q.shape
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(batch, rows, heads, v.shape[3])
    return out, q.new_empty(batch, heads, rows, dtype=sums)


@attention_backward.register_fake
def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sink = options[0]
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, dsink


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, documents, k_documents, mask, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, sink, documents, k_documents, mask)
    # So that a gradient which nobody asked for comes as None, not as zeros.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = torch.ops.ringrt.attention_backward(
        dout, dlse, q, k, v, out, lse, *tensors, *ctx.rest
    )
    wanted = (x if need else None for x, need in zip(gradients, ctx.needs_input_grad, strict=False))
    return (*wanted, *(None,) * 10)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.ring = inputs[_RING + 4]


def _refuse_double_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    with ring_of(ctx.ring).telling():
        raise Unsupported("double backward: not implemented in ringrt.torch.ring_attention")


def _refuse_vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
    ring = inputs[_RING if len(inputs) == 14 else _RING + 4]
    with ring_of(ring).telling():
        raise Unsupported(
            "vmap: not implemented in ringrt.torch.ring_attention; batch is an axis of q, k and v"
        )


attention.register_autograd(_differentiate, setup_context=_keep)
attention_backward.register_autograd(_refuse_double_backward, setup_context=_keep_nothing)
for _op in (attention, attention_backward):
    _op.register_vmap(_refuse_vmap)
    _op.register_effect(EffectType.ORDERED)


def _named(
    sink: Tensor | None,
    documents: Tensor | None,
    k_documents: Tensor | None,
    mask: Tensor | None,
    ring: int,
    causal: bool,
    window: list[int] | None,
    prefix: int,
    sink_tokens: int,
    scale: float | None,
    softcap: float | None,
) -> tuple[Any, dict[str, Any]]:
    """The ring, and the options by the names that it knows."""
    return ring_of(ring), {
        "causal": causal,
        "window": window,
        "documents": documents if k_documents is None else (documents, k_documents),
        "prefix": prefix,
        "sink_tokens": sink_tokens,
        "mask": None if mask is None else Mask.from_table(mask.numpy()),
        "scale": scale,
        "softcap": softcap,
        "sink": _detached(sink),
    }


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
