"""The stand-ins have the signatures that were read from the sources."""

from __future__ import annotations

import inspect
import shutil

import check_flash_signatures
import flash_signatures
import flash_standins
import pytest

PAIRS = [
    (flash_signatures.FLASH2, flash_standins.FLASH2),
    (flash_signatures.FLASH3_EARLY, flash_standins.FLASH3_EARLY),
    (flash_signatures.FLASH3, flash_standins.FLASH3),
    (flash_signatures.FLASH4, flash_standins.FLASH4),
]


def as_recorded(function):
    """`q, k, causal=False`, of a function or of the one inside an operator."""
    signature = inspect.signature(getattr(function, "_init_fn", function))
    return ", ".join(
        name if each.default is each.empty else f"{name}={each.default!r}"
        for name, each in signature.parameters.items()
    )


@pytest.mark.parametrize(("record", "functions"), PAIRS, ids=lambda x: getattr(x, "read_from", ""))
def test_parameters_and_defaults_are_the_recorded_ones(record, functions):
    assert functions.keys() == record.functions.keys()
    for name, (parameters, _) in record.functions.items():
        assert as_recorded(functions[name]) == parameters


def _source(record):
    """A module with functions of these signatures."""
    return "\n".join(
        f"def {name}({parameters}):\n    if q is None:\n        return 0\n    return {returned}\n"
        for name, (parameters, returned) in record.functions.items()
    )


@pytest.fixture
def tree(tmp_path):
    """Sources of every version, as recorded."""
    for record in (flash_signatures.FLASH2, flash_signatures.FLASH3, flash_signatures.FLASH4):
        file = tmp_path / record.file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_source(record))
    (tmp_path / "flash_attn" / "cute" / "flash_bwd_sm100.py").touch()
    return tmp_path


def test_the_check_of_a_source_tree_finds_what_is_recorded(tree, capsys):
    assert check_flash_signatures.main([str(tree)]) == 0
    assert capsys.readouterr().out.count("as recorded") == 6


def test_the_check_knows_both_releases_of_version_3(tree, capsys):
    (tree / "hopper" / "flash_attn_interface.py").write_text(_source(flash_signatures.FLASH3_EARLY))
    assert check_flash_signatures.main([str(tree)]) == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [("softcap", "cap"), ("deterministic,", "deterministic=True,"), ("return out,", "return v,")],
)
def test_the_check_of_a_source_tree_finds_what_differs(tree, capsys, old, new):
    file = tree / flash_signatures.FLASH2.file
    file.write_text(file.read_text().replace(old, new, 1))
    assert check_flash_signatures.main([str(tree)]) == 1
    assert capsys.readouterr().out.count("differs") == 1


def test_the_check_passes_over_the_early_copy_in_version_2(tree, capsys):
    (tree / "flash_attn" / "cute" / "flash_bwd_sm100.py").unlink()
    assert check_flash_signatures.main([str(tree)]) == 0
    assert "early copy" in capsys.readouterr().out


def test_the_check_of_another_tree_says_so(tree, capsys):
    shutil.rmtree(tree / "flash_attn")
    shutil.rmtree(tree / "hopper")
    assert check_flash_signatures.main([str(tree)]) == 1
    assert "none of the recorded files" in capsys.readouterr().out
