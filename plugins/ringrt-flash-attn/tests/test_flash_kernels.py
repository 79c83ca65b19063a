"""What each version does, what it refuses, which releases are taken, and how it is called."""

from __future__ import annotations

import flash_standins
import pytest
import torch
from flash_support import problem
from ringrt_flash_attn.kernels import Flash2, Flash3, Flash4

from ringrt.errors import BackendUnavailable


def without(function, name):
    """A function of these parameters save one."""
    known = [each for each in flash_standins.parameters(function) if each != name]
    return eval(f"lambda {', '.join(f'{each}=None' for each in known)}: None")


@pytest.fixture
def kernel(made):
    """`kernel(4, 90)` alone."""
    return lambda version, capability=None: made(version, capability=capability)._kernels[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("version", [2, 3, 4])
def test_wide_dtypes_are_refused_by_name(kernel, version, dtype):
    assert kernel(version).refusal(problem(dtype=dtype)) == (
        f"dtype {dtype}; it does float16 and bfloat16"
    )


@pytest.mark.parametrize(
    ("version", "capability", "head_dim", "value_dim", "widths"),
    [
        (2, 80, 64, 64, (64, 64)),
        (2, 80, 1, 17, (24, 24)),
        (2, 80, 256, 100, (256, 256)),
        (3, 90, 100, 100, (104, 104)),
        (3, 90, 192, 128, (192, 192)),
        (4, 90, 192, 128, (192, 192)),
        (4, 90, 250, 256, (256, 256)),
        (4, 100, 128, 65, (128, 128)),
        (4, 100, 130, 64, (192, 128)),
        (4, 103, 192, 128, (192, 128)),
        (4, 110, 8, 8, (8, 8)),
    ],
)
def test_dims_are_padded_to_what_both_passes_take(
    kernel, version, capability, head_dim, value_dim, widths
):
    made = kernel(version, capability)
    asked = problem(head_dim=head_dim, value_dim=value_dim)
    assert made.refusal(asked) is None
    assert made.widths(asked) == widths


@pytest.mark.parametrize(
    ("version", "capability", "head_dim", "value_dim", "words"),
    [
        (2, 80, 257, 8, "head_dim 257; it does up to 256"),
        (2, 80, 8, 264, "value_dim 264; it does up to 256"),
        (3, 90, 193, 8, "head_dim 193; it does up to 192"),
        (3, 90, 64, 200, "value_dim 200; it does up to 192"),
        (4, 90, 8, 257, "value_dim 257; it does up to 256"),
        (4, 100, 193, 128, "head_dim 193 with value_dim 128 on sm_100"),
        (4, 100, 128, 136, "head_dim 128 with value_dim 136 on sm_100"),
        (4, 103, 256, 256, "head_dim 256 with value_dim 256 on sm_103"),
    ],
)
def test_dims_beyond_what_both_passes_take_are_refused(
    kernel, version, capability, head_dim, value_dim, words
):
    asked = problem(head_dim=head_dim, value_dim=value_dim)
    assert words in kernel(version, capability).refusal(asked)


def test_softcap_is_for_versions_2_and_3(kernel):
    asked = problem(softcap=20.0)
    assert kernel(2).refusal(asked) is None
    assert kernel(3).refusal(asked) is None
    assert kernel(4).refusal(asked) == "softcap"


def test_a_release_whose_backward_ignores_deterministic_is_refused(put):
    put("flash_attn_interface", flash_standins.FLASH3_EARLY)
    with pytest.raises(BackendUnavailable) as caught:
        Flash3(90)
    assert str(caught.value) == (
        "FlashAttention 3: this release's flash_attn_interface does not take window_size_left, "
        "window_size_right: build a later flash_attn_3, whose backward adds up in a fixed order"
    )


def test_a_release_whose_windows_are_one_tuple_is_refused(put):
    early = {
        "_flash_attn_forward": lambda q, k, v, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, return_softmax: None,
        "_flash_attn_backward": flash_standins.FLASH2["_flash_attn_backward"],
    }  # fmt: skip
    put("flash_attn.flash_attn_interface", early)
    with pytest.raises(BackendUnavailable, match="window_size_right: pip install 'flash-attn>=2"):
        Flash2(80)


@pytest.mark.parametrize("name", ["deterministic", "learnable_sink", "window_size_left"])
def test_a_release_of_version_4_before_its_backward_was_of_fixed_order_is_refused(put, name):
    backward = without(flash_standins.flash4_backward, name)
    put("flash_attn.cute.interface", flash_standins.FLASH4 | {"_flash_attn_bwd": backward})
    with pytest.raises(BackendUnavailable, match=f"does not take {name}: pip install"):
        Flash4(100)


def test_a_module_that_cannot_be_imported_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flash_attn_interface", None)
    with pytest.raises(BackendUnavailable, match=r"^FlashAttention 3: flash_attn_interface: Mod"):
        Flash3(90)


def test_a_module_without_the_functions_is_one_line(put):
    put("flash_attn.cute.interface", {})
    with pytest.raises(BackendUnavailable, match=r"AttributeError: .*_flash_attn_fwd"):
        Flash4(90)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_gradients_are_asked_for_in_a_fixed_order(kernel, version):
    made, scores = kernel(version), (0.5, 0.0, (None, 0))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    out, lse = made.forward(q, k, v, scores)
    passes = [made.backward(out, q, k, v, out, lse, scores) for _ in range(2)]
    for first, second in zip(*passes, strict=True):
        assert torch.equal(first, second)


def test_what_a_stand_in_adds_up_by_chance_differs():
    x = torch.ones(4)
    assert not torch.equal(flash_standins.ordered(x, False), flash_standins.ordered(x, False))


@pytest.mark.parametrize(
    ("version", "window", "given"),
    [
        (2, (None, None), (-1, -1)),
        (2, (None, 0), (-1, 0)),
        (3, (3, None), (3, -1)),
        (3, (0, 2), (0, 2)),
        (4, (None, None), (None, None)),
        (4, (None, 0), (None, 0)),
        (4, (3, None), (3, None)),
    ],
)
def test_no_bound_is_told_as_each_version_takes_it(kernel, version, window, given):
    made, scores = kernel(version), (0.5, 0.0, window)
    q = torch.zeros(1, 6, 2, 16, dtype=torch.float16)
    out, lse = made.forward(q, q, q, scores)
    made.backward(out, q, q, q, out, lse, scores)
    assert [call["window"] for call in flash_standins.CALLS] == [given, given]
