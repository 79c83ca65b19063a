"""What README and docs show is run; what they name exists."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from ringrt.jobs.load import validate
from support import ROOT, mpirun

README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_readme_s_first_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PYTHON[0]], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_s_example_of_gradients_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PYTHON[2]], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_s_example_in_pytorch_runs(tmp_path):
    [code] = [block for block in PYTHON if "ringrt.torch" in block]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_s_example_in_jax_runs(tmp_path):
    [code] = [block for block in PYTHON if "ringrt.jax" in block]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_pictures_of_masks_are_those_of_today_s_plans(tmp_path):
    subprocess.run(
        [sys.executable, "docs/draw_masks.py", tmp_path], cwd=ROOT, check=True, timeout=60
    )
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "masks").glob("*.svg")}
    assert drawn == kept
    text = (ROOT / "docs" / "masks.md").read_text()
    assert set(re.findall(r"masks/([\w-]+\.svg)", text)) == set(kept)


def test_the_readme_s_mpi_example_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PYTHON[1])
    done = mpirun(2, script)
    assert done.returncode == 0, done.stderr


def test_the_readme_s_job_is_valid():
    [text] = re.findall(r"```yaml\n(.*?)```", README, re.S)
    validate(yaml.safe_load(text))


def test_follow_one_block_runs():
    done = subprocess.run(
        [sys.executable, "examples/follow_one_block.py"],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 1: on rank 2, in slot 0" in done.stdout


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *[
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")]])  # fmt: skip
def test_files_that_are_named_exist(name):
    text = (ROOT / name).read_text()
    for path in re.findall(r"`((?:ringrt|backends|docs|examples|tests|benchmarks)/[\w./]*)`", text):
        assert (ROOT / path).exists(), f"{name} names {path}"


def test_the_readme_lists_every_command():
    from ringrt.cli.main import cli

    for command in cli.commands:
        assert f"`ringrt {command}" in README
