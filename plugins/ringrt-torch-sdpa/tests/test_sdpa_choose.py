"""Which kernel computes what, as a table."""

from __future__ import annotations

import pytest
from ringrt_torch_sdpa.choose import NAMES, Choice, Machine, choose


def machine(**changes):
    fields = {"capability": 90, "cudnn": 91700, "flash": True, "efficient": True}
    return Machine(**fields | changes)


TABLE = [
    # dtype, head_dim, value_dim, machine, what is chosen for forward, backward, one key
    ("bfloat16", 128, 128, machine(), "cudnn flash flash"),
    ("float16", 64, 64, machine(), "cudnn flash flash"),
    ("float16", 64, 64, machine(capability=100), "cudnn flash flash"),
    ("float16", 64, 64, machine(capability=103), "cudnn flash flash"),
    ("float16", 64, 64, machine(capability=120), "flash flash flash"),
    ("float16", 64, 64, machine(capability=80), "flash flash flash"),
    ("float16", 64, 64, machine(capability=75), "efficient efficient efficient"),
    ("float32", 64, 64, machine(), "efficient efficient efficient"),
    ("float32", 64, 64, machine(capability=70), "efficient efficient efficient"),
    ("bfloat16", 192, 128, machine(), "flash flash flash"),
    ("bfloat16", 128, 192, machine(), "flash flash flash"),
    ("bfloat16", 129, 64, machine(), "flash flash flash"),
    ("bfloat16", 256, 256, machine(), "flash flash flash"),
    ("bfloat16", 64, 64, machine(cudnn=91501), "cudnn flash flash"),
    ("bfloat16", 64, 64, machine(cudnn=91500), "flash flash flash"),
    ("bfloat16", 64, 64, machine(cudnn=0), "flash flash flash"),
    ("bfloat16", 64, 64, machine(flash=False), "cudnn efficient efficient"),
    ("bfloat16", 64, 64, machine(flash=False, cudnn=0), "efficient efficient efficient"),
    ("bfloat16", 192, 192, machine(capability=89), "flash flash flash"),
    ("bfloat16", 193, 64, machine(capability=89), "flash efficient flash"),
    ("bfloat16", 64, 224, machine(capability=86), "flash efficient flash"),
    ("bfloat16", 225, 64, machine(capability=120), "flash flash flash"),
    ("bfloat16", 208, 208, machine(capability=80), "flash flash flash"),
]


@pytest.mark.parametrize(("dtype", "head_dim", "value_dim", "machine", "names"), TABLE)
def test_choice(dtype, head_dim, value_dim, machine, names):
    assert choose(dtype, head_dim, value_dim, machine) == Choice(*names.split())


ONLY = [
    ("cudnn", "bfloat16", 64, machine(), "cudnn cudnn flash"),
    ("cudnn", "bfloat16", 64, machine(capability=80), "cudnn cudnn flash"),
    ("cudnn", "bfloat16", 64, machine(flash=False), "cudnn cudnn efficient"),
    ("flash", "bfloat16", 64, machine(), "flash flash flash"),
    ("efficient", "bfloat16", 64, machine(), "efficient efficient efficient"),
]


@pytest.mark.parametrize(("only", "dtype", "dim", "machine", "names"), ONLY)
def test_one_kernel_for_both_passes(only, dtype, dim, machine, names):
    assert choose(dtype, dim, dim, machine, only) == Choice(*names.split())


REFUSED = [
    (None, "float64", 64, 64, machine(), "float64 is not implemented"),
    (None, "float16", 257, 64, machine(), "head_dim 257: it goes to 256"),
    (None, "float16", 64, 300, machine(), "value_dim 300: it goes to 256"),
    (None, "bfloat16", 64, 64, machine(capability=75), "efficient: bfloat16 on sm_75"),
    (None, "float32", 64, 64, machine(efficient=False), "flash: float32: it takes float16"),
    ("flash", "float32", 64, 64, machine(), "flash: float32: it takes float16 and bfloat16"),
    ("flash", "float16", 64, 64, machine(flash=False), "flash: not in this PyTorch"),
    ("flash", "float16", 64, 64, machine(capability=75), "flash: needs sm_80, this GPU is sm_75"),
    ("flash", "float16", 200, 64, machine(capability=89), "no backward pass on sm_89"),
    ("cudnn", "float16", 64, 136, machine(), "cudnn: head_dim 136: it goes to 128"),
    ("cudnn", "float16", 64, 64, machine(cudnn=91000), "cuDNN is older than 9.15.1"),
    ("efficient", "float16", 64, 64, machine(efficient=False), "efficient: switched off"),
]


@pytest.mark.parametrize(("only", "dtype", "head_dim", "value_dim", "machine", "words"), REFUSED)
def test_refusals_are_in_words(only, dtype, head_dim, value_dim, machine, words):
    answer = choose(dtype, head_dim, value_dim, machine, only)
    assert isinstance(answer, str)
    assert words in answer


@pytest.mark.parametrize("capability", [70, 75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_chosen_unasked_never_depends_on_chance(dtype, capability):
    for cudnn in (0, 91700):
        for dim in (8, 128, 208, 256):
            found = choose(dtype, dim, dim, machine(capability=capability, cudnn=cudnn))
            assert isinstance(found, str) or found.backward != "cudnn"
            assert isinstance(found, str) or {found.forward, found.one_key} <= set(NAMES)
            assert isinstance(found, str) or found.one_key != "cudnn"
