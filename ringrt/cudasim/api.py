"""What ringrt uses in place of the module `cupy` when RINGRT_CUDASIM=1: the same names, with the
same arguments, for what it uses of CuPy. Anything else is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ringrt.cudasim import cuda
from ringrt.cudasim.array import ndarray
from ringrt.cudasim.creation import asarray, asnumpy, empty, zeros
from ringrt.cudasim.dlpack import from_dlpack
from ringrt.cudasim.memory import get_default_memory_pool
from ringrt.cudasim.module import RawModule

__all__ = [
    "RawModule",
    "asarray",
    "asnumpy",
    "cuda",
    "empty",
    "from_dlpack",
    "get_default_memory_pool",
    "ndarray",
    "zeros",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(f"the CUDA simulator does not implement cupy.{name}")
