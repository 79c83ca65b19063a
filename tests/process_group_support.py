"""Ends of a ring over gloo, all in one process."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from ringrt.transports.gloo import Mesh
from ringrt.transports.process_group import ProcessGroupTransport
from support import at_once


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
