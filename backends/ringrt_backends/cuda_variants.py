"""Which kernels serve a problem: the file, how it is compiled, and the tiles it works in. What is
said here of tile sizes and shared memory must be what the `.cu` files say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ringrt.device.cuda import TYPES
from ringrt.plan.problem import Problem

KERNELS = Path(__file__).parent / "kernels"
#: The largest head_dim and value_dim.
MAX_DIM = 256


class Kernel(NamedTuple):
    """A kernel to compile and launch: `block` rows (queries or keys) belong to one block, which
    takes `shared` bytes of shared memory."""

    path: Path
    name: str
    options: tuple[str, ...]
    block: int
    shared: int


@dataclass(frozen=True, slots=True)
class Variant:
    """The kernels of one dtype, with head_dim and value_dim filled up to `dk` and `dv`."""

    dtype: str
    dk: int
    dv: int

    @classmethod
    def of(cls, problem: Problem) -> Variant:
        """Tensor cores for the 16-bit dtypes, in multiples of 64; otherwise multiples of 32."""
        unit = 64 if problem.dtype in ("float16", "bfloat16") else 32
        dims = (-(-dim // unit) * unit for dim in (problem.head_dim, problem.value_dim))
        return cls(problem.dtype, *dims)

    @property
    def tensor_cores(self) -> bool:
        """Whether the products are made on tensor cores."""
        return self.dtype in ("float16", "bfloat16")

    @property
    def state_dtype(self) -> str:
        """Of m, z and y. In fp32, sums over many keys would lose what fp32 results need."""
        return "float32" if self.tensor_cores else "float64"

    @property
    def forward(self) -> Kernel:
        """Absorbs tiles into the state."""
        dk, dv = self.dk, self.dv
        if self.tensor_cores:
            block, keys = (64 if self._wide else 128), (32 if max(dk, dv) > 64 else 64)
            return self._kernel("forward", block, 2 * (block * dk + 2 * keys * dk + keys * dv))
        size = self._itemsize
        tile = 16 if size * max(dk, dv) > 512 else 32
        shared = size * (2 * tile * (dk + 1) + tile * dv + tile * (tile + 1))
        return self._kernel("forward", tile, shared)

    @property
    def backward_q(self) -> Kernel:
        """Adds to dq."""
        # Of the modules that hold it, one that is made anyhow.
        return self._kernel("backward_q", self._own, self._backward_shared(), *self._sums[:1])

    @property
    def backward_kv(self) -> list[Kernel]:
        """Add to dk and dv: in one launch, or in two where registers do not hold both."""
        if not self.tensor_cores:
            return [self._kernel("backward_kv", self._own, self._backward_shared())]
        shared = self._backward_shared() + 2 * 4 * self._step
        return [self._kernel("backward_kv", self._own, shared, option) for option in self._sums]

    @property
    def begin(self) -> Kernel:
        """Makes the empty state."""
        return Kernel(KERNELS / "state.cu", "begin", self._state_options(), 0, 0)

    @property
    def finish(self) -> Kernel:
        """Makes out and lse of a state."""
        return Kernel(KERNELS / "state.cu", "finish", self._state_options(), 0, 0)

    def all(self) -> list[Kernel]:
        """Every kernel."""
        return [self.begin, self.forward, self.finish, self.backward_q, *self.backward_kv]

    @property
    def _sums(self) -> tuple[str, ...]:
        if not self.tensor_cores:
            return ()
        return ("-DSUMS=1", "-DSUMS=2") if self._wide else ("-DSUMS=3",)

    @property
    def _wide(self) -> bool:
        return max(self.dk, self.dv) > 128

    @property
    def _itemsize(self) -> int:
        return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[self.dtype]

    @property
    def _own(self) -> int:
        return 64 if self.tensor_cores else 16

    @property
    def _step(self) -> int:
        return 32 if self.tensor_cores else 16

    def _backward_shared(self) -> int:
        dk, dv, own, step = self.dk, self.dv, self._own, self._step
        if self.tensor_cores:
            return 2 * (own * (dk + dv) + 2 * step * dk + step * dv)
        return self._itemsize * (2 * own * (dk + 1) + 2 * own * (dv + 1) + 2 * own * (own + 1))

    def _kernel(self, name: str, block: int, shared: int, *more: str) -> Kernel:
        kind = "mma" if self.tensor_cores else "exact"
        path = KERNELS / f"{kind}_{name.split('_')[0]}.cu"
        options = (f"-DTYPE={TYPES[self.dtype]}", f"-DDK={self.dk}", f"-DDV={self.dv}", *more)
        return Kernel(path, name, options, block, shared)

    def _state_options(self) -> tuple[str, ...]:
        # The tensor-core kernels hold m in powers of two.
        unit = "0.6931471805599453" if self.tensor_cores else "1.0"
        lse = "double" if self.dtype == "float64" else "float"
        return (
            f"-DTYPE={TYPES[self.dtype]}",
            f"-DSTATE={TYPES[self.state_dtype]}",
            f"-DLSE={lse}",
            f"-DUNIT={unit}",
        )
