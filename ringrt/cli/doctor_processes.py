"""Tries the transports between processes: two of them, by the launcher that there is."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from ringrt.registry import missing_for, registry

#: What was tried, whether it works, a detail, and what would mend it.
Finding = tuple[str, bool, str, str]

#: One rank of two, through the product's own transport.
_TRIAL = """
import numpy, ringrt
with ringrt.Ring.{maker}(backend="reference", timeout=20) as ring:
    x = numpy.ones((1, 2, 1, 4), "float32")
    out, _ = ring.attention(x, x, x)
    if ring.rank == 0:
        print(ring.size, float(out.sum()))
"""
_SAID = ["2", "8.0"]
_TIMEOUT = 60
#: Open MPI by itself refuses root, and more ranks than cores.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def findings() -> Iterator[Finding]:
    """mpi, torch and tcp."""
    for name, attempt in (("mpi", _try_mpi), ("torch", _try_torch), ("tcp", _try_tcp)):
        spec = registry().transports.get(name)
        missing = missing_for(spec) if spec else "it is not there: unblock ringrt's transports"
        if missing is None:
            yield f"transport {name}", *attempt()
        else:
            detail, _, remedy = missing.partition(": ")
            yield f"transport {name}", False, detail, remedy


def _try_mpi() -> tuple[bool, str, str]:
    # The one beside this Python before any other.
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    mpirun = beside or shutil.which("mpirun")
    if mpirun is None:
        return False, "there is no mpirun", "pip install 'ringrt[mpi]'"
    command = [mpirun, "-n", "2", *_python("from_mpi")]
    error = _failure(_outputs([command], [_OPEN_MPI]))
    if error is not None:
        remedy = "use the mpirun of the MPI library that mpi4py was built for"
        return False, f"{mpirun}: {error}", remedy
    return True, f"two processes by {mpirun}", ""


def _try_torch() -> tuple[bool, str, str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", "--no-python", *_python("from_process_group")]
    error = _failure(_outputs([command], [{}]))
    if error is not None:
        return False, error, "update PyTorch: pip install 'ringrt[torch]'"
    return True, "two processes by torchrun", ""


def _try_tcp() -> tuple[bool, str, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = [
        {"RINGRT_RANK": rank, "RINGRT_SIZE": "2", "RINGRT_RENDEZVOUS": address} for rank in "01"
    ]
    error = _failure(_outputs([_python("from_environment")] * 2, ranks))
    if error is not None:
        return False, error, "allow connections between processes of this machine"
    return True, "two processes on this machine", ""


def _python(maker: str) -> list[str]:
    return [sys.executable, "-c", _TRIAL.format(maker=maker)]


def _outputs(
    commands: list[list[str]], environments: Sequence[Mapping[str, str]]
) -> tuple[list[int], str, str] | None:
    """Run commands at the same time: exit codes, and what all said; None past the limit."""
    running = [
        subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        said = [process.communicate(timeout=_TIMEOUT) for process in running]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for process in running:
            process.kill()
    out, error = ("".join(parts) for parts in zip(*said, strict=True))
    return [process.returncode for process in running], out, error


def _failure(outputs: tuple[list[int], str, str] | None) -> str | None:
    """What went wrong, in one line."""
    if outputs is None:
        return f"two processes did not end in {_TIMEOUT} s"
    codes, out, error = outputs
    if not any(codes) and out.split() == _SAID:
        return None
    said = (error or out).strip().splitlines()
    return said[-1] if said else "wrong answer"
