"""The stand-ins are held to the real operators: their schemas, what these say of tensors without
content, and plain attention."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from ringrt_torch_sdpa.schemas import CPU, CUDNN, EFFICIENT, FLASH, SCHEMAS, operators
from sdpa_stand_ins import STAND_INS, real

from ringrt.errors import BackendUnavailable


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_operators_are_those_that_the_plugin_was_written_for(name):
    assert str(real(name)._schema) == f"aten::{name}{SCHEMAS[name]}"


def test_operators_come_with_those_of_backward():
    assert set(operators((CPU, FLASH))) == {CPU, f"{CPU}_backward", FLASH, f"{FLASH}_backward"}
    assert operators((CPU,))[CPU] is real(CPU)


def other(schema):
    return SimpleNamespace(default=SimpleNamespace(_schema=schema))


@pytest.mark.parametrize("name", [FLASH, f"{FLASH}_backward"])
def test_an_operator_that_has_changed_is_not_called(name):
    own = {each: getattr(torch.ops.aten, each) for each in (FLASH, f"{FLASH}_backward")}
    changed = SCHEMAS[name].replace("bool is_causal", "bool causal")
    for found in (other(f"aten::{name}{changed}"), None):
        aten = SimpleNamespace(**own | {name: found})
        with pytest.raises(BackendUnavailable, match=f"has another aten::{name} than"):
            operators((FLASH,), aten)


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_takes_what_the_operator_takes(name):
    arguments = real(name)._schema.arguments
    parameters = inspect.signature(STAND_INS[name]).parameters.values()
    assert [x.name for x in parameters] == [x.name for x in arguments]
    for mine, its in zip(parameters, arguments, strict=True):
        assert (mine.kind is mine.KEYWORD_ONLY) == its.kwarg_only
        assert (mine.default is not mine.empty) == its.has_default_value(), mine.name
        if its.has_default_value():
            assert mine.default == its.default_value


def tensors(dtype, heads=(4, 2), rows=40, keys=40, dims=(16, 16), device="cpu"):
    """q, k, v and dout, `[batch, heads, rows, dim]`."""
    torch.manual_seed(0)
    shapes = ((heads[0], rows, dims[0]), (heads[1], keys, dims[0]), (heads[1], keys, dims[1]),
              (heads[0], rows, dims[1]))  # fmt: skip
    return [torch.randn(2, *shape).to(dtype).to(device) for shape in shapes]


def arguments_of(name, dtype, device, causal):
    """Those of a forward call by the plugin, and those of the backward call after it."""
    heads, dims = ((4, 4), (16, 24)) if name == EFFICIENT else ((4, 2), (16, 16))
    q, k, v, dout = tensors(dtype, heads, dims=dims, device=device)
    number = torch.empty((), dtype=torch.int64, device=device)
    if name == CUDNN:
        forward = (q, k, v, None, True, 0.0, causal, False)
        rest = (number, number, None, None, None, 40, 40, 0.0, causal)
    elif name == FLASH:
        state = torch.empty(2, dtype=torch.uint64, device=device)
        forward = (q, k, v, 0.0, causal, False)
        rest = (None, None, 40, 40, 0.0, causal, state, number)
    else:
        forward = (q, k, v, None, True, 0.0, causal)
        rest = (number, number, 0.0, [True, True, True, False], causal)
    before = (dout, q, k, v, None) if name == EFFICIENT else (dout, q, k, v)
    return forward, before, rest


def look(results):
    """Shapes and dtypes; numbers of rows as they are; debug masks aside, which nobody reads."""
    return [
        (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x
        for x in list(results)[: 8 if len(results) == 9 else None]
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [CUDNN, FLASH, EFFICIENT])
def test_a_stand_in_returns_what_the_operator_returns(name, causal):
    """Both passes, called as the plugin calls them. Tensors on the device "meta" have no content:
    the operators themselves say what they would return."""
    found = {}
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        for device, table in (("cpu", STAND_INS), ("meta", {})):
            forward, before, rest = arguments_of(name, torch.bfloat16, device, causal)
            call = table.get(name) or real(name)
            call_back = table.get(f"{name}_backward") or real(f"{name}_backward")
            out, lse, *more = call(*forward, scale=0.25)
            gradients = call_back(*before, out, lse, *rest, scale=0.25)
            found[device] = look((out, lse, *more)), look(gradients)
    finally:
        torch._C._set_deterministic_algorithms(False)
    assert found["cpu"] == found["meta"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [CUDNN, FLASH, EFFICIENT])
def test_a_stand_in_is_attention(name, causal):
    dtype = torch.float32 if name == EFFICIENT else torch.float16
    (q, k, v, *options), *_ = arguments_of(name, dtype, "cpu", causal)
    out, lse, *_ = STAND_INS[name](q, k, v, *options, scale=0.3)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal, scale=0.3, enable_gqa=True
    )
    bound = 2e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(out.double(), want, rtol=0, atol=bound)
    assert lse.dtype == torch.float32
    assert lse.reshape(2, 4, -1)[0, 0, 1] > -10


def test_what_is_particular_about_each():
    q, k, v, _ = tensors(torch.float16, rows=8, keys=12)
    first = {}
    for name in (CUDNN, FLASH):
        (*_, causal, debug), *_ = arguments_of(name, torch.float16, "cpu", True)
        fixed = (None, True, 0.0) if name == CUDNN else (0.0,)
        first[name] = STAND_INS[name](q, k, v, *fixed, causal, debug, scale=0.25)[1]
    # Row 0 sees one key where causal begins top-left, and 5 of 12 where it ends bottom-right.
    score = (q[0, 0, 0].float() @ k[0, 0, 0].float()).item() * 0.25
    assert first[CUDNN][0, 0, 0, 0].item() == pytest.approx(score, abs=1e-6)
    assert first[FLASH][0, 0, 0].item() > score
    endless = torch.full_like(k, -float("inf"))
    ones = torch.ones_like(q)
    assert STAND_INS[FLASH](ones, endless, v, scale=1.0)[1].isposinf().all()
    wide = [x.float().repeat_interleave(2, dim=1) for x in (endless, v)]
    lse = STAND_INS[EFFICIENT](ones.float(), *wide, None, True, scale=1.0)[1]
    assert (lse[..., :8] == 0).all()
    assert lse.shape[2] == 32
    assert lse[..., 8:].isposinf().all()
