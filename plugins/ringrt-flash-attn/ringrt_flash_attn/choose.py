"""Which FlashAttention: what is installed, what fits a GPU, and what the user forces."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from ringrt.errors import BackendUnavailable

#: 2, 3 or 4: take this version and no other.
VARIABLE = "RINGRT_FLASH_ATTN"

#: By a GPU's major compute capability, the versions that have both passes for it, with gradients
#: whose order of addition does not depend on chance: the fastest first. FlashAttention 4 has no
#: backward for 8.x, and none of fixed order for 12.x.
_FITTING = {8: (2,), 9: (3, 4, 2), 10: (4, 2), 11: (4, 2), 12: (2,)}

#: How each version is had.
_MENDS = {
    2: "pip install flash-attn",
    3: "build flash_attn_3 from the folder hopper of FlashAttention's repository",
    4: "pip install flash-attn-4",
}


def choose(capability: int, installed: Collection[int], forced: str | None) -> tuple[int, ...]:
    """The versions to use on a GPU of that capability (90 for sm_90), best first, never none. A
    problem that the first refuses is taken to the next. `forced` is the value of `VARIABLE`, or
    None. `BackendUnavailable`, in one line, where nothing fits."""
    fitting = _FITTING.get(capability // 10, ())
    if forced:
        return (_forced(forced, capability, installed, fitting),)
    chosen = tuple(version for version in fitting if version in installed)
    if chosen:
        return chosen
    if not fitting:
        raise BackendUnavailable(
            f"no FlashAttention runs on sm_{capability}: it needs a GPU from sm_80 to sm_129"
        )
    have = _listed(installed)
    here = f"FlashAttention {have} does not serve sm_{capability}" if have else "none is installed"
    raise BackendUnavailable(f"{here}: {' or '.join(_MENDS[version] for version in fitting)}")


def installed() -> frozenset[int]:
    """The versions that are installed. Imports none of them."""
    found = set()
    if find_spec("flash_attn_2_cuda") is not None:
        found.add(2)
    if find_spec("flash_attn_interface") is not None:
        found.add(3)
    # Releases of version 2 hold an early copy of version 4, which lacks the backward of Blackwell.
    if any((folder / "cute" / "flash_bwd_sm100.py").is_file() for folder in _folders()):
        found.add(4)
    return frozenset(found)


def _folders() -> list[Path]:
    """Where the package `flash_attn` lies, which versions 2 and 4 share."""
    spec = find_spec("flash_attn")
    places = spec.submodule_search_locations if spec is not None else None
    return [Path(place) for place in places or ()]


def _forced(
    forced: str, capability: int, installed: Collection[int], fitting: Collection[int]
) -> int:
    if forced not in ("2", "3", "4"):
        raise BackendUnavailable(f"{VARIABLE}: expected 2, 3 or 4, got {forced!r}")
    version = int(forced)
    if version not in installed:
        have = _listed(installed) or "none"
        raise BackendUnavailable(
            f"{VARIABLE}={forced}: FlashAttention {forced} is not installed ({have} is): "
            f"{_MENDS[version]}"
        )
    if version not in fitting:
        names = _listed(fitting) or "none"
        raise BackendUnavailable(
            f"{VARIABLE}={forced}: FlashAttention {forced} does not serve sm_{capability} "
            f"({names} does)"
        )
    return version


def _listed(versions: Collection[int]) -> str:
    return " or ".join(map(str, sorted(versions)))
