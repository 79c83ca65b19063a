"""Ends of a ring over TCP within one process, and what strangers send to them."""

from __future__ import annotations

import json
import socket
import struct
import threading
from functools import partial

from ringrt.transports.tcp import TcpTransport
from support import at_once

#: More than the kernel buffers of a connection take.
LARGE = 32 << 20


class Meeting:
    """A rendezvous between threads; `spy` gets every address once all are there."""

    def __init__(self, size, spy=None, forge=None):
        self.size, self.host, self.spy, self.forge = size, "127.0.0.1", spy, forge or {}
        self.payloads, self.all_here = [None] * size, threading.Barrier(size)

    def seat(self, rank):
        return Seat(self, rank)


class Seat:
    def __init__(self, meeting, rank):
        self._meeting, self.rank = meeting, rank
        self.size, self.host = meeting.size, meeting.host

    def all_gather(self, payload, deadline):
        meeting = self._meeting
        said = json.loads(payload) | meeting.forge.get(self.rank, {})
        meeting.payloads[self.rank] = json.dumps(said).encode()
        meeting.all_here.wait(deadline.left)
        if meeting.spy is not None and self.rank == 0:
            meeting.spy([tuple(json.loads(each)["address"]) for each in meeting.payloads])
        meeting.all_here.wait(deadline.left)
        return list(meeting.payloads)


def on_ranks(size, fn):
    """fn(rank) on a thread for each rank; what each returned or raised."""
    return at_once([partial(fn, rank) for rank in range(size)])


def on_ends(size, fn, meeting=None, timeout=10):
    """fn(end) on each rank of a new ring, whose ends are closed afterwards."""
    meeting, ends = meeting or Meeting(size), []

    def run(rank):
        end = TcpTransport(meeting.seat(rank), timeout)
        ends.append(end)
        return fn(end)

    results = on_ranks(size, run)
    on_ranks(len(ends), lambda index: ends[index].close())
    return results


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def frame(kind, number, payload):
    """Bytes as they travel."""
    return struct.pack("!BQQ", kind, number, len(payload)) + payload
