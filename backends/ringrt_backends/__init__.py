"""ringrt's own backends. They enter by the `ringrt` entry-point group, as anybody's do, and
import nothing they compute with until they are loaded."""

from __future__ import annotations

from importlib.util import find_spec

from ringrt.backend import Backend, BackendContext, BackendSpec
from ringrt.device.cuda import CudaDevice
from ringrt.device.driver import missing_cuda, simulated
from ringrt.hookspecs import hookimpl

RINGRT_PROTOCOL = 1


@hookimpl
def ringrt_register_backends() -> list[BackendSpec]:
    """cupy, cpu, numba, reference and null."""
    return [
        BackendSpec(
            name="cupy",
            summary="CUDA GPUs: CuPy, tensor cores for float16 and bfloat16",
            probe=missing_cuda,
            load=_load_cupy,
            # The simulator is for finding faults, not for computing.
            priority=None if simulated() else 100,
            device="cuda",
            rounds_weights=True,
            # On tensor cores a value of NaN reaches all rows of a tile on the diagonal.
            contains_nan=False,
        ),
        BackendSpec(
            name="cpu",
            summary="all cores: compiled vector code, or plain Numba",
            probe=_probe_numba,
            load=_load_cpu,
            priority=50,
            rounds_weights=_cpu_rounds_weights,
            detail=_cpu_detail,
        ),
        # Not taken unasked before its speed has been measured on a GPU.
        BackendSpec(
            name="numba",
            summary="CUDA GPUs without CuPy: Numba, arrays brought from the host",
            probe=_probe_numba_cuda,
            load=_load_numba_cuda,
        ),
        BackendSpec(
            name="reference",
            summary="plain NumPy, float64 inside: slow, the definition",
            probe=lambda: None,
            load=_load_reference,
            priority=0,
        ),
        BackendSpec(
            name="null",
            summary="computes nothing (out 0, lse -inf): for plans, traces and transports",
            probe=lambda: None,
            load=_load_null,
        ),
    ]


def _probe_numba() -> str | None:
    if find_spec("numba") is None:
        return "Numba is not installed: pip install 'ringrt[cpu]'"
    return None


def _probe_numba_cuda() -> str | None:
    from ringrt_backends.cuda_numba import missing

    return missing()


def _load_numba_cuda(context: BackendContext) -> Backend:
    from ringrt_backends.cuda_numba import NumbaCudaBackend

    return NumbaCudaBackend()


def _load_cupy(context: BackendContext) -> Backend:
    from ringrt_backends.cuda_cupy import CupyBackend

    assert isinstance(context.device, CudaDevice)
    return CupyBackend(context.device)


def _load_cpu(context: BackendContext) -> Backend:
    from ringrt_backends.cpu.backend import CpuBackend, code_in_use

    return CpuBackend(context.threads, code_in_use()[0])


def _cpu_rounds_weights(dtype: str) -> bool:
    from ringrt_backends.cpu.backend import code_in_use

    machine, _ = code_in_use()
    return dtype == "bfloat16" and machine is not None and machine.pairs != ""


def _cpu_detail() -> str:
    from ringrt_backends.cpu.backend import code_in_use

    return code_in_use()[1]


def _load_reference(context: BackendContext) -> Backend:
    from ringrt_backends.reference import ReferenceBackend

    return ReferenceBackend()


def _load_null(context: BackendContext) -> Backend:
    from ringrt_backends.null import NullBackend

    return NullBackend()
