"""ringrt.torch under PyTorch's compilers: the operators by PyTorch's own checks, whole programs
without a graph break, and every call made, in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch_support import example, leaves, on_ranks

import ringrt
from ringrt import Mask, Piece
from ringrt.errors import ConfigError, TransportError, Unsupported
from ringrt.torch import checkpoint_contexts, ring_attention

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(program, backend="aot_eager", **how):
    return torch.compile(program, fullgraph=True, backend=backend, **how)


def gradients(program, ring, tensors, *others):
    own = leaves(ring, tensors)
    program(*own, *others).backward()
    return [x.grad for x in own]


def assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def loss(q, k, v, ring, options):
    """Between other operators, with gradients through out and lse."""
    out, lse = ring_attention(q.sin(), k, v, ring=ring, return_lse=True, **options)
    return (out * out).sum() + lse.exp().sum()


# The operators.


@pytest.mark.parametrize("has_sink", [True, False])
def test_pytorch_s_own_checks_of_the_operators(has_sink):
    q, k, v, _ = example(6)
    logits = torch.randn(4, dtype=torch.float64) if has_sink else None
    documents = None if has_sink else torch.tensor([0, 2, 6])

    def on_rank(ring):
        rest = documents, None, None, ring.key, True, [3, -1], 0, 0, 0.4, None
        own = leaves(ring, (q, k, v))
        sink = logits.clone().requires_grad_() if has_sink else None
        ops = torch.ops.ringrt
        out, lse = ops.attention(q, k, v, logits, *rest)
        torch.library.opcheck(ops.attention.default, (*own, sink, *rest))
        backward = out.sin(), lse.cos(), q, k, v, out, lse, logits, *rest
        torch.library.opcheck(ops.attention_backward.default, backward)

    on_ranks(on_rank, 1)


def test_pytorch_s_cuda_graphs_must_not_hold_the_operators():
    """The host takes part in a pass: what a graph launches again would wait for nobody."""
    for op in (torch.ops.ringrt.attention, torch.ops.ringrt.attention_backward):
        assert torch.Tag.cudagraph_unsafe in op.default.tags


# Programs.

OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (3, None)},
    "documents as a list": {"documents": [0, 5, 21]},
    "documents as an array": {"documents": np.array([0, 5, 21])},
    "documents as a tensor": {"documents": torch.tensor([[0, 5], [5, 12]])},
    "a pair of documents": {"documents": ([0, 5, 21], [0, 6, 21])},
    "sink tokens": {"window": (3, 0), "sink_tokens": 2, "prefix": 1},
    "mask": {"mask": Mask([Piece(0, 12, 0, 5), Piece(3, 21, 5, 21, 0, None)])},
    "scores": {"scale": -0.3, "softcap": 2.0},
    "sinks": {"sink": torch.tensor([0.5, -1.0, 0.0, 2.0])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_without_a_graph_break(name, recwarn):
    def on_rank(ring):
        wanted = gradients(loss, ring, example()[:3], ring, OPTIONS[name])
        got = gradients(compiled(loss), ring, example()[:3], ring, OPTIONS[name])
        assert_same(got, wanted)

    on_ranks(on_rank, 1)
    assert not [each for each in recwarn if "torch" not in str(each.category)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_three_thread_ranks_of_which_two_share_a_shape(dtype):
    tensors = example(20, dtype=dtype)[:3]
    program = compiled(loss)

    def on_rank(ring):
        wanted = gradients(loss, ring, tensors, ring, {"causal": True})
        for _ in range(2):
            assert_same(gradients(program, ring, tensors, ring, {"causal": True}), wanted)

    on_ranks(on_rank, 3)


def test_one_program_serves_all_lengths_and_rings():
    counter = CompileCounterWithBackend("aot_eager")
    program = compiled(loss, counter, dynamic=True)

    def on_rank(ring):
        for length in (9, 21, 5):
            own = [x[:, :length] for x in example()[:3]]
            wanted = gradients(loss, ring, own, ring, {"causal": True})
            assert_same(gradients(program, ring, own, ring, {"causal": True}), wanted)

    for _ in range(3):
        on_ranks(on_rank, 1)
    assert counter.frame_count == 1


def test_documents_given_as_a_tensor_do_not_compile_anew():
    counter = CompileCounterWithBackend("aot_eager")
    program = compiled(loss, counter)

    def on_rank(ring):
        for documents in ([0, 5, 21], [0, 9, 12], [3, 4, 21]):
            options = {"documents": torch.tensor(documents)}
            wanted = gradients(loss, ring, example()[:3], ring, options)
            assert_same(gradients(program, ring, example()[:3], ring, options), wanted)

    on_ranks(on_rank, 1)
    assert counter.frame_count == 1


def _calls_of(ring, monkeypatch):
    """What the ring is asked for, as (pass, scale)."""
    calls = []

    def spy(name):
        method = getattr(ring, name)

        def call(*arrays, **options):
            calls.append((name, options["scale"]))
            return method(*arrays, **options)

        monkeypatch.setattr(ring, name, call)

    spy("attention")
    spy("attention_backward")
    return calls


def _independent(a, b, k, v, ring):
    """Calls that do not depend on one another, two of them alike, one whose result is not used.
    Nothing else is to be computed, so that no backend has a kernel to compile."""

    def attend(q, scale):
        return ring_attention(q, k.transpose(1, 2), v, ring=ring, scale=scale)

    alike = [attend(a.detach(), 1.0), attend(a.detach(), 1.0)]
    attend(a.detach(), 2.0)
    first = attend(a, 3.0)
    return *alike, attend(b, 4.0).transpose(1, 2), first


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_calls_are_neither_dropped_nor_merged_nor_reordered(backend, monkeypatch, tmp_path):
    """What other ranks' compilers make of their parts is their own affair."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    a, k, v, _ = example(6, value_dim=4)
    k = k.transpose(1, 2).contiguous()

    def step(program, ring):
        own = leaves(ring, (a, 2 * a))
        *alike, second, first = program(*own, k, v, ring)
        assert torch.equal(*alike)
        torch.autograd.backward((first, second), (first.detach(), second.detach()))
        return [*alike, second, first, *(x.grad for x in own)]

    def on_rank(ring):
        calls = _calls_of(ring, monkeypatch)
        wanted = step(_independent, ring)
        eager = calls.copy()
        calls.clear()
        assert_same(step(compiled(_independent, backend), ring), wanted)
        assert eager[:5] == [("attention", scale) for scale in (1.0, 1.0, 2.0, 3.0, 4.0)]
        assert calls[:5] == eager[:5]
        assert {name for name, _ in calls[5:]} == {"attention_backward"}
        assert sorted(calls) == sorted(eager)

    on_ranks(on_rank, 1)


def test_no_gradients():
    def on_rank(ring):
        own = example()[:3]
        program = compiled(lambda q, k, v: ring_attention(q, k, v, ring=ring).cos())
        with torch.no_grad():
            assert torch.equal(program(*own), ring.attention(*own)[0].cos())

    on_ranks(on_rank, 1)


def test_autocast():
    def on_rank(ring):
        program = compiled(lambda *qkv: ring_attention(*qkv, ring=ring))
        own = example(dtype="float32")[:3]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = program(*own)
        assert torch.equal(out, ring.attention(*(x.bfloat16() for x in own))[0])

    on_ranks(on_rank, 1)


def test_a_checkpointed_layer_runs_attention_once(monkeypatch):
    tensors = example(value_dim=4)[:3]

    def on_rank(ring):
        def layer(q, k, v):
            return ring_attention(q.sin(), k, v, ring=ring, scale=0.5).cos()

        def program(q, k, v):
            for _ in range(2):
                q = checkpoint(layer, q, k, v, use_reentrant=False, context_fn=checkpoint_contexts)
            return q.sum()

        wanted = gradients(program, ring, tensors)
        calls = _calls_of(ring, monkeypatch)
        assert_same(gradients(compiled(program), ring, tensors), wanted)
        assert calls == [("attention", 0.5)] * 2 + [("attention_backward", 0.5)] * 2

    on_ranks(on_rank, 1)


def test_a_compiled_backward_pass():
    def on_rank(ring):
        wanted = gradients(loss, ring, example()[:3], ring, {})
        own = leaves(ring, example()[:3])
        result = loss(*own, ring, {})
        with torch._dynamo.compiled_autograd._enable(compiled_with("aot_eager")):
            result.backward()
        assert_same([x.grad for x in own], wanted)

    def compiled_with(backend):
        return torch.compile(backend=backend, fullgraph=True)

    on_ranks(on_rank, 1)


def test_an_exported_program():
    def on_rank(ring):
        class Layer(torch.nn.Module):
            def forward(self, q, k, v):
                return ring_attention(q, k, v, ring=ring, causal=True)

        own = tuple(example()[:3])
        program = torch.export.export(Layer(), own).module()
        assert torch.equal(program(*own), ring.attention(*own, causal=True)[0])

    on_ranks(on_rank, 1)


# Errors come out of compiled programs as what they were.


def _program(q, k, v, ring):
    return ring_attention(q, k, v, ring=ring).sum()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda q, k, v: (q, k[..., :3], v), "k: expected the head_dim of q"),
        (lambda q, k, v: (q[0], k, v), r"q: expected shape \[batch, rows, heads, dim\]"),
        (lambda q, k, v: (q, k, v[0]), r"v: expected shape \[batch, rows, heads, dim\]"),
        (lambda q, k, v: (q, k.float(), v), "k: expected the dtype of q"),
        (lambda q, k, v: (q[:, :, :3], k, v), "q: expected a multiple of k's 2 heads"),
    ],
)
def test_tensors_that_do_not_fit(change, text):
    with pytest.raises(ConfigError, match=text):
        on_ranks(lambda ring: compiled(_program)(*change(*example()[:3]), ring), 1)


def test_options_that_are_wrong():
    def call(**options):
        program = compiled(lambda *qkv: ring_attention(*qkv, **options))
        return lambda ring: program(*example()[:3])

    def on_rank(ring):
        for wrong, kind, text in (
            ({"window": (1, 2, 3)}, ConfigError, "window: expected"),
            ({"softcap": -1.0}, ConfigError, "softcap: expected"),
            ({"documents": [0, 99]}, ConfigError, "documents: expected"),
            ({"prefix": -1}, ConfigError, "prefix: expected"),
            ({"causal": "yes"}, Exception, "causal"),
            ({"prefix": 1.5}, Exception, "prefix"),
        ):
            torch._dynamo.reset()
            with pytest.raises(kind, match=text):
                call(ring=ring, **wrong)(ring)

    on_ranks(on_rank, 1)


def test_a_ring_that_is_closed():
    def on_rank(ring):
        program, own = compiled(_program), leaves(ring, example()[:3])
        result = program(*own, ring)
        ring.close()
        for call in (lambda: program(*own, ring), result.backward):
            with pytest.raises(TransportError, match="the ring of rank 0 is closed"):
                call()

    on_ranks(on_rank, 1)


def test_a_failure_in_a_pass():
    from ringrt_backends.reference import ReferenceBackend

    def on_rank(ring, monkeypatch):
        program, own = compiled(_program), example()[:3]
        program(*own, ring)

        def fail(*arguments, **named):
            raise OSError("broken")

        monkeypatch.setattr(ReferenceBackend, "accumulate", fail)
        program(*own, ring)

    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        pytest.raises(ringrt.KernelError, match="OSError: broken"),
    ):
        on_ranks(lambda ring: on_rank(ring, monkeypatch), 1)


def test_double_backward_is_refused():
    def on_rank(ring):
        own = leaves(ring, example()[:3])
        [dq] = torch.autograd.grad(compiled(loss)(*own, ring, {}), own[:1], create_graph=True)
        dq.sum().backward()

    with pytest.raises((Unsupported, RuntimeError), match="double backward"):
        on_ranks(on_rank, 1)
