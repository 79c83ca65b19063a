"""Every planted bug of the CUDA path is caught; the product as it is passes the same checks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_mutant_check import CHECKS, run_kernels
from cuda_mutants import KERNEL_MUTANTS, QUEUE_MUTANTS
from cuda_support import simulator  # noqa: F401

from ringrt import cudasim
from ringrt.kernels import load_source
from support import ROOT

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels_pass(check):
    run_kernels(check)


@pytest.mark.parametrize("mutant", KERNEL_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_in_a_kernel_is_caught(mutant, monkeypatch):
    found = []

    def planted(path):
        text = load_source(path)
        if path.name != mutant.file:
            return text
        found.append(text.count(mutant.old))
        return text.replace(mutant.old, mutant.new)

    monkeypatch.setattr("ringrt.device.cuda.load_source", planted)
    caught = None
    try:
        run_kernels(mutant.check)
    except (AssertionError, cudasim.SimulatorError) as error:
        caught = error
    assert set(found) == {1}, "the text to change is not there, or not alone"
    assert caught is not None, "not caught"
    assert "g++" not in str(caught)
    cudasim.reset()


def check(folder: Path, transport: str) -> subprocess.CompletedProcess:
    script = Path(__file__).with_name("cuda_mutant_check.py")
    return subprocess.run(
        [sys.executable, "-B", script, folder, transport],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"RINGRT_CUDASIM": "1", "RINGRT_CUDASIM_TIMEOUT": "3"},
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("product")
    for package in ("ringrt", "backends/ringrt_backends"):
        source = ROOT / package
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("transport", ["nccl", "threads"])
def test_the_rings_pass(transport, copy):
    done = check(copy, transport)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mutant", QUEUE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_in_what_is_queued_is_caught(mutant, copy):
    path = copy / mutant.path
    text = path.read_text()
    assert text.count(mutant.old) == 1, "the text to change is not there, or not alone"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        done = check(copy, mutant.transport)
    finally:
        path.write_text(text)
    assert done.returncode != 0
    for error in ("SyntaxError", "ImportError", "NameError", "AttributeError"):
        assert error not in done.stderr
