"""CUDA sources: how they are found and put together, for NVRTC and for the simulator alike."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "([^"]+\.cuh)"\n', re.MULTILINE)


@cache
def load_source(path: Path) -> str:
    """The text of a `.cu` file with its `.cuh` files put in, each once: looked for beside the
    file, then here, where `prims.cuh` lies. So nothing depends on include paths, and a text
    says all that a compiler's cache must know."""
    seen: set[Path] = set()

    def expand(file: Path) -> str:
        if file in seen:
            return ""
        seen.add(file)
        return _INCLUDE.sub(lambda found: expand(_find(found[1], file)), file.read_text())

    return expand(path).replace("#pragma once\n", "")


def _find(name: str, includer: Path) -> Path:
    beside = includer.parent / name
    return beside if beside.exists() else _HERE / name
