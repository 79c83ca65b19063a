"""ringrt's own transports. They enter by the `ringrt` entry-point group, as anybody's do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

from ringrt.device.driver import missing_nccl
from ringrt.hookspecs import hookimpl
from ringrt.transport import Launch, Transport, TransportSpec

#: (rank, size) variables that launchers set: MPICH and Intel MPI (Hydra), Open MPI, Slurm.
_LAUNCHERS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
)


RINGRT_PROTOCOL = 1


@hookimpl
def ringrt_register_transports() -> list[TransportSpec]:
    """threads, mpi and nccl."""
    return [
        TransportSpec(
            name="threads",
            summary="ranks are threads of one process",
            probe=lambda: None,
            group=_thread_group,
        ),
        TransportSpec(
            name="mpi",
            summary="one process a rank, under mpirun (mpi4py)",
            probe=_probe_mpi,
            launched=mpi_launch,
            connect=_connect_mpi,
        ),
        TransportSpec(
            name="nccl",
            summary="between GPUs, by NCCL; ranks are threads, or processes under mpirun",
            probe=missing_nccl,
            over=_over_nccl,
        ),
    ]


def mpi_launch() -> Launch | None:
    """Whether an MPI launcher started this process. Reads the environment only: importing
    mpi4py.MPI would initialise MPI."""
    for rank, size in _LAUNCHERS:
        if rank in os.environ and size in os.environ:
            return Launch(int(os.environ[rank]), int(os.environ[size]))
    return None


def _probe_mpi() -> str | None:
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'ringrt[mpi]'"
    return None


def _connect_mpi() -> Transport:
    from ringrt.transports.mpi import MpiTransport

    return MpiTransport.world(mpi_launch())


def _thread_group(size: int) -> Sequence[Transport]:
    from ringrt.transports.threads import thread_group

    return thread_group(size)


def _over_nccl(end: Transport) -> Transport:
    from ringrt.transports.nccl import NcclTransport

    return NcclTransport(end)
