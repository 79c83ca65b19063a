"""Another environment than the one of the tests: what is installed there are wheels."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support import ROOT

PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))

_QUIET = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment with wheels of its own. What else is needed comes from that of the tests,
    by a line in a .pth file: a folder is looked into, but its own .pth files are not read, so what
    is installed as editable there (ringrt, plugins) is not found."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, *sources: Path) -> Environment:
        """Build wheels of some source trees, and install them into a new environment."""
        made = cls(folder / "env")
        _checked(sys.executable, "-m", "venv", "--without-pip", made.folder)
        made.pip("install", *_QUIET, "--no-compile", *map(_wheel, sources))
        [site] = (made.folder / "lib").glob("python*/site-packages")
        (site / "visible.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return made

    @property
    def bin(self) -> Path:
        """Where its commands are."""
        return self.folder / "bin"

    def pip(self, *arguments: str | Path) -> None:
        """Call pip on it."""
        _checked(sys.executable, "-m", "pip", "--python", self.bin / "python", *arguments)

    def run(self, *command: str | Path, cwd: Path, timeout: float = 60, **env: str):
        """Run a command of it, in a folder that is not the checkout."""
        variables = self.variables() | env
        program = shutil.which(command[0], path=variables["PATH"])
        assert program, command
        return subprocess.run(
            [program, *map(str, command[1:])],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            env=variables,
        )

    def variables(self) -> dict[str, str]:
        """The environment's variables: its commands come first, then mpirun and MPI's library
        of the environment of the tests."""
        theirs = Path(sys.prefix)
        path = os.pathsep.join(map(str, (self.bin, theirs / "bin", os.environ["PATH"])))
        library = os.environ.get("LD_LIBRARY_PATH")
        libraries = os.pathsep.join([str(theirs / "lib"), *([library] if library else [])])
        return os.environ | {"PATH": path, "LD_LIBRARY_PATH": libraries}


@functools.cache
def _wheel(source: Path) -> Path:
    """The wheel of a source tree, built once in this process."""
    folder = Path(tempfile.mkdtemp(prefix="ringrt-wheel-"))
    atexit.register(shutil.rmtree, folder)
    build = ("wheel", *_QUIET, "--no-build-isolation", "--wheel-dir", folder, source)
    _checked(sys.executable, "-m", "pip", *build)
    [wheel] = folder.glob("*.whl")
    return wheel


def _checked(*command: str | Path) -> None:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
