"""CUDA C++ compiled for the host: each kernel a function that g++ made of the same text that a
GPU gets. Compiled modules are kept on disk, by the text and all that goes into it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ringrt.cudasim.errors import KernelFault, SimulatorError

_HOST = Path(__file__).parent / "host"
_RUNTIME = ("cudasim.h", "fibers.h", "runtime.cpp")
_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-march=native", "-w")
#: Only the calls that ThreadSanitizer's instrumentation makes are used: runtime.cpp defines them.
#: Variables that are not initialised hold a pattern, as registers hold anything.
_KERNEL = (
    "-O2",
    "-fsanitize=thread",
    "--param",
    "tsan-instrument-func-entry-exit=0",
    "-ftrivial-auto-var-init=pattern",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SIGNATURE = re.compile(r"KERNEL\([^)]*\)\s*(\w+)\s*\(([^)]*)\)\s*\{")
_SIZES = {
    "char": 1,
    "unsigned char": 1,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "int": 4,
    "unsigned": 4,
    "u32": 4,
    "float": 4,
    "i64": 8,
    "u64": 8,
    "long long": 8,
    "double": 8,
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel. `size` is that of the value in bytes, 8 for a pointer; `element`
    that of what a pointer points to, 0 if it is not known."""

    name: str
    type: str
    pointer: bool
    const: bool
    size: int
    element: int


class Buffer(NamedTuple):
    """What a kernel may touch: all that the argument `name` covers."""

    address: int
    nbytes: int
    writable: bool
    name: str


class _LaunchBuffer(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64),
                ("writable", ctypes.c_int), ("name", ctypes.c_char_p))  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostKernel:
    """One kernel of a module."""

    name: str
    parameters: tuple[Parameter, ...]
    entry: Any
    launch: Any
    lock: threading.Lock

    def run(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[int | bytes],
        buffers: Sequence[Buffer],
        shared_bytes: int,
        seed: int = 0,
    ) -> None:
        """Run all blocks. `arguments` are addresses for pointers and the exact bytes of values;
        `buffers` is all that may be touched. `seed` chooses the order in which threads run,
        0 their natural one. Raises `KernelFault`."""
        if (block[0] * block[1] * block[2]) % 32:
            raise SimulatorError(f"kernel {self.name}: {block} threads are not whole warps")
        raw = [x if isinstance(x, bytes) else int(x).to_bytes(8, "little") for x in arguments]
        holders = [ctypes.create_string_buffer(x, len(x)) for x in raw]
        values = (ctypes.c_void_p * len(raw))(*(ctypes.addressof(x) for x in holders))
        sizes = (ctypes.c_int * len(raw))(*map(len, raw))
        rows = [_LaunchBuffer(b.address, b.nbytes, b.writable, b.name.encode()) for b in buffers]
        given = (_LaunchBuffer * len(rows))(*rows)
        text = ctypes.create_string_buffer(500)
        with self.lock:
            failed = self.launch(
                self.entry, (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block),
                ctypes.c_uint(shared_bytes), ctypes.c_uint(seed), len(raw), values, sizes,
                len(rows), given, text, len(text),
            )  # fmt: skip
        if failed:
            raise KernelFault(f"kernel {self.name}, {text.value.decode()}")


class HostModule:
    """CUDA C++ text, compiled. Of `options` only -D is used: others concern the GPU."""

    def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
        self._signatures = parse_signatures(code)
        defines = tuple(option for option in options if option.startswith("-D"))
        path = _compiled(code, defines, tuple(self._signatures.items()))
        self._library, self._lock = _opened(path)

    def kernel(self, name: str) -> HostKernel:
        """The kernel of that name."""
        if name not in self._signatures:
            there = ", ".join(self._signatures) or "none"
            raise SimulatorError(f"there is no kernel {name!r} in this module; there is {there}")
        entry = ctypes.cast(getattr(self._library, f"cudasim_{name}"), ctypes.c_void_p)
        launch = self._library.cudasim_launch
        return HostKernel(name, self._signatures[name], entry, launch, self._lock)


_OPEN: dict[Path, tuple[ctypes.CDLL, threading.Lock]] = {}
_OPENING = threading.Lock()


def _opened(path: Path) -> tuple[ctypes.CDLL, threading.Lock]:
    """A library, once for the process: it runs one kernel at a time."""
    with _OPENING:
        if path not in _OPEN:
            _OPEN[path] = ctypes.CDLL(str(path)), threading.Lock()
        return _OPEN[path]


def parse_signatures(code: str) -> dict[str, tuple[Parameter, ...]]:
    """The kernels of a text, which it declares as `KERNEL(threads) name(parameters)`."""
    found = _SIGNATURE.findall(_COMMENT.sub(" ", code))
    if not found:
        raise SimulatorError("the module declares no kernel as KERNEL(threads) name(...) { ... }")
    return {name: tuple(map(_parameter, _split(parameters))) for name, parameters in found}


def _split(parameters: str) -> list[str]:
    return [part for part in (p.strip() for p in parameters.split(",")) if part]


def _parameter(text: str) -> Parameter:
    words = text.replace("*", " * ").replace("__restrict__", " ").split()
    name, kind = words[-1], " ".join(w for w in words[:-1] if w not in ("const", "*"))
    pointer, const = "*" in words, "const" in words
    element = _SIZES.get(kind, 0)
    if not pointer and not element:
        raise SimulatorError(f"parameter {text!r}: values of type {kind} cannot be passed")
    return Parameter(name, kind, pointer, const, 8 if pointer else element, element)


def _entries(signatures: tuple[tuple[str, tuple[Parameter, ...]], ...]) -> str:
    """A function for each kernel that takes its arguments by address."""
    lines = []
    for name, parameters in signatures:
        casts = [
            f"*({'const ' if p.const else ''}{p.type}{' *' if p.pointer else ''}*)a[{i}]"
            for i, p in enumerate(parameters)
        ]
        export = 'extern "C" __attribute__((visibility("default")))'
        lines.append(f"{export} void cudasim_{name}(void** a) {{ {name}({', '.join(casts)}); }}")
    return "\n".join(lines)


def _compiled(code: str, defines: tuple[str, ...], signatures: Any) -> Path:
    """The shared library, made if it is not there yet."""
    text = f"{code}\n{_entries(signatures)}\n"
    key = _digest(_machine(), *(_HOST.joinpath(f).read_text() for f in _RUNTIME), text, *defines)
    library = _cache() / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            _build(Path(folder), text, defines, library)
    return library


def _build(folder: Path, text: str, defines: tuple[str, ...], library: Path) -> None:
    source = folder / "kernel.cpp"
    source.write_text(text)
    _gcc(
        *_COMMON, *_KERNEL, *defines, "-I", str(_HOST), "-c", str(source), "-o", str(folder / "k.o")
    )
    runtime = (
        _cache() / f"{_digest(_machine(), *(_HOST.joinpath(f).read_text() for f in _RUNTIME))}.o"
    )
    if not runtime.exists():
        _gcc(*_COMMON, "-O2", "-c", str(_HOST / "runtime.cpp"), "-o", str(folder / "runtime.o"))
        os.replace(shutil.copy(folder / "runtime.o", _beside(runtime)), runtime)
    _gcc("-shared", "-Wl,-Bsymbolic", str(folder / "k.o"), str(runtime), "-o", str(folder / "k.so"))
    # Other processes may be at the same: the last one wins, and all see whole files.
    os.replace(shutil.copy(folder / "k.so", _beside(library)), library)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")


def _gcc(*arguments: str) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise SimulatorError("the CUDA simulator needs g++: install it, or set CXX")
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        first = errors[0] if errors else done.stderr.strip()
        raise SimulatorError(f"g++ does not compile the kernel: {first}")


@cache
def _machine() -> str:
    """Code is compiled for this very processor."""
    cpu = Path("/proc/cpuinfo")
    flags = re.search(r"^(flags|Features)\s*:.*$", cpu.read_text(), re.M) if cpu.exists() else None
    return f"{platform.machine()} {flags.group() if flags else platform.processor()}"


@cache
def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("RINGRT_CUDASIM_CACHE") or Path(home) / "ringrt" / "cudasim")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
