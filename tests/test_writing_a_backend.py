"""docs/writing-a-backend.md, from its beginning to its end: every block of it is run.

A block below `<!-- file: PATH -->` is the next part of that file. Python that is no file's, and
sessions with `>>>`, run where their section has come to, with all that the module defines so far.
Commands run in an environment that has ringrt's wheel and not the plugin; they end with 0, or
their output begins with `ringrt: `, and what is shown of it is what they print.
"""

from __future__ import annotations

import doctest
import re
import sys
import types
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from plugin_support import Environment

from ringrt import registry as registry_module
from support import ROOT

pytestmark = pytest.mark.timeout(200)
TEXT = (ROOT / "docs" / "writing-a-backend.md").read_text()
MINIMAL = ROOT / "plugins" / "ringrt-minimal"
MODULE = "ringrt-minimal/ringrt_minimal.py"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_ONLY_FIRST_FAILURE
#: Nothing is downloaded: what pip needs is in the environment of the tests.
PIP = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
#: A heading, or a block of code with the file that it is a part of.
_PARTS = re.compile(
    r"^## (?P<heading>[^\n]*)$|(?:<!-- file: (?P<file>\S+) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)


@dataclass
class Reader:
    """One who does what the page says, in a folder of their own."""

    folder: Path
    environment: Environment
    names: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    heading: str = ""
    example: str = ""

    def read(self, part: re.Match) -> None:
        if part["heading"]:
            self.heading, self.example = part["heading"], ""
            self.names = dict(self.module()) if MODULE in self.files else {}
        elif part["file"]:
            self.write(part["file"], part["text"])
        elif part["kind"] == "python":
            self.load(part["text"])
        elif part["kind"] == "pycon":
            self.talk(part["text"])
        elif part["kind"] == "console":
            self.command(part["text"])
        else:
            raise AssertionError(
                f"in {self.heading!r} nothing would run a block of {part['kind']!r}"
            )

    def write(self, path: str, text: str) -> None:
        self.files[path] = self.files.get(path, "") + text
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.files[path])
        if path == MODULE:
            self.names |= self.module()

    def module(self) -> dict:
        """The plugin's module as far as it has come, which is one that can be imported."""
        return vars(imported("ringrt_minimal", self.files[MODULE]))

    def load(self, text: str) -> None:
        """The next part of the section's example. If it has hooks, it is taken as a plugin."""
        self.example += text
        name = "example_of_the_page"
        module = imported(name, self.example)
        if "@hookimpl" in text:
            module.RINGRT_PROTOCOL = 1
            found = registry_module.load([EntryPoint(name, name, "ringrt")])
            assert found.problems == []
        self.names |= vars(module)

    def talk(self, text: str) -> None:
        parser = doctest.DocTestParser()
        session = parser.get_doctest(text, self.names, self.heading, None, None)
        said = []
        runner = doctest.DocTestRunner(optionflags=FLAGS)
        runner.run(session, out=said.append, clear_globs=False)
        assert runner.failures == 0, "".join(said)
        self.names |= session.globs

    def command(self, text: str) -> None:
        for shown in re.split(r"^\$ ", text, flags=re.M)[1:]:
            command, _, expected = shown.partition("\n")
            shell = ("bash", "-c", command)
            done = self.environment.run(*shell, cwd=self.folder, timeout=120, **PIP)
            output = done.stderr if expected.startswith("ringrt: ") else done.stdout
            assert (done.returncode == 0) != expected.startswith("ringrt: "), (
                done.stdout + done.stderr
            )
            assert doctest.OutputChecker().check_output(expected, output, FLAGS), (
                f"{command}\n{output}"
            )


def imported(name: str, text: str) -> types.ModuleType:
    """A module of that text, imported."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, name, "exec"), vars(module))
    return module


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    environment = Environment.make(folder, ROOT)
    (environment.bin / "pip").write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    (environment.bin / "pip").chmod(0o755)
    made = Reader(folder / "work", environment)
    made.write("ringrt-minimal/README.md", (MINIMAL / "README.md").read_text())
    for part in _PARTS.finditer(TEXT):
        made.read(part)
    return made


def test_every_block_runs(reader):
    assert len(list(_PARTS.finditer(TEXT))) > 40


def test_the_page_s_plugin_is_that_of_the_repository(reader):
    ours = {path: text for path, text in reader.files.items() if path.startswith("ringrt-minimal")}
    files = ("README.md", "pyproject.toml", "ringrt_minimal.py", "tests/test_ringrt_minimal.py")
    assert ours == {f"ringrt-minimal/{path}": (MINIMAL / path).read_text() for path in files}


def test_every_block_is_found():
    found = [part for part in _PARTS.finditer(TEXT) if not part["heading"]]
    assert TEXT.count("```") == 2 * len(found)


def test_plugins_that_are_named_exist():
    for path in re.findall(r"`(plugins/[\w./-]+)`", TEXT):
        assert (ROOT / path / "pyproject.toml").exists(), path
