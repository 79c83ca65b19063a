"""A gradient that comes in through lse: by the ring on host and (simulated) GPU, and by autograd,
against PyTorch's autograd through the definition of lse."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from cuda_support import PATH, simulator  # noqa: F401
from masks import visible
from torch_support import TIMEOUT, example, leaves, on_ranks, plain_attention, wide

import ringrt
from ringrt.cudasim import api
from ringrt.device.host import HOST
from ringrt.errors import ConfigError, HandoffError, Unsupported
from ringrt.torch import ring_attention
from support import BACKENDS

pytestmark = pytest.mark.timeout(120)

CASES = {
    "plain": ({}, False),
    "causal": ({"causal": True}, False),
    "sinks": ({"causal": True}, True),
    # Rows in no document see no key: out is 0, and lse the sink.
    "sinks and padding": ({"documents": [[3, 9], [12, 17]]}, True),
}


def wanted(tensors, dlse, masking, sink, softcap=None):
    """dq, dk, dv (and dsink) by autograd through the definition."""
    *inputs, dout = tensors
    inputs = [x.clone().requires_grad_() for x in (*inputs, *([] if sink is None else [sink]))]
    seen = visible(inputs[0].shape[1], inputs[1].shape[1], **masking)
    named = {} if sink is None else {"sink": inputs[3]}
    results = plain_attention(*inputs[:3], seen, softcap=softcap, **named)
    gradients = [None if g is None else g.double() for g in (dout, dlse)]
    torch.autograd.backward(
        [x for x, g in zip(results, gradients, strict=True) if g is not None],
        [g for g in gradients if g is not None],
    )
    # v has no part in lse.
    return wide(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)


def case(name, length=21, dtype="float64", **shape):
    masking, has_sink = CASES[name]
    tensors = example(length, dtype=dtype, **shape)
    torch.manual_seed(5)
    heads = tensors[0].shape[2]
    sum_dtype = torch.float64 if dtype == "float64" else torch.float32
    dlse = torch.randn(1, heads, length, dtype=sum_dtype)
    return tensors, dlse, masking, torch.randn(heads, dtype=torch.float64) if has_sink else None


def by_the_ring(tensors, dlse, masking, sink, **how):
    """Whole arrays of NumPy through `ringrt.attention_backward`."""
    q, k, v, dout, dlse = (x.numpy() for x in (*tensors, dlse))
    options = masking | how | ({} if sink is None else {"sink": sink.numpy()})
    forward = {name: x for name, x in options.items() if name != "travel"}
    out, lse = ringrt.attention(q, k, v, **forward)
    return ringrt.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)


def assert_close(got, want, tolerance=1e-12):
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("travel", ["kv", "q"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_on_the_host(name, backend, travel):
    tensors, dlse, masking, sink = case(name)
    want = wanted(tensors, dlse, masking, sink)
    for ranks in (1, 3):
        how = {"ranks": ranks, "backend": backend, "timeout": TIMEOUT, "travel": travel}
        assert_close(by_the_ring(tensors, dlse, masking, sink, **how), want)


@pytest.mark.parametrize("travel", ["kv", "q"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_on_a_gpu(dtype, travel):
    for name in CASES:
        tensors, dlse, masking, sink = case(name, dtype=dtype, value_dim=4)
        want = wanted([x.double() for x in tensors], dlse, masking, sink)
        got = by_the_ring(tensors, dlse, masking, sink, ranks=2, travel=travel, **PATH)
        assert_close(got, want, 1e-12 if dtype == "float64" else 2e-5)


def test_a_gpu_s_delta_is_the_host_s():
    from ringrt.device.cuda import CudaDevice

    rng = np.random.default_rng(0)
    dout, out = (rng.standard_normal((2, 5, 3, 40), dtype=np.float32) for _ in range(2))
    dlse = rng.standard_normal((2, 3, 5), dtype=np.float32)
    for dtype in ("float32", "bfloat16"):
        narrow = [
            x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for x in (dout, out)
        ]
        gpu = CudaDevice(0)
        for less in (None, dlse):
            with gpu.running():
                there = [gpu.place(x) for x in narrow]
                delta = gpu.row_delta(*there, dtype, None if less is None else gpu.place(less))
                delta = gpu.to_host(delta, "float32")
            np.testing.assert_allclose(delta, HOST.row_delta(*narrow, dtype, less), rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("used", ["both", "lse"])
def test_by_autograd(name, used):
    """Of a loss that uses out and lse, and of one that uses lse alone."""
    tensors, dlse, masking, sink = case(name)
    dout = tensors[3] if used == "both" else None
    want = wanted([*tensors[:3], dout], dlse, masking, sink, softcap=2.0)

    def on_rank(ring):
        own = leaves(ring, tensors[:3])
        logits = {} if sink is None else {"sink": sink.clone().requires_grad_()}
        out, lse = ring_attention(
            *own, ring=ring, return_lse=True, softcap=2.0, **masking, **logits
        )
        loss = (torch.where(lse == -torch.inf, 0, lse) * ring.cut(dlse, axis=2)).sum()
        if dout is not None:
            loss = loss + (out * ring.cut(dout)).sum()
        loss.backward()
        return [ring.unshard(x.grad) for x in own] + [x.grad for x in logits.values()]

    for ranks in (1, 3):
        for got in on_ranks(on_rank, ranks):
            assert_close(got, want)


def test_lse_may_count_on_one_rank_only():
    tensors, _, masking, _ = case("causal")

    def on_rank(ring, part):
        own = leaves(ring, tensors[:3])
        out, lse = ring_attention(*own, ring=ring, return_lse=True, **masking)
        (out.sum() + (lse.sum() if ring.rank == 1 else 0 * lse.sum() if part else 0)).backward()
        return [ring.unshard(x.grad) for x in own]

    first, second = (on_ranks(lambda ring, p=part: on_rank(ring, p), 3)[0] for part in (0, 1))
    assert_close(first, wide(second), 0)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda x: x[:, :, 1:], ConfigError, "dlse: expected shape"),
        (lambda x: x.astype(np.float32), ConfigError, "dlse: expected dtype float64"),
        (lambda x: x.tolist(), HandoffError, "dlse: a builtins.list cannot be handed over"),
        (lambda x: api.asarray(x), HandoffError, "dlse on GPU 0: they must lie on one device"),
    ],
)
def test_one_that_does_not_fit_is_refused(change, kind, text):
    tensors, dlse, *_ = case("plain")
    q, k, v, dout = (x.numpy() for x in tensors)
    how = {"backend": "reference", "timeout": TIMEOUT}
    out, lse = ringrt.attention(q, k, v, ranks=1, **how)
    wrong = change(dlse.numpy())
    with pytest.raises(kind, match=text):
        ringrt.attention_backward(dout, q, k, v, out, lse, dlse=wrong, ranks=2, **how)

    def on_rank(ring):
        ring.attention_backward(dout, q, k, v, out, lse, dlse=wrong)

    with pytest.raises(kind, match=text):
        ringrt.run_threads(on_rank, 1, **how)


def test_a_backend_that_makes_delta_by_itself_refuses_it(monkeypatch):
    from ringrt_backends.reference import ReferenceBackend

    monkeypatch.setattr(ReferenceBackend, "needs_out", True)
    q, k, v, _ = example()

    def on_rank(ring, used):
        own = leaves(ring, (q, k, v))
        out, lse = ring_attention(*own, ring=ring, return_lse=True)
        (out.sum() + (lse.sum() if used else 0)).backward()

    on_ranks(lambda ring: on_rank(ring, False), 2)
    with pytest.raises(Unsupported, match="backend reference: dlse is not implemented: it makes"):
        on_ranks(lambda ring: on_rank(ring, True), 2)
