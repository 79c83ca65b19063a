"""What it gives to poke MPI between tiles: time waited for K,V after the compute of a step.

    mpirun -n 2 python benchmarks/mpi_progress.py [tokens] [repeats]

The two ways alternate in one run; the figures are medians over the repeats, of the rank that
waits longest.
"""

from __future__ import annotations

import statistics
import sys

import numpy as np

import ringrt
from ringrt.engine.agree import gather
from ringrt.plan import PARTITIONS

TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
REPEATS = int(sys.argv[2]) if len(sys.argv) > 2 else 5
HEADS, DIM = 8, 128


def main() -> None:
    """Print the medians on rank 0."""
    with ringrt.Ring.from_mpi(partition="striped", threads=1) as ring:
        rows = PARTITIONS["striped"].count(TOKENS, ring.size, ring.rank)
        rng = np.random.default_rng(ring.rank)
        q, k, v = (rng.standard_normal((1, rows, HEADS, DIM), dtype=np.float32) for _ in range(3))
        ring.attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], causal=True)
        seen: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(REPEATS):
            for poke in (False, True):
                ring.transport.needs_progress = poke
                gather(ring.transport, b"", ring.timeout)
                ring.attention(q, k, v, causal=True)
                stats = ring.stats
                assert stats is not None
                own = f"{stats.wait_s} {stats.seconds}".encode()
                all_ranks = gather(ring.transport, own, ring.timeout)
                waits, seconds = zip(*(map(float, each.split()) for each in all_ranks), strict=True)
                seen[poke].append((max(waits), max(seconds)))
        if ring.rank == 0:
            sent = stats.bytes_sent / (1 << 20)
            print(f"{ring.size} ranks, {TOKENS} tokens, {sent:.0f} MiB sent by a rank")
            for poke, name in ((False, "only waiting"), (True, "poking between tiles")):
                wait, total = (
                    statistics.median(column) for column in zip(*seen[poke], strict=True)
                )
                print(f"{name:>22}: waited {1e3 * wait:7.1f} ms of {1e3 * total:7.1f} ms")


if __name__ == "__main__":
    main()
