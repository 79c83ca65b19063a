"""What the tests of ringrt.torch share: tensors, both passes on thread ranks, and attention by
plain PyTorch, whose autograd is the other opinion."""

from __future__ import annotations

import numpy as np
import torch

import ringrt
from ringrt.torch import ring_attention
from support import random_qkv

TIMEOUT = 30


def tensor(x):
    """A tensor like a NumPy array; PyTorch does not know ml_dtypes."""
    if x.dtype.name == "bfloat16":
        return torch.tensor(x.astype(np.float32)).bfloat16()
    return torch.tensor(x)


def example(length=21, kv_length=None, dtype="float64", seed=0, **shape):
    """q, k, v and dout, standard normal, with grouped heads and value_dim ≠ head_dim."""
    shape = {"q_heads": 4, "kv_heads": 2, "head_dim": 4, "value_dim": 3} | shape
    arrays = random_qkv(length, kv_length=kv_length, dtype=dtype, seed=seed, **shape)
    like_out = shape | {"head_dim": shape["value_dim"]}
    return [tensor(x) for x in (*arrays, random_qkv(length, dtype=dtype, seed=99, **like_out)[0])]


def wide(tensors):
    """As float64 arrays of NumPy."""
    return [x.detach().double().numpy() for x in tensors]


def leaves(ring, tensors):
    """This rank's shards, which ask for gradients."""
    return [ring.cut(x).clone().requires_grad_() for x in tensors]


def on_ranks(fn, ranks, **options):
    """`fn(ring)` on thread ranks, on the backend that needs no compiling."""
    return ringrt.run_threads(fn, ranks, timeout=TIMEOUT, **{"backend": "reference"} | options)


def both_passes(tensors, ranks, *, sink=None, how=None, **options):
    """Whole (out, lse) and (dq, dk, dv[, dsink]) by `ring_attention` and autograd on a ring made
    with the options `how`, as float64 arrays."""
    *qkv, dout = tensors

    def on_rank(ring):
        own = leaves(ring, qkv)
        logits = {} if sink is None else {"sink": sink.clone().requires_grad_()}
        out, lse = ring_attention(*own, ring=ring, return_lse=True, **logits, **options)
        assert out.dtype == qkv[0].dtype
        out.backward(ring.cut(dout))
        assert all(x.grad.dtype == x.dtype for x in (*own, *logits.values()))
        whole = [ring.unshard(out.detach()), ring.unshard(lse.detach(), axis=2)]
        whole += [ring.unshard(x.grad) for x in own]
        return [*whole, *(x.grad for x in logits.values())]

    results = on_ranks(on_rank, ranks, **how or {})
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b), "every rank holds the same whole, and the same dsink"
    whole = wide(results[0])
    return whole[:2], whole[2:]


def plain_attention(q, k, v, seen, *, scale=None, softcap=None, sink=None):
    """out and lse from the definition, with autograd; bool `seen` [q_length, kv_length]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~torch.as_tensor(seen), -torch.inf)
    if sink is not None:
        columns = sink[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, columns], dim=3)
    lse = torch.logsumexp(scores, dim=3)
    weights = torch.exp(scores - lse[..., None])[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse
