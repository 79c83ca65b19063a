"""Which version is taken."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from ringrt_flash_attn.choose import choose, installed

from ringrt.errors import BackendUnavailable

ALL = {2, 3, 4}


@pytest.mark.parametrize(
    ("capability", "have", "chosen"),
    [
        (80, ALL, (2,)),
        (86, {2, 4}, (2,)),
        (89, {2}, (2,)),
        (90, ALL, (3, 4, 2)),
        (90, {2, 4}, (4, 2)),
        (90, {2}, (2,)),
        (90, {3}, (3,)),
        (100, ALL, (4, 2)),
        (103, {2, 3}, (2,)),
        (110, {4}, (4,)),
        (120, ALL, (2,)),
    ],
)
def test_the_best_that_fits_comes_first(capability, have, chosen):
    assert choose(capability, have, None) == chosen
    assert choose(capability, have, "") == chosen


@pytest.mark.parametrize("forced", [2, 3, 4])
def test_a_version_can_be_forced(forced):
    assert choose(90, ALL, str(forced)) == (forced,)


@pytest.mark.parametrize(
    ("capability", "have", "forced", "words"),
    [
        (75, ALL, None, "no FlashAttention runs on sm_75: it needs a GPU from sm_80 to sm_129"),
        (80, {3, 4}, None, "FlashAttention 3 or 4 does not serve sm_80: pip install flash-attn"),
        (90, (), None, "none is installed: build flash_attn_3"),
        (120, {4}, None, "FlashAttention 4 does not serve sm_120: pip install flash-attn"),
        (90, {2}, "3", "RINGRT_FLASH_ATTN=3: FlashAttention 3 is not installed (2 is): build"),
        (90, (), "4", "FlashAttention 4 is not installed (none is): pip install flash-attn-4"),
        (80, ALL, "3", "RINGRT_FLASH_ATTN=3: FlashAttention 3 does not serve sm_80 (2 does)"),
        (100, ALL, "3", "FlashAttention 3 does not serve sm_100 (2 or 4 does)"),
        (75, ALL, "2", "FlashAttention 2 does not serve sm_75 (none does)"),
        (90, ALL, "5", "RINGRT_FLASH_ATTN: expected 2, 3 or 4, got '5'"),
        (90, ALL, "two", "RINGRT_FLASH_ATTN: expected 2, 3 or 4, got 'two'"),
    ],
)
def test_what_cannot_be_is_one_line(capability, have, forced, words):
    with pytest.raises(BackendUnavailable) as caught:
        choose(capability, have, forced)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A path for modules from which nothing else can be imported, and FlashAttention not."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("flash_attn", "flash_attn_2_cuda", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_nothing_is_installed(folder):
    assert installed() == frozenset()


def test_version_2_is_told_by_its_kernels_and_not_by_the_early_copy_of_4_in_it(folder):
    (folder / "flash_attn" / "cute").mkdir(parents=True)
    (folder / "flash_attn" / "__init__.py").write_text("raise AssertionError('imported')")
    (folder / "flash_attn" / "cute" / "interface.py").touch()
    assert installed() == frozenset()
    (folder / "flash_attn_2_cuda.py").touch()
    assert installed() == {2}


def test_version_3_is_a_module_by_itself(folder):
    (folder / "flash_attn_interface.py").write_text("raise AssertionError('imported')")
    assert installed() == {3}


def test_version_4_is_told_without_the_package_above_it(folder):
    """Its wheel brings flash_attn/cute and no flash_attn/__init__.py."""
    (folder / "flash_attn" / "cute").mkdir(parents=True)
    (folder / "flash_attn" / "cute" / "flash_bwd_sm100.py").touch()
    assert installed() == {4}


def test_a_module_that_is_imported_already_counts(folder, monkeypatch):
    module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    assert installed() == {3}
