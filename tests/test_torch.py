"""ringrt.torch: gradients by autograd on thread ranks, against the oracle in float64."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from masks import visible
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch_support import (
    TIMEOUT,
    both_passes,
    example,
    leaves,
    on_ranks,
    plain_attention,
    wide,
)

import oracle
import ringrt
from ringrt import Mask, Piece
from ringrt.registry import registry
from ringrt.torch import checkpoint_contexts, ring_attention
from support import PARTITIONS, ROOT, torchrun

pytestmark = pytest.mark.timeout(120)

#: Of the largest number: rounding of results, and of the 16-bit out that delta is made from.
TOLERANCE = {"float64": 1e-13, "float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def assert_close(got, wanted, dtype="float64"):
    assert len(got) == len(wanted)
    for name, x, want in zip(("0", "1", "2", "dsink"), got, wanted, strict=False):
        bound = TOLERANCE[dtype] * max(1, abs(want[np.isfinite(want)]).max(initial=0))
        np.testing.assert_allclose(x, want, rtol=0, atol=bound, err_msg=name)


def check(tensors, ranks, *, how=None, masking=None, seen=None, dtype="float64", **scores):
    """Both passes against the oracle."""
    masking = masking or {}
    got, gradients = both_passes(tensors, ranks, how=how, **masking, **scores)
    if seen is None:
        seen = visible(tensors[0].shape[1], tensors[1].shape[1], **masking)
    scores |= {"sink": wide([scores["sink"]])[0]} if "sink" in scores else {}
    q, k, v, dout = wide(tensors)
    assert_close(got, oracle.attention(q, k, v, seen, **scores), dtype)
    assert_close(gradients, oracle.gradients(dout, q, k, v, seen, **scores), dtype)


# Right results.

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (5, None)},
    "window without bounds": {"window": (-1, 2), "causal": True},
    "documents": {"causal": True, "documents": [0, 8, 8, 17]},
    "ranges": {"documents": [[3, 9], [14, 21]]},
    "prefix": {"causal": True, "prefix": 4},
    "sink tokens": {"causal": True, "window": (3, 0), "sink_tokens": 2},
}


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask, ranks, partition):
    check(example(), ranks, how={"partition": partition}, masking=MASKS[mask])


@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_shards_may_be_empty(length):
    check(example(length), 4, masking={"causal": True})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_dtype(dtype, backend):
    check(example(dtype=dtype), 3, how={"backend": backend}, masking={"causal": True}, dtype=dtype)


def test_other_lengths_of_k_and_v():
    check(example(9, 21), 3, masking={"causal": True})


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_documents_in_any_form(kind):
    documents = [[0, 5], [7, 21]]
    check(example(), 2, masking={"documents": kind(documents), "causal": True})
    pair = kind([0, 4, 9]), kind([0, 10, 21])
    check(example(9, 21), 2, masking={"documents": pair, "causal": True})
    seen = visible(21, 21, documents=[0, 21])
    check(example(), 2, seen=seen, masking={"documents": (0, 21)})


def test_read_only_documents_are_taken_without_a_warning(recwarn):
    documents = np.array([0, 5, 21])
    documents.flags.writeable = False
    check(example(), 2, masking={"documents": documents})
    assert not recwarn.list


def test_an_own_mask(recwarn):
    mask = Mask([Piece(0, 10, 0, 5), Piece(5, 21, 5, 21, min_distance=0, max_distance=9)])
    seen = mask.visible(np.arange(21), np.arange(21))
    check(example(), 3, seen=seen, masking={"mask": mask})
    assert not recwarn.list


def test_an_own_mask_with_a_default_device_elsewhere():
    mask = Mask([Piece(0, 3, 0, 3)])

    def on_rank(ring):
        own = _qkv(3)
        with torch.device("meta"):
            return [
                ring_attention(*own, ring=ring, mask=mask),
                ring_attention(*own, ring=ring, documents=[0, 3]),
                ring_attention(*own, ring=ring),
            ]

    first, *others = on_ranks(on_rank, 1)[0]
    assert all(torch.equal(first, x) for x in others)


def _qkv(length=21, **shape):
    return example(length, **shape)[:3]


def test_scale_and_softcap():
    check(example(), 3, masking={"causal": True}, scale=-0.4, softcap=1.5)
    check(example(), 2, scale=1)
    check(example(), 2, scale=np.float32(0.5))


@pytest.mark.parametrize("travel", ["kv", "q"])
def test_the_gradient_of_sinks_is_the_sum_of_all_ranks_on_every_rank(travel):
    sink = torch.tensor([0.5, -1.0, 3.0, -torch.inf], dtype=torch.float64)
    masking = {"causal": True, "documents": [5, 17]}
    check(example(), 3, how={"travel": travel}, masking=masking, sink=sink)


def test_sinks_in_another_dtype_and_without_a_gradient():
    sink = torch.tensor([0.5, -1.0, 3.0, 0.0])
    q, k, v, dout = example()

    def on_rank(ring, wanted):
        own, logits = leaves(ring, (q, k, v)), sink.clone().requires_grad_(wanted)
        ring_attention(*own, ring=ring, sink=logits).backward(ring.cut(dout))
        return logits.grad

    want = oracle.gradients(*wide((dout, q, k, v)), sink=sink.numpy())[3]
    for ranks in (1, 2):
        [dsink, *_] = on_ranks(lambda ring: on_rank(ring, True), ranks)
        assert dsink.dtype == torch.float32
        np.testing.assert_allclose(dsink, want, atol=1e-5)
    assert on_ranks(lambda ring: on_rank(ring, False), 2) == [None, None]


def test_a_gradient_of_sinks_that_is_summed_with_all_others():
    q, k, v, dout = example()

    def on_rank(ring):
        sink = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        sink.register_hook(lambda gradient: gradient / ring.size)
        own = leaves(ring, (q, k, v))
        ring_attention(*own, ring=ring, sink=sink).backward(ring.cut(dout))
        return sink.grad.numpy()

    want = oracle.gradients(*wide((dout, q, k, v)), sink=np.zeros(4))[3]
    np.testing.assert_allclose(sum(on_ranks(on_rank, 3)), want, rtol=1e-12)


class _Whole(torch.autograd.Function):
    """Attention of whole tensors: each pass on thread ranks, with autograd in every thread."""

    @staticmethod
    def forward(ctx, ranks, options, q, k, v, sink):
        ctx.ranks, ctx.options = ranks, options
        ctx.save_for_backward(q, k, v, sink)
        q, k, v, sink = (x.detach() for x in (q, k, v, sink))

        def on_rank(ring):
            own = [ring.cut(x) for x in (q, k, v)]
            out, lse = ring_attention(*own, ring=ring, sink=sink, return_lse=True, **options)
            return ring.unshard(out), ring.unshard(lse, axis=2)

        return on_ranks(on_rank, ranks)[0]

    @staticmethod
    def backward(ctx, dout, dlse):
        *qkv, sink = (x.detach() for x in ctx.saved_tensors)

        def on_rank(ring):
            own, logits = leaves(ring, qkv), sink.clone().requires_grad_()
            results = ring_attention(*own, ring=ring, sink=logits, return_lse=True, **ctx.options)
            torch.autograd.backward(results, (ring.cut(dout), ring.cut(dlse, axis=2)))
            return [*(ring.unshard(x.grad) for x in own), logits.grad]

        return None, None, *on_ranks(on_rank, ctx.ranks)[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradcheck(ranks):
    inputs = [x.requires_grad_() for x in example(4, q_heads=2, kv_heads=1, head_dim=2)[:3]]
    inputs.append(torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True))
    options = {"causal": True, "softcap": 2.0}
    assert torch.autograd.gradcheck(lambda *x: _Whole.apply(ranks, options, *x), inputs)


# Autograd.


def test_without_gradients_it_is_attention_of_the_ring():
    q, k, v = _qkv(dtype="float32")

    def on_rank(ring):
        with torch.no_grad():
            out, lse = ring_attention(*leaves(ring, (q, k, v)), ring=ring, return_lse=True)
        wanted = ring.attention(*(ring.cut(x) for x in (q, k, v)))
        assert not out.requires_grad
        assert torch.equal(out, wanted[0])
        assert torch.equal(lse, wanted[1])

    on_ranks(on_rank, 3)


@pytest.mark.parametrize("asked", ["q", "k", "v", "qv", ""])
def test_gradients_of_some_arguments_only(asked):
    tensors = example()
    _, whole = both_passes(tensors, 2)
    wanted = dict(zip("qkv", whole, strict=True))

    def on_rank(ring):
        own = [
            ring.cut(x).clone().requires_grad_(n in asked)
            for n, x in zip("qkv", tensors, strict=False)
        ]
        out = ring_attention(*own, ring=ring)
        assert out.requires_grad is bool(asked)
        if asked:
            out.backward(ring.cut(tensors[3]))
        assert ring.stats.operation == ("backward" if asked else "forward")
        return {n: ring.unshard(x.grad) for n, x in zip("qkv", own, strict=True) if n in asked}

    for name, gradient in on_ranks(on_rank, 2)[0].items():
        np.testing.assert_array_equal(gradient, wanted[name])


def test_no_backward_pass_through_what_is_detached():
    def on_rank(ring):
        own = leaves(ring, _qkv())
        (ring_attention(*own, ring=ring).detach() * own[0].sum()).sum().backward()
        assert ring.stats.operation == "forward"

    on_ranks(on_rank, 2)


def test_strides_of_any_kind():
    """Views of what lies in memory heads first, with gaps; a gradient that lies so too, and the
    one of a sum, whose strides are 0."""
    q, k, v, dout = example()

    def on_rank(ring):
        gradient = ring.cut(dout)
        for like in (_heads_first(gradient), torch.ones(()).double().expand(gradient.shape)):
            plain = leaves(ring, (q, k, v))
            views = [_heads_first(x.detach()).requires_grad_() for x in plain]
            for inputs in (plain, views):
                out = ring_attention(*inputs, ring=ring, causal=True)
                assert out.is_contiguous()
                out.backward(like)
            for a, b in zip(plain, views, strict=True):
                assert not b.is_contiguous()
                assert torch.equal(a.grad, b.grad)

    on_ranks(on_rank, 2)


def _heads_first(x):
    wide = torch.stack([x, x], dim=4).transpose(1, 2).contiguous()
    return wide.transpose(1, 2)[..., 1]


def test_inputs_are_never_written():
    tensors = example()
    kept = [x.clone() for x in tensors]

    def on_rank(ring):
        own = [ring.cut(x) for x in tensors]
        assert own[0].data_ptr() == tensors[0].data_ptr() or ring.rank > 0
        out = ring_attention(*(x.requires_grad_() for x in own[:3]), ring=ring)
        out.backward(own[3])

    on_ranks(on_rank, 3, partition="contiguous")
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def test_several_layers_and_two_rings():
    """Backward goes through the layers in reverse, and each ring has its own order."""
    x, _, _, dout = example(q_heads=2, kv_heads=2, value_dim=4)
    ends = registry().group("threads", 3)

    def layers(x, attend):
        for index in range(4):
            x = x + attend(index, x, x.sin(), x.cos())
        return x

    def on_rank(ring):
        other = ringrt.Ring(ends[ring.rank], backend="reference", timeout=TIMEOUT)
        [own] = leaves(ring, [x])
        rings = [ring, other, other, ring]

        def attend(index, *qkv):
            return ring_attention(*qkv, ring=rings[index], causal=index > 1)

        with other:
            out = layers(own, attend)
            out.backward(ring.cut(dout))
            return ring.unshard(out.detach()), ring.unshard(own.grad)

    def plain(index, *qkv):
        return plain_attention(*qkv, visible(21, 21, causal=index > 1))[0]

    leaf = x.clone().requires_grad_()
    wanted = layers(leaf, plain)
    wanted.backward(dout)
    out, gradient = on_ranks(on_rank, 3)[0]
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-12)


def test_backward_runs_in_the_thread_of_its_rank():
    """On the host autograd makes no threads of its own, in which ranks would wait for one another."""
    seen = set()

    def on_rank(ring):
        ring.on_step = lambda step: seen.add((step.operation, step.rank, threading.get_ident()))
        ring_attention(*leaves(ring, _qkv()), ring=ring).sum().backward()
        return threading.get_ident()

    threads = on_ranks(on_rank, 3)
    assert seen == {(o, r, t) for r, t in enumerate(threads) for o in ("forward", "backward")}


# Mixed precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torch_s_own_attention_does(dtype):
    q, k, v = _qkv(dtype="float32", kv_heads=4, value_dim=4)

    def on_rank(ring):
        own = leaves(ring, (q, k, v.to(dtype)))
        with torch.autocast("cpu", dtype=dtype):
            out, lse = ring_attention(*own, ring=ring, return_lse=True)
            like = torch.nn.functional.scaled_dot_product_attention(*own)
        assert (out.dtype, lse.dtype) == (like.dtype, torch.float32) == (dtype, torch.float32)
        wanted = ring.attention(*(x.detach().to(dtype) for x in own))
        assert torch.equal(out, wanted[0])
        out.float().sum().backward()
        assert [x.grad.dtype for x in own] == [torch.float32, torch.float32, dtype]
        with torch.autocast("cpu", dtype=dtype):
            assert ring_attention(*(x.double() for x in own), ring=ring).dtype == torch.float64

    on_ranks(on_rank, 2)


# Checkpoints.


def _passes_of_two_layers(**how):
    """How often a ring passes forward in a training step of two checkpointed layers."""
    q, k, v = _qkv(value_dim=4)

    def on_rank(ring):
        passes = []
        ring.on_step = lambda step: passes.append(step.operation) if step.done == 1 else None
        own = leaves(ring, (q, k, v))

        def layer(q, k, v):
            return ring_attention(q.sin(), k, v, ring=ring, causal=True).cos()

        out = checkpoint(layer, own[0], *own[1:], use_reentrant=False, **how)
        out = checkpoint(layer, out, *own[1:], use_reentrant=False, **how)
        out.sum().backward()
        assert passes.count("backward") == 2
        return passes.count("forward"), [x.grad for x in own]

    return on_ranks(on_rank, 2)[0]


def test_a_checkpointed_layer_runs_attention_once():
    count, gradients = _passes_of_two_layers(context_fn=checkpoint_contexts)
    twice, wanted = _passes_of_two_layers()
    assert (count, twice) == (2, 4)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


def test_an_own_policy_decides_on_the_other_operators():
    asked = []

    def keep_sines(ctx, op, *args, **kwargs):
        asked.append((ctx.is_recompute, op))
        keep = op is torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(checkpoint_contexts, keep_sines)
    count, gradients = _passes_of_two_layers(context_fn=contexts)
    _, wanted = _passes_of_two_layers()
    assert count == 2
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
    assert (False, torch.ops.aten.sin.default) in asked
    assert torch.ops.ringrt.attention.default not in {op for _, op in asked}


# Programs.


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_example_trains_as_one_rank_does(ranks):
    program = ROOT / "examples" / "torch_train_step.py"
    if ranks == 1:
        command = [sys.executable, program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    else:
        done = torchrun(ranks, program)
    assert done.returncode == 0, done.stderr
    assert f"on {ranks} ranks" in done.stdout
    assert done.stdout.count("tokens of") == ranks
    assert "the gradients of all 12 weights are those of one rank" in done.stdout
