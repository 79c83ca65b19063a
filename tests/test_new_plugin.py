"""`ringrt new-plugin`: what it writes and what it refuses. That it passes the conformance suite is
in test_plugins.py."""

from __future__ import annotations

import ast
import os
import re
import tomllib

import pytest

from ringrt.cli.main import cli
from ringrt.errors import ConfigError
from ringrt.scaffold import Names, new_plugin, render
from support import ROOT, ringrt_command

MINIMAL = ROOT / "plugins" / "ringrt-minimal"


def files_in(folder):
    """Text by path, without what Python and tools leave behind."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and not re.search(r"/(__pycache__|\.)", f"/{path.relative_to(folder)}")
    }


def test_the_plugin_in_this_repository_is_what_the_command_writes():
    assert render(Names.of("minimal")) == files_in(MINIMAL)


def test_every_place_is_filled_in():
    for path, text in render(Names.of("fast.One")).items():
        assert "{{" not in text, path
        assert "inimal" not in text, path
        assert "{" not in path


@pytest.mark.parametrize(
    ("name", "backend", "module", "cls"),
    [
        ("minimal", "minimal", "ringrt_minimal", "MinimalBackend"),
        ("Fast.One", "fast-one", "ringrt_fast_one", "FastOneBackend"),
        ("a__b--c", "a-b-c", "ringrt_a_b_c", "ABCBackend"),
        ("ringrt-mine", "mine", "ringrt_mine", "MineBackend"),
        ("Ringrt_mine", "mine", "ringrt_mine", "MineBackend"),
        ("x", "x", "ringrt_x", "XBackend"),
        ("fp8", "fp8", "ringrt_fp8", "Fp8Backend"),
    ],
)
def test_all_names_come_from_one(name, backend, module, cls):
    names = Names.of(name)
    assert (names.backend, names.module, names.cls) == (backend, module, cls)
    assert names.distribution == f"ringrt-{backend}"


@pytest.mark.parametrize("name", ["Fast.One", "x", "a_b"])
def test_what_is_written_belongs_together(tmp_path, name):
    names, folder = new_plugin(name, tmp_path)
    assert folder == tmp_path / names.distribution
    assert files_in(folder) == render(names)
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == names.distribution
    assert project["project"]["entry-points"]["ringrt"] == {names.module: names.module}
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"] == [
        f"{names.module}.py"
    ]
    module = ast.parse((folder / f"{names.module}.py").read_text())
    assert names.cls in [node.name for node in module.body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize(
    "name", ["", "-x", "x-", "3d", "a b", "a/b", "../x", "ä", "x\n", "ringrt-", "ringrt-3d", "."]
)
def test_a_bad_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="NAME: expected a letter, then letters, digits"):
        new_plugin(name, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cpu", "a backend that is installed"),
        ("CPU", "a backend that is installed"),
        ("ringrt-reference", "a backend that is installed"),
        ("auto", "which stands for the best backend there is"),
        ("backends", "whose module ringrt_backends is installed"),
    ],
)
def test_a_name_that_is_taken_is_refused(tmp_path, name, why):
    with pytest.raises(ConfigError, match=f"NAME: expected a name that is free, got '.*', {why}"):
        new_plugin(name, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_exists_is_left_as_it_is(tmp_path):
    (tmp_path / "ringrt-x").mkdir()
    with pytest.raises(
        ConfigError, match="NAME: expected one whose folder does not exist yet, got"
    ):
        new_plugin("x", tmp_path)
    assert os.listdir(tmp_path / "ringrt-x") == []


def test_a_folder_that_does_not_exist_is_not_made(tmp_path):
    with pytest.raises(ConfigError, match="--into: expected a folder, got .*absent"):
        new_plugin("x", tmp_path / "absent")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    def refuse(self, *arguments, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(ConfigError, match="--into: .*got Read-only file system"):
        new_plugin("x", tmp_path)


def test_the_command_says_what_comes_next(tmp_path):
    done = ringrt_command("new-plugin", "mine", "--into", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"wrote {tmp_path}/ringrt-mine with the backend mine; next:",
        f"    pip install --editable {tmp_path}/ringrt-mine",
        "    ringrt check-backend mine",
    ]
    done = ringrt_command("new-plugin", "mine", "--into", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("ringrt: NAME: expected one whose folder does not exist yet")
    assert len(done.stderr.splitlines()) == 1


def test_what_the_command_names_exists():
    assert {"new-plugin", "check-backend"} <= set(cli.commands)
