"""Ends of a ring over gloo, all in one process."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import torch.distributed as dist

from ringrt.transports.gloo import Mesh
from ringrt.transports.process_group import ProcessGroupTransport


def at_once(functions):
    """Call all, each on a thread; what each returned or raised."""
    results = [None] * len(functions)

    def run(index):
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), "a rank hangs"
    return results


@contextlib.contextmanager
def ends(size):
    """The ends of a ring, all in this process, over gloo."""
    store = dist.HashStore()

    def make(rank):
        return ProcessGroupTransport(Mesh(store, rank, size, 20), (rank, size))

    group = at_once([lambda rank=rank: make(rank) for rank in range(size)])
    try:
        yield group
    finally:
        at_once([end.close for end in group])


def on_all(group, fn):
    """fn(end) on each end; what each returned or raised."""
    return at_once([lambda end=end: fn(end) for end in group])


def data(value, count=5):
    return np.full(count, value, np.uint8)
