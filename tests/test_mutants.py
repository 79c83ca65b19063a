"""Every planted bug is caught; the product as it is passes the same check."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS

from support import ROOT

pytestmark = pytest.mark.timeout(120)


def check(folder: Path) -> subprocess.CompletedProcess:
    script = Path(__file__).with_name("mutant_check.py")
    return subprocess.run(
        [sys.executable, "-B", script, folder], capture_output=True, text=True, timeout=100
    )


@pytest.fixture
def copy(tmp_path):
    for package in ("ringrt", "backends/ringrt_backends"):
        source = ROOT / package
        shutil.copytree(
            source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


def test_the_product_passes(copy):
    done = check(copy)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught(mutant, copy):
    path = copy / mutant.path.removeprefix("backends/")
    text = path.read_text()
    assert text.count(mutant.old) == 1, "the line to change is not there, or not alone"
    path.write_text(text.replace(mutant.old, mutant.new))
    done = check(copy)
    assert done.returncode != 0
    assert "SyntaxError" not in done.stderr
    assert "ImportError" not in done.stderr
