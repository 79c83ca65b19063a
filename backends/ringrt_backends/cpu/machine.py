"""Which vector code this machine runs: the width of its vectors, and how its registers are
used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm

from ringrt.errors import ConfigError

#: Names of features to do without, as LLVM calls them, between commas: `avx512f` leaves AVX2,
#: `avx512bf16` widens bf16 to fp32, `avx2` or `neon` leave plain Numba.
WITHOUT = "RINGRT_CPU_WITHOUT"
_NAMED = {"avx512f", "avx512bf16", "avx2", "neon"}


@dataclass(frozen=True, slots=True)
class Machine:
    """A register tile is `rows` by 2·`width` floats: two vectors a row. `features` is what LLVM
    may use, in its own words. `chunk`: terms that a register adds up before it is added to a
    total. `registers`: how many vectors they hold. `scalef`: AVX-512's
    vreduceps and vscalefps. `pairs`: how pairs of bf16 are multiplied: "native", by instructions
    of their own; "emulated", by others in their place (slow: for tests on machines without); or
    "", not at all: they are widened to fp32 first."""

    name: str
    width: int
    cpu: str
    features: str
    rows: int = 6
    chunk: int = 12
    registers: int = 32
    scalef: bool = False
    pairs: str = ""

    @property
    def panel(self) -> int:
        """Columns of the register tile."""
        return 2 * self.width

    def __str__(self) -> str:
        vectors = f"{self.name}, tiles of {self.rows} x {self.panel} floats"
        return f"{vectors}, bf16 in pairs" if self.pairs else vectors


@cache
def this_machine(without: tuple[str, ...] = ()) -> Machine | None:
    """The widest code that runs here, as if the machine lacked the features `without`, which are
    LLVM's names (`avx512f`); None if there is none for it."""
    found = {
        name: has and not any(_lacks(name, absent) for absent in without)
        for name, has in dict(llvm.get_host_cpu_features()).items()
    }
    cpu = "generic" if without else llvm.get_host_cpu_name()
    features = llvm.FeatureMap(found).flatten()
    if found.get("avx512f") and found.get("avx512dq"):
        # Left alone, LLVM splits the vectors, for the sake of the clock of other programs.
        features += ",-prefer-256-bit"
        pairs = "native" if found.get("avx512bf16") else ""
        return Machine("avx512", 16, cpu, features, scalef=True, pairs=pairs)
    if found.get("avx2") and found.get("fma") and found.get("f16c"):
        return Machine("avx2", 8, cpu, features, registers=16)
    aarch64 = llvm.get_process_triple().startswith(("aarch64", "arm64"))
    if aarch64 and "neon" not in without:
        return Machine("neon", 4, cpu, features)
    return None


def asked_for() -> tuple[str, ...]:
    """The features to do without, by the environment; `ConfigError` for one that neither the text
    above nor LLVM knows."""
    asked = tuple(name.strip() for name in os.environ.get(WITHOUT, "").split(",") if name.strip())
    known = _NAMED | set(llvm.get_host_cpu_features())
    for name in asked:
        if name not in known:
            raise ConfigError(
                WITHOUT, f"features as LLVM names them ({', '.join(sorted(_NAMED))})", name
            )
    return asked


def emulated_pairs() -> Machine:
    """The code for AVX512-BF16 with its instructions put together from others, for a machine
    that lacks them: slow, and the same but for rounding."""
    features = llvm.get_host_cpu_features().flatten()
    return Machine(
        "emulated", 16, llvm.get_host_cpu_name(), features, registers=16, pairs="emulated"
    )


def _lacks(feature: str, absent: str) -> bool:
    """A feature takes along what is built on it."""
    built_on = {"avx512f": "avx512", "avx2": "avx512"}
    return feature == absent or feature.startswith(built_on.get(absent, "\0"))
