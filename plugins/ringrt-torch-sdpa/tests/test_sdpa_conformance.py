"""ringrt's own conformance suite: on the host's kernel, and on the stand-ins as on several GPUs."""

from __future__ import annotations

import pytest
from ringrt_torch_sdpa.choose import Machine
from ringrt_torch_sdpa.cuda import VARIABLE
from sdpa_support import HOPPER

from ringrt.conformance.suites import BACKEND_CHECKS, BackendSuite

TURING = Machine(capability=75, cudnn=91700, flash=True, efficient=True)

#: What a backend may refuse, in its words.
ALWAYS = ("softcap is not implemented", "contains_nan=False")
ON_A_GPU = (*ALWAYS, "float64 is not implemented")
IN_16_BITS = (*ON_A_GPU, "it takes float16 and bfloat16")

#: What is worth trying with every kernel by itself: where they differ.
FEW = (
    "float16", "two-bounds", "grouped-heads", "value-dim", "odd-dims", "odd-lengths", "scales",
    "infinite-scores", "seen-nan", "strided-inputs", "backward-float16", "backward-bands",
    "backward-grouped-heads", "backward-dims", "backward-scales",
    "backward-rows-that-see-nothing",
)  # fmt: skip
SOME_CHECKS = [check for check in BACKEND_CHECKS if check.name in FEW]


def run(name, check, words):
    outcome = BackendSuite(name).run(check)
    assert outcome.state != "failed", outcome.error
    if outcome.state == "refused":
        assert any(word in outcome.detail for word in words), outcome.detail


def named(check):
    return check.name


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=named)
def test_the_kernel_of_the_host(host, check):
    run(host, check, ALWAYS)


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=named)
def test_the_kernels_that_are_chosen_on_hopper(stand_in, check):
    run(stand_in(HOPPER), check, ON_A_GPU)


@pytest.mark.parametrize("check", SOME_CHECKS, ids=named)
@pytest.mark.parametrize("only", ["cudnn", "flash"])
def test_a_kernel_that_is_asked_for(stand_in, monkeypatch, check, only):
    monkeypatch.setenv(VARIABLE, only)
    run(stand_in(HOPPER), check, IN_16_BITS)


@pytest.mark.parametrize("check", SOME_CHECKS, ids=named)
def test_the_kernel_that_is_chosen_where_there_is_no_other(stand_in, check):
    run(stand_in(TURING), check, (*ON_A_GPU, "bfloat16 on sm_75"))


def test_the_few_checks_are_there():
    assert len(SOME_CHECKS) == len(FEW)
