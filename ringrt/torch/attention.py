"""The function: options checked, put into the forms that an operator takes, and handed to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_gradtrackingtensor
from torch.autograd import forward_ad

from ringrt.errors import ConfigError, HandoffError, Unsupported
from ringrt.options import is_number
from ringrt.plan import Mask
from ringrt.plan.mask_options import MaskOptions
from ringrt.ring import Ring
from ringrt.torch.ops import attention


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ring: Ring,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    documents: Any = None,
    prefix: int = 0,
    sink_tokens: int = 0,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention of this rank's queries over the keys of all ranks, with gradients.

    q `[batch, rows, q_heads, head_dim]`, k `[batch, kv_rows, kv_heads, head_dim]`, v
    `[batch, kv_rows, kv_heads, value_dim]` are this rank's shards, on the host or one GPU, any
    strides. Returns out `[batch, rows, q_heads, value_dim]` in their dtype, and with `return_lse`
    (out, lse), lse `[batch, q_heads, rows]` float32 (float64 for float64). Options, errors and
    what they mean are those of `Ring.attention`.

    Collective, forward and backward alike: if one rank calls backward through a result, all must,
    in the same order. A rank whose part of the loss is empty still has to take part in it, with
    `0 * out.sum()`, say. Where k and v enter the losses of several ranks, their gradients hold the
    sum, and so does that of `sink`, logits `[q_heads]`, the same on every rank: it is the
    derivative of the sum of all ranks' losses, and alike on all of them. Gradients of other weights
    that ranks have in common are parts, to be summed over the ranks; that of `sink` is not. Where
    all are summed alike, as by DDP, divide it first:
    `sink.register_hook(lambda d: d / ring.size)`.

    Under `torch.autocast` q, k and v are cast as `scaled_dot_product_attention` does. Under
    `torch.compile` there is no graph break, and calls stay in order. Documents that change from
    call to call are best given as a tensor, on the host. Thread ranks that share a GPU call
    backward under `torch.autograd.set_multithreading_enabled(False)`, because autograd has one
    thread for each GPU, on which they would wait for one another. Double backward, derivatives in
    forward mode and vmap are `Unsupported`."""
    options = _Plain(causal, window, prefix, sink_tokens, scale, softcap)
    if not torch.compiler.is_compiling():
        # A compiled program takes them as they are; the ring refuses what is wrong when it runs.
        options = _checked(ring, {"q": q, "k": k, "v": v, "sink": sink}, documents, mask, options)
    queries, keys = documents if _is_pair(documents) else (documents, None)
    out, lse = attention(
        _autocast(q),
        _autocast(k),
        _autocast(v),
        sink,
        _tensor(queries),
        _tensor(keys),
        None if mask is None else _tensor(mask.table),
        ring.key,
        options.causal,
        None if options.window is None else [-1 if n is None else n for n in options.window],
        *options[2:],
    )
    return (out, lse) if return_lse else out


class _Plain(NamedTuple):
    """The options that are no arrays, in the order of the operator's."""

    causal: bool
    window: Sequence[int | None] | None
    prefix: int
    sink_tokens: int
    scale: float | None
    softcap: float | None


def _checked(
    ring: Ring, tensors: dict[str, Any], documents: Any, mask: Mask | None, options: _Plain
) -> _Plain:
    """The options as plain values, if all is of the right kind; the rest the ring checks. Another
    rank that is about to make the call hears of an error."""
    if not isinstance(ring, Ring):
        raise ConfigError("ring", "a ringrt.Ring", type(ring).__name__)
    causal, window, prefix, sink_tokens, *scores = options
    with ring.telling():
        for name, x in tensors.items():
            _check_tensor(name, x)
        _check_documents(documents)
        masking = MaskOptions.of(
            causal=causal, window=window, prefix=prefix, sink_tokens=sink_tokens, mask=mask
        )
        scale, softcap = map(_number, ("scale", "softcap"), scores)
    return _Plain(
        masking.causal, masking.window, masking.prefix, masking.sink_tokens, scale, softcap
    )


def _check_tensor(name: str, x: Any) -> None:
    if x is None and name == "sink":
        return
    if not isinstance(x, Tensor):
        raise ConfigError(name, "a torch.Tensor", type(x).__name__)
    if x.device.type == "meta":
        raise HandoffError(f"{name}: on the meta device, where there is nothing to compute on")
    if hasattr(x, "to_local"):
        raise HandoffError(f"{name}: spread over devices; pass {name}.to_local()")
    if forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        raise Unsupported(
            f"{name}: forward-mode derivatives are not implemented in ringrt.torch.ring_attention"
        )
    if is_gradtrackingtensor(x):
        raise Unsupported(
            "torch.func transforms: not implemented in ringrt.torch.ring_attention; call backward"
        )


def _check_documents(documents: Any) -> None:
    """What they say is the ring's to check."""
    expected = "whole numbers: cu_seqlens [n + 1], or ranges [n, 2] of [start, stop)"
    if _is_pair(documents) and any(side is None for side in documents):
        raise ConfigError("documents", f"{expected} on both sides", f"{documents!r}")
    try:
        for side in documents if _is_pair(documents) else (documents,):
            _tensor(side)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("documents", expected, f"{documents!r}: {error}") from error


def _number(name: str, value: Any) -> float | None:
    if value is not None and not is_number(value):
        raise ConfigError(name, "a number or None", repr(value))
    return None if value is None else float(value)


def _is_pair(documents: Any) -> bool:
    """Whether it is (queries, keys): a tuple of two arrays, as in `Ring.attention`."""
    return isinstance(documents, tuple) and len(documents) == 2 and not is_number(documents[0])


def _tensor(x: Any) -> Tensor | None:
    """On the host, unless it is a tensor."""
    if x is None or isinstance(x, Tensor):
        return x
    return torch.as_tensor(x.copy() if isinstance(x, np.ndarray) else x, device="cpu")


def _autocast(x: Tensor) -> Tensor:
    """x in the dtype of `torch.autocast`, where that is on; float64 stays."""
    kind = x.device.type
    if x.dtype == torch.float64 or not x.is_floating_point():
        return x
    if not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
