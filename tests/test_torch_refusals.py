"""What ringrt.torch refuses, by name: on the rank that is wrong as what it is, on the others as a
`RankMismatch`."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import torch
from torch_support import example, leaves, on_ranks

from ringrt import Mask
from ringrt.errors import ConfigError, HandoffError, RankMismatch, TransportError, Unsupported
from ringrt.torch import ring_attention

pytestmark = pytest.mark.timeout(120)


def _qkv(length=21, **shape):
    return example(length, **shape)[:3]


def _fails(kind, text, call, ranks=1):
    with pytest.raises(kind, match=text):
        on_ranks(call, ranks)


REFUSED = {
    "causal": ({"causal": "yes"}, ConfigError, "causal: expected True or False"),
    "window": ({"window": (1, 2, 3)}, ConfigError, "window: expected"),
    "prefix": ({"prefix": 1.5}, ConfigError, "prefix: expected a whole number"),
    "scale": ({"scale": "small"}, ConfigError, "scale: expected a number"),
    "infinite scale": ({"scale": float("inf")}, ConfigError, "scale: expected a finite number"),
    "softcap": ({"softcap": -1.0}, ConfigError, "softcap: expected"),
    "softcap True": ({"softcap": True}, ConfigError, "softcap: expected a number"),
    "mask": ({"mask": [1]}, ConfigError, "mask: expected a ringrt.Mask"),
    "mask beside": ({"mask": Mask([]), "prefix": 1}, ConfigError, "no prefix beside it"),
    "mask beside documents": ({"mask": Mask([]), "documents": [0, 3]}, ConfigError, "no documents"),
    "ragged documents": ({"documents": [[0, 3], [4]]}, ConfigError, "documents: expected"),
    "documents in words": ({"documents": "all"}, ConfigError, "documents: expected"),
    "broken documents": ({"documents": [0.5, 3]}, ConfigError, "documents: expected whole"),
    "either way": ({"documents": ([0, 3], [3, 9])}, ConfigError, "may mean either"),
    "documents on one side": ({"documents": ([0, 3], None)}, ConfigError, "on both sides"),
    "sink": ({"sink": torch.zeros(3)}, ConfigError, r"sink: expected shape \[q_heads\]"),
    "sink as a list": ({"sink": [0, 1]}, ConfigError, "sink: expected a torch.Tensor, got list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_by_name_and_the_others_told(name):
    options, kind, text = REFUSED[name]
    heard = {}

    def on_rank(ring):
        try:
            ring_attention(*leaves(ring, _qkv()), ring=ring, **options if ring.rank == 1 else {})
        except Exception as error:
            heard[ring.rank] = error
            raise

    _fails(kind, text, on_rank, 2)
    assert type(heard[0]) is RankMismatch
    assert "fine on rank 0" in str(heard[0])


def _vmapped(ring, own):
    torch.vmap(lambda *x: ring_attention(*x, ring=ring))(*(torch.stack([x, x]) for x in own))


def _twice(ring, own):
    out = ring_attention(*own, ring=ring)
    [dq] = torch.autograd.grad(out.sin().sum(), own[:1], create_graph=True)
    dq.sum().backward()


def _transformed(ring, own):
    torch.func.grad(lambda *x: ring_attention(*x, ring=ring).sum())(*(x.detach() for x in own))


def _on_meta(ring, own):
    ring_attention(own[0].to("meta"), *own[1:], ring=ring)


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (_vmapped, Unsupported, "vmap: not implemented"),
        (_twice, Unsupported, "double backward: not implemented"),
        (_transformed, Unsupported, "torch.func transforms: not implemented"),
        (_on_meta, HandoffError, "q: on the meta device"),
    ],
)
def test_what_one_rank_does_wrong_is_told_to_the_others(wrong, kind, text):
    heard = {}

    def on_rank(ring):
        own = leaves(ring, _qkv())
        try:
            if ring.rank == 1:
                wrong(ring, own)
            if wrong is _twice:
                torch.autograd.grad(ring_attention(*own, ring=ring).sin().sum(), own[:1])
            ring_attention(*own, ring=ring)
        except Exception as error:
            heard[ring.rank] = error
            raise

    _fails(kind, text, on_rank, 2)
    assert type(heard[0]) is RankMismatch
    assert text in str(heard[0])


def test_autocast_makes_no_numbers_of_whole_ones():
    def on_rank(ring):
        with torch.autocast("cpu", torch.bfloat16):
            ring_attention(*(x.int() for x in _qkv()), ring=ring)

    _fails(ConfigError, "q: expected dtype float16", on_rank)


def test_documents_that_reach_too_far():
    call = lambda ring: ring_attention(*_qkv(length=9), ring=ring, documents=[0, 40])  # noqa: E731
    _fails(ConfigError, "documents: expected ranges within the 9 query rows", call)


@pytest.mark.parametrize("name", "qkv")
def test_tensors_that_do_not_fit(name):
    def call(change):
        tensors = dict(zip("qkv", _qkv(), strict=True))
        tensors[name] = change(tensors[name])
        return lambda ring: ring_attention(*tensors.values(), ring=ring)

    _fails(ConfigError, f"{name}: expected a torch.Tensor, got ndarray", call(lambda x: x.numpy()))
    _fails(ConfigError, f"{name}: expected shape", call(lambda x: x[0]))
    _fails(ConfigError, "expected the dtype of q", call(lambda x: x.float()))

    class Spread(torch.Tensor):
        def to_local(self):
            return self

    _fails(HandoffError, f"{name}: .*to_local", call(lambda x: x.as_subclass(Spread)))


def test_a_ring_that_is_none_is_closed_or_gone():
    q, k, v = _qkv()
    with pytest.raises(ConfigError, match="ring: expected a ringrt.Ring, got int"):
        ring_attention(q, k, v, ring=7)

    def on_rank(ring):
        own = leaves(ring, (q, k, v))
        kept = ring_attention(*own, ring=ring).sum()
        ring.close()
        with pytest.raises(TransportError, match="the ring of rank 0 is closed"):
            ring_attention(*own, ring=ring)
        with pytest.raises(TransportError, match="the ring of rank 0 is closed"):
            kept.backward()

    on_ranks(on_rank, 1)
    kept = []

    def leave_behind(ring):
        kept.append(ring_attention(*leaves(ring, (q, k, v)), ring=ring).sum())

    on_ranks(leave_behind, 1)
    with pytest.raises(TransportError, match="closed|gone"):
        kept[0].backward()


def test_a_ring_that_is_gone_is_named():
    from ringrt.ring_keys import key_of, ring_of

    class Held:
        pass

    held = Held()
    first, second = key_of(held), key_of(held)
    assert first != second
    assert ring_of(first) is ring_of(second) is held
    del held
    with pytest.raises(TransportError, match=f"ring {first} of this process is gone"):
        ring_of(first)


def test_double_backward_is_refused():
    def on_rank(ring):
        own = leaves(ring, _qkv())
        [dq] = torch.autograd.grad(
            ring_attention(*own, ring=ring).sin().sum(), own[:1], create_graph=True
        )
        dq.sum().backward()

    _fails(Unsupported, "double backward: not implemented in ringrt.torch", on_rank)


def test_forward_derivatives_are_refused():
    def on_rank(ring):
        q, k, v = _qkv()
        torch.func.jvp(lambda k: ring_attention(q, k, v, ring=ring), (k,), (k,))

    _fails(Unsupported, "k: forward-mode derivatives are not implemented", on_rank)


def test_vmap_and_transforms_of_functions_are_refused():
    def mapped(ring):
        own = [torch.stack([x, x]) for x in _qkv()]
        torch.vmap(lambda *x: ring_attention(*x, ring=ring))(*own)

    def transformed(ring):
        torch.func.grad(lambda *x: ring_attention(*x, ring=ring).sum())(*_qkv())

    _fails(Unsupported, "vmap: not implemented in ringrt.torch.ring_attention", mapped)
    _fails(Unsupported, "torch.func transforms: not implemented", transformed)


def test_an_older_pytorch_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "ringrt.torch.ops")
    monkeypatch.setitem(sys.modules, "torch._library.effects", None)
    text = f"PyTorch {re.escape(torch.__version__)} cannot keep operators in order"
    with pytest.raises(ImportError, match=text):
        importlib.import_module("ringrt.torch.ops")
