"""`ringrt new-plugin`: a small plugin with a backend that passes the conformance suite as it
stands, to be changed bit by bit into one's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from ringrt.errors import ConfigError
from ringrt.registry import registry

#: Template by template, the file that is made of it; `{module}` is the module's name.
_FILES = {
    "pyproject.toml.tmpl": "pyproject.toml",
    "README.md.tmpl": "README.md",
    "backend.py.tmpl": "{module}.py",
    "test_backend.py.tmpl": "tests/test_{module}.py",
}
_PREFIX = "ringrt-"
#: As PEP 508 has names, but a letter comes first: one becomes the name of a class.
_NAME = re.compile(r"[a-z]([a-z0-9._-]*[a-z0-9])?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Names:
    """What a plugin's parts are called, all from one name."""

    #: The backend, in jobs and on the command line.
    backend: str

    @classmethod
    def of(cls, name: str) -> Names:
        """Normalised as by PEP 503. A `ringrt-` in front is not doubled. Raises `ConfigError`."""
        stem = re.sub(r"[-_.]+", "-", name).lower().removeprefix(_PREFIX)
        if not _NAME.fullmatch(name) or not _NAME.fullmatch(stem):
            expected = "a letter, then letters, digits, '-', '_' and '.', the last no mark"
            raise ConfigError("NAME", expected, repr(name))
        return cls(stem)

    @property
    def distribution(self) -> str:
        """What pip installs, and the folder."""
        return _PREFIX + self.backend

    @property
    def module(self) -> str:
        """What Python imports."""
        return self.distribution.replace("-", "_")

    @property
    def cls(self) -> str:
        """The backend's class."""
        return "".join(word.capitalize() for word in self.backend.split("-")) + "Backend"


def render(names: Names) -> dict[str, str]:
    """The plugin's files: their text by their path."""
    values = {
        "name": names.backend,
        "distribution": names.distribution,
        "module": names.module,
        "class": names.cls,
    }
    template = files(__name__) / "template"
    texts = {}
    for source, path in _FILES.items():
        text = (template / source).read_text(encoding="utf-8")
        filled = re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], text)
        texts[path.format(module=names.module)] = filled
    return texts


def new_plugin(name: str, into: Path) -> tuple[Names, Path]:
    """Write a plugin into a new folder of `into`; its names and that folder. Raises
    `ConfigError` for a bad name, a name that is taken, and a folder that exists."""
    names = Names.of(name)
    _check_free(names)
    folder = into / names.distribution
    if not into.is_dir():
        raise ConfigError("--into", "a folder", into)
    if folder.exists():
        raise ConfigError("NAME", "one whose folder does not exist yet", folder)
    try:
        for path, text in render(names).items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--into", "a folder that can be written", error.strerror) from None
    return names, folder


def _check_free(names: Names) -> None:
    taken = None
    if names.backend == "auto":
        taken = "which stands for the best backend there is"
    elif names.backend in registry().backends:
        taken = "a backend that is installed"
    elif find_spec(names.module) is not None:
        taken = f"whose module {names.module} is installed"
    if taken is not None:
        raise ConfigError("NAME", "a name that is free", f"{names.backend!r}, {taken}")
