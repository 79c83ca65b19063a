"""ringrt's own backends. They enter by the `ringrt` entry-point group, as anybody's do, and
import nothing they compute with until they are loaded."""

from __future__ import annotations

from importlib.util import find_spec

from ringrt.backend import Backend, BackendContext, BackendSpec
from ringrt.hookspecs import hookimpl


@hookimpl
def ringrt_register_backends() -> list[BackendSpec]:
    """reference, cpu and null."""
    return [
        BackendSpec(
            name="cpu",
            summary="Numba on all cores, blockwise",
            probe=_probe_numba,
            load=_load_cpu,
            priority=50,
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


def _load_cpu(context: BackendContext) -> Backend:
    from ringrt_backends.cpu import CpuBackend

    return CpuBackend(context.threads)


def _load_reference(context: BackendContext) -> Backend:
    from ringrt_backends.reference import ReferenceBackend

    return ReferenceBackend()


def _load_null(context: BackendContext) -> Backend:
    from ringrt_backends.null import NullBackend

    return NullBackend()
