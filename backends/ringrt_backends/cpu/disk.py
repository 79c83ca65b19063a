"""Compiled code on disk: the vector code kept beside Numba's, and both thrown away together when
what they are made from changes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba

_HERE = Path(__file__).parent
_SUFFIX = ".ringrt-code"
#: So many files are kept in a folder, the latest; one is some 50 KB.
_KEPT = 200
_DIGEST = hashlib.sha256().digest_size


@cache
def sources() -> str:
    """A digest of this package's text, and of the versions of what compiles it."""
    digest = hashlib.sha256(f"{llvmlite.__version__} {numba.__version__}".encode())
    for path in sorted(_HERE.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def load(key: object) -> bytes | None:
    """The code that was stored under the key, which is its `repr`; None if there is none, or if it
    is damaged."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            content = (folder / _name(key)).read_bytes()
            check, code = content[:_DIGEST], content[_DIGEST:]
            if hashlib.sha256(code).digest() == check:
                return code
    return None


def store(key: object, code: bytes) -> None:
    """Keep the code, in the first folder that can be written to; if none can, do without."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            # Others may read it, or write the same, at this moment.
            handle, temporary = tempfile.mkstemp(suffix=_SUFFIX, dir=folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(code).digest() + code)
                os.chmod(temporary, 0o644)
                os.replace(temporary, folder / _name(key))
            except OSError:
                os.unlink(temporary)
                raise
            _clear_old(folder)
            return


def stamp(dispatcher: Any) -> Any:
    """Have Numba's cache of a function depend on all of the package: left alone, it would keep
    code that was compiled with constants and functions of other modules as they once were."""
    file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        file._source_stamp = (file._source_stamp, sources())
    return dispatcher


def _name(key: object) -> str:
    digest = hashlib.sha256(f"{sources()} {key!r}".encode()).hexdigest()
    return digest[:32] + _SUFFIX


def _folders() -> Iterator[Path]:
    """Where Numba keeps its own, more or less."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen)
        return
    yield _HERE / "__pycache__"
    default = Path.home() / ("AppData/Local" if sys.platform == "win32" else ".cache")
    yield Path(os.environ.get("XDG_CACHE_HOME") or default) / "ringrt"


def _clear_old(folder: Path) -> None:
    def age(path: Path) -> float:
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
        return 0.0

    for path in sorted(folder.glob(f"*{_SUFFIX}"), key=age)[:-_KEPT]:
        with contextlib.suppress(OSError):
            path.unlink()
