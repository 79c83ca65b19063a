"""ringrt's own transports. They enter by the `ringrt` entry-point group, as anybody's do."""

from __future__ import annotations

import contextlib
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
#: What only torchrun sets.
_TORCHRUN = "TORCHELASTIC_RUN_ID"


RINGRT_PROTOCOL = 1


@hookimpl
def ringrt_register_transports() -> list[TransportSpec]:
    """threads, mpi, torch, tcp and nccl."""
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
            launched=_launched_by_mpi,
            connect=_connect_mpi,
            launcher="mpirun -n 4",
        ),
        TransportSpec(
            name="torch",
            summary="one process a rank, under torchrun or in any process group (PyTorch, gloo)",
            probe=_probe_torch,
            launched=torch_launch,
            connect=_connect_torch,
            launcher="torchrun --nproc-per-node 4 --no-python",
        ),
        TransportSpec(
            name="tcp",
            summary="one process a rank, on sockets (RINGRT_RANK, RINGRT_SIZE, RINGRT_RENDEZVOUS)",
            probe=lambda: None,
            launched=_launched_by_hand,
            connect=_connect_tcp,
            launcher="RINGRT_RANK=0 RINGRT_SIZE=4 RINGRT_RENDEZVOUS=host:29500",
        ),
        TransportSpec(
            name="nccl",
            summary="between GPUs, by NCCL, for ranks that another transport connects",
            probe=missing_nccl,
            over=_over_nccl,
        ),
    ]


def mpi_launch() -> Launch | None:
    """Whether an MPI launcher started this process. Reads the environment only: importing
    mpi4py.MPI would initialise MPI."""
    for rank, size in _LAUNCHERS:
        if rank in os.environ and size in os.environ:
            with contextlib.suppress(ValueError):
                return Launch(int(os.environ[rank]), int(os.environ[size]))
    return None


def _launched_by_mpi() -> Launch | None:
    """What the user says of the rank goes before what a launcher says, and what torchrun says
    before what srun said to torchrun."""
    return None if _launched_by_hand() or _TORCHRUN in os.environ else mpi_launch()


def torch_launch() -> Launch | None:
    """Whether torchrun, or somebody who sets what PyTorch's `env://` reads, started this process.
    RANK and WORLD_SIZE alone are set by others too."""
    address = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not (address or _TORCHRUN in os.environ) or _launched_by_hand():
        return None
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    try:
        return Launch(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except ValueError:
        # PyTorch says what is wrong with them when the ring is joined.
        return Launch(0, 1)


def _launched_by_hand() -> Launch | None:
    from ringrt.transports.rendezvous import environment_launch

    return environment_launch()


def _probe_mpi() -> str | None:
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'ringrt[mpi]'"
    return None


def _connect_mpi() -> Transport:
    from ringrt.transports.mpi import MpiTransport

    return MpiTransport.world(mpi_launch())


def _probe_torch() -> str | None:
    if find_spec("torch") is None:
        return "PyTorch is not installed: pip install torch"
    return None


def _connect_torch() -> Transport:
    from ringrt.transports.process_group import ProcessGroupTransport

    return ProcessGroupTransport.of()


def _connect_tcp() -> Transport:
    from ringrt.transports.tcp import connect

    return connect()


def _thread_group(size: int) -> Sequence[Transport]:
    from ringrt.transports.threads import thread_group

    return thread_group(size)


def _over_nccl(end: Transport) -> Transport:
    from ringrt.transports.nccl import NcclTransport

    return NcclTransport(end)
