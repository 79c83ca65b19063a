"""Arrays of any framework: in without a copy, out as the same kind; what cannot be handed over is
one clear line."""

from __future__ import annotations

import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import oracle
import ringrt
from ringrt.dlpack import giver, rewriter, take
from ringrt.dlpack_capsule import tensor_of
from ringrt.errors import ConfigError, HandoffError, RankMismatch, Unsupported
from support import assert_close, random_qkv


def to_torch(x):
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def from_torch(x):
    if x.dtype is torch.bfloat16:
        return x.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


class Standard:
    """An array of a library that follows the array API standard, and keeps NumPy arrays inside.
    `legacy`: one from before DLPack 1.0, which knows of no versions."""

    def __init__(self, array, legacy=False):
        self.array, self.legacy = array, legacy

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **wishes):
        if self.legacy and wishes.keys() - {"stream"}:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**wishes)

    def __array_namespace__(self):
        return Namespace


class Namespace:
    @staticmethod
    def from_dlpack(x):
        return Standard(np.from_dlpack(x))


KINDS = {
    "torch": (to_torch, from_torch, torch.Tensor),
    "jax": (jax.numpy.asarray, np.asarray, jax.Array),
    "standard": (Standard, lambda x: x.array, Standard),
    "legacy": (lambda x: Standard(x, legacy=True), lambda x: x.array, Standard),
    "numpy": (lambda x: x, lambda x: x, np.ndarray),
}
DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_its_gradients_in_every_kind(kind, dtype):
    if kind in ("standard", "legacy") and dtype == "bfloat16":
        kind = "torch"  # NumPy inside cannot export it.
    into, out_of, cls = KINDS[kind]
    q, k, v = random_qkv(31, q_heads=4, kv_heads=2, value_dim=5, dtype=dtype)
    dout = random_qkv(31, q_heads=4, head_dim=5, dtype=dtype, seed=1)[0]
    arrays = [into(x) for x in (q, k, v)]
    out, lse = ringrt.attention(*arrays, ranks=3, causal=True)
    assert isinstance(out, cls)
    assert isinstance(lse, cls)
    assert out_of(out).dtype == q.dtype
    assert out_of(lse).dtype == np.float32
    result = out_of(out), out_of(lse)
    assert_close(result, oracle.attention(q, k, v, causal=True), dtype)
    gradients = ringrt.attention_backward(into(dout), *arrays, out, lse, ranks=3, causal=True)
    plain = ringrt.attention_backward(dout, q, k, v, *result, ranks=3, causal=True)
    for got, want in zip(gradients, plain, strict=True):
        assert isinstance(got, cls)
        np.testing.assert_array_equal(out_of(got), want)


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "int32", "uint16", "bool"])
def test_torch_tensors_are_taken_where_they_lie(dtype):
    x = torch.zeros(2, 3, 4, dtype=getattr(torch, dtype))
    array = take("x", x)
    assert array.dtype.name == dtype
    assert array.ctypes.data == x.data_ptr()
    back = giver("x", x)(array)
    assert back.data_ptr() == x.data_ptr()
    assert back.dtype is x.dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_arrays_are_taken_where_they_lie_and_are_read_only(dtype):
    x = jax.numpy.zeros((64, 4), dtype)
    array = take("x", x)
    assert array.dtype.name == dtype
    assert array.ctypes.data == x.unsafe_buffer_pointer()
    assert not array.flags.writeable
    back = giver("x", x)(array)
    assert back.dtype == x.dtype
    assert back.unsafe_buffer_pointer() != x.unsafe_buffer_pointer(), "JAX's own is not shared"


def test_jax_arrays_are_never_written():
    q, k, v = random_qkv(24)
    arrays = [jax.numpy.asarray(x) for x in (q, k, v)]
    out, lse = ringrt.attention(*arrays, ranks=2, causal=True)
    ringrt.attention_backward(out, *arrays, out, lse, ranks=2, causal=True)
    for kept, x in zip(arrays, (q, k, v), strict=True):
        np.testing.assert_array_equal(np.asarray(kept), x)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_strides(data):
    """Transposed, sliced, broadcast: read where they lie."""
    q, k, v = random_qkv(13, head_dim=4)
    expected = oracle.attention(q, k, v)

    def odd(x):
        order = data.draw(st.permutations(range(4)))
        back = np.argsort(order)
        moved = to_torch(np.ascontiguousarray(x.transpose(order))).permute(*back.tolist())
        steps = [data.draw(st.integers(1, 2)) for _ in range(4)]
        wide = torch.full([n * s for n, s in zip(x.shape, steps, strict=True)], torch.nan)
        view = wide[tuple(slice(None, None, s) for s in steps)]
        view.copy_(moved)
        return data.draw(st.sampled_from([moved, view]))

    arrays = [odd(x) for x in (q, k, v)]
    out, lse = ringrt.attention(*arrays, ranks=2, backend="reference")
    assert_close((out.numpy(), lse.numpy()), expected)


def test_a_broadcast_gradient_is_read_as_it_is():
    """What `out.sum().backward()` hands over: strides of 0."""
    q, k, v = random_qkv(12)
    tensors = [to_torch(x) for x in (q, k, v)]
    out, lse = ringrt.attention(*tensors, ranks=2)
    dout = torch.ones(()).expand(out.shape)
    dq, _, _ = ringrt.attention_backward(dout, *tensors, out, lse, ranks=2)
    expected, _, _ = oracle.gradients(np.ones(out.shape), q, k, v)
    np.testing.assert_allclose(dq.numpy(), expected, atol=3e-6)


def test_results_with_negative_strides_are_copied():
    """PyTorch ends the process on them."""
    x = torch.zeros(4, 4)
    turned = np.arange(16.0).reshape(4, 4)[::-1]
    assert giver("x", x)(turned).tolist() == turned.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_of_the_kind_of_the_whole(kind):
    into, out_of, cls = KINDS[kind]
    whole = np.arange(44, dtype=np.float32).reshape(1, 11, 1, 4)

    def on_rank(ring):
        shard = ring.shard(into(whole))
        assert isinstance(shard, cls)
        back = ring.unshard(shard)
        assert isinstance(back, cls)
        return out_of(shard), out_of(back)

    for rank, (shard, back) in enumerate(ringrt.run_threads(on_rank, 3, partition="zigzag")):
        assert shard.shape[1] in (3, 4), rank
        np.testing.assert_array_equal(back, whole)


def test_a_shard_of_a_tensor_shares_its_memory():
    whole = torch.zeros(1, 12, 1, 4)
    shards = ringrt.run_threads(lambda ring: ring.shard(whole), 3)
    for rank, shard in enumerate(shards):
        shard += rank
    assert whole[0, :, 0, 0].tolist() == [0, 1, 2] * 4


def test_documents_and_sinks_may_be_tensors():
    q, k, v = random_qkv(20)
    edges, sink = torch.tensor([0, 7, 20], dtype=torch.int32), torch.tensor([0.5, -1.0])
    out, lse = ringrt.attention(q, k, v, ranks=2, documents=edges, sink=sink)
    want = ringrt.attention(q, k, v, ranks=2, documents=[0, 7, 20], sink=np.float32([0.5, -1.0]))
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(lse, want[1])
    both = ringrt.attention(q, k, v, ranks=2, documents=(edges, edges), sink=sink)
    np.testing.assert_array_equal(both[0], out)


def test_kinds_may_be_mixed_and_the_result_is_like_q():
    q, k, v = random_qkv(9)
    out, _ = ringrt.attention(to_torch(q), jax.numpy.asarray(k), v, ranks=2)
    assert isinstance(out, torch.Tensor)


class Elsewhere(Standard):
    """On a device of DLPack's number `kind`."""

    def __init__(self, kind):
        super().__init__(np.zeros((1, 2, 1, 4), np.float32))
        self.kind = kind

    def __dlpack_device__(self):
        return self.kind, 3

    def __dlpack__(self, **wishes):
        capsule = super().__dlpack__(**wishes)
        tensor_of(capsule).device_type = self.kind
        return capsule


class Nothing:
    def __dlpack__(self, **wishes):
        return "no capsule"

    def __dlpack_device__(self):
        return 1, 0


class Nameless(Nothing):
    __array_namespace__ = None


PLAIN = torch.zeros(1, 2, 1, 4)
REFUSED = {
    "a gradient that would be lost": (
        PLAIN.clone().requires_grad_(),
        "q: a tensor that requires a gradient, which would be lost; call "
        "ringrt.torch.ring_attention, or pass q.detach()",
    ),
    "a device of nothing": (
        torch.zeros(1, 2, 1, 4, device="meta"),
        "q: a torch.Tensor cannot be handed over: Unknown device type meta",
    ),
    "sparse": (PLAIN.to_sparse(), "q: a torch.Tensor cannot be handed over: "),
    "ROCm": (Elsewhere(10), "q: on ROCm device 3, which no backend of ringrt can use"),
    "unknown": (Elsewhere(77), "q: on DLPack device type 77 device 3, which no backend"),
    "CUDA without CuPy": (Elsewhere(2), "q: on GPU 3, but (CuPy|there is no)"),
    "no capsule": (Nameless(), "q: a .*Nameless cannot be handed over: 'no capsule' is not a DLPack"),
    "no way": ([1.0], "q: a builtins.list cannot be handed over: it has no __dlpack__"),
}  # fmt: skip


class Wrapper(torch.Tensor):
    """A tensor whose elements are in another, as PyTorch's own wrappers are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(PLAIN if isinstance(x, cls) else x for x in args), **(kwargs or {}))


def deleted():
    x = jax.numpy.zeros((1, 2, 1, 4))
    x.delete()
    return x


REFUSED |= {
    "no memory": (Wrapper(PLAIN), "q: a .*Wrapper cannot be handed over: it has no memory of its"),
    "to be negated": (
        torch.zeros(1, 2, 1, 4, dtype=torch.complex64).conj().imag,
        r"q: a tensor whose elements are yet to be negated; pass q\.resolve_neg\(\)",
    ),
    "deleted": (deleted(), "q: a JAX array that has been deleted, or donated"),
    "a shape": (
        jax.ShapeDtypeStruct((2,), "float32"),
        "q: a jax.* cannot be handed over: it has no",
    ),
}


def test_an_empty_array_needs_no_memory():
    assert take("x", torch.empty(0, 3)).shape == (0, 3)


def test_a_subclass_of_numpy_s_array_is_read_as_one():
    matrix = np.arange(4.0).reshape(2, 2).view(np.matrix)
    assert type(take("x", matrix)) is np.ndarray
    assert np.shares_memory(take("x", matrix), matrix)


def test_results_in_jax_lie_on_the_device_of_the_input():
    """In a process of its own: the number of devices is fixed when JAX is first used."""
    code = """
import jax
jax.config.update("jax_num_cpu_devices", 3)
import ringrt
x = jax.device_put(jax.numpy.ones((1, 6, 1, 4)), jax.devices()[2])
out, lse = ringrt.attention(x, x, x, ranks=2)
gradients = ringrt.attention_backward(x, x, x, x, out, lse, ranks=2)
print({y.device.id for y in (out, lse, *gradients)})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "{2}", done.stderr


def test_results_that_are_written_again_are_not_jax_s():
    with pytest.raises(Unsupported, match="capture: not implemented for q of JAX"):
        rewriter("q", jax.numpy.zeros(3))
    assert rewriter("q", PLAIN)(np.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [">f4", "object"])
def test_shards_that_others_could_not_read_are_refused(dtype):
    def on_rank(ring):
        return ring.unshard(np.ones((1, 2), dtype if ring.rank == 1 else "f4"))

    with pytest.raises(ConfigError, match="x: expected elements in this machine's byte order"):
        ringrt.run_threads(on_rank, 2, timeout=20)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_handed_over(what):
    x, text = REFUSED[what]
    with pytest.raises(HandoffError, match=text):
        take("q", x)


def test_what_no_result_can_be_made_of_is_refused_before_anything_is_computed():
    with pytest.raises(HandoffError, match="q: nothing says how a .*Nothing is made of a result"):
        ringrt.attention(Nothing(), PLAIN, PLAIN, ranks=1)


def test_a_value_that_jax_traces_is_refused():
    def call(x):
        return ringrt.attention(x, x, x, ranks=1)[0]

    with pytest.raises(HandoffError, match=r"q: a value that JAX traces; call ringrt\.jax"):
        jax.jit(call)(jax.numpy.zeros((1, 2, 1, 4)))


def test_one_rank_s_array_that_cannot_be_handed_over_is_told_to_the_others():
    x = np.zeros((1, 2, 1, 4), np.float32)
    errors = {}

    def on_rank(ring):
        mine = PLAIN.clone().requires_grad_() if ring.rank == 1 else x
        try:
            ring.attention(mine, x, x)
        except ringrt.RingrtError as error:
            errors[ring.rank] = error

    ringrt.run_threads(on_rank, 3)
    assert isinstance(errors[1], HandoffError)
    for rank in (0, 2):
        assert isinstance(errors[rank], RankMismatch)
        assert "requires a gradient" in str(errors[rank])
