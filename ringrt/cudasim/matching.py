"""Which send meets which receive: the ranks of one NCCL communicator, seen together."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from ringrt.cudasim import core, executor
from ringrt.cudasim.core import CHANGED, HostThread, place
from ringrt.cudasim.executor import DONE, Call, Op
from ringrt.cudasim.runtime import CUDARuntimeError
from ringrt.errors import name_ranks

_ERRORS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}
INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 4, 5, 6


class NcclError(CUDARuntimeError):
    """An error as NCCL gives it, with `status` its number; `detail` says what was wrong."""

    def __str__(self) -> str:
        text = _ERRORS.get(self.status, f"NCCL error {self.status}")
        return f"{text} ({self.args[1]})" if self.args[1] else text


@dataclass(eq=False, slots=True)
class Member:
    """One rank of a communicator. `end` says how it ended, once it has."""

    clique: Clique
    rank: int
    size: int
    device: int
    thread: HostThread
    ops: deque[Op] = field(default_factory=deque)
    end: str = ""
    error: NcclError | None = None

    def check_alive(self) -> None:
        """Raise if it has been destroyed or aborted."""
        if self.end:
            raise NcclError(INVALID_USAGE, self.end)

    def keep(self, op: Op) -> None:
        """Remember an operation for `abort`. The lock is held."""
        while self.ops and self.ops[0].state >= DONE:
            self.ops.popleft()
        self.ops.append(op)

    def mismatch(self, text: str) -> NcclError:
        """An error of one of its operations, kept for the rank to ask for."""
        self.error = self.error or NcclError(INVALID_USAGE, text)
        return self.error

    def abort(self) -> None:
        """End what is queued without its counterparts. The lock is held."""
        ops = [op for op in self.ops if op.state < DONE]
        self._leave("aborted")
        self.clique.abandon(self, ops)

    def destroy(self) -> None:
        """End in good order. The lock is held."""
        if left := self.clique.open_calls(self):
            raise NcclError(
                INVALID_USAGE,
                f"rank {self.rank} destroys its communicator, but has issued a call that has "
                f"no counterpart: {left[0]} ({place(left[0].where)})",
            )
        self._leave("destroyed")

    def _leave(self, verb: str) -> None:
        self.end = f"rank {self.rank} has {verb} its communicator"
        self.ops = deque()


@dataclass(eq=False, slots=True)
class Clique:
    """The ranks that share a unique id. Calls without a counterpart yet wait, all of one verb, by
    (source, destination), and are matched in the order in which they were issued."""

    size: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    failure: str = ""
    waiting: dict[tuple[int, int], deque[Call]] = field(default_factory=lambda: defaultdict(deque))

    def join(self, member: Member) -> None:
        """Take part, and wait for all others. The lock is held."""
        rank, size = member.rank, member.size
        if self.size not in (0, size):
            self._fail(f"rank {rank} says that there are {size} ranks, others {self.size}")
        elif rank in self.members:
            self._fail(f"rank {rank} comes twice")
        self.size = self.size or size
        self.members[rank] = member
        if len(self.members) == self.size:
            self._check_devices()
        executor.made_progress()
        deadline = time.monotonic() + core.timeout()
        while len(self.members) < self.size and not self.failure:
            if not CHANGED.wait(deadline - time.monotonic()):
                absent = set(range(self.size)) - self.members.keys()
                self._fail(f"{name_ranks(absent)} did not come within {core.timeout():g} s")
        if self.failure:
            raise NcclError(INVALID_USAGE, self.failure)

    def _check_devices(self) -> None:
        ranks_of = defaultdict(list)
        for rank, member in sorted(self.members.items()):
            ranks_of[member.device].append(rank)
        for device, ranks in ranks_of.items():
            if len(ranks) > 1 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
                self._fail(
                    f"{name_ranks(ranks)} are on device {device}, which NCCL does not take "
                    f"unless NCCL_MULTI_RANK_GPU_ENABLE=1"
                )

    def _fail(self, text: str) -> None:
        self.failure = self.failure or text
        executor.made_progress()

    def post(self, call: Call) -> None:
        """Leave a call to be found, or match it with its counterpart. The lock is held."""
        incoming = call.verb == "recv"
        queue = self.waiting[
            (call.peer, call.member.rank) if incoming else (call.member.rank, call.peer)
        ]
        if queue and queue[0].verb != call.verb:
            call.partner = queue.popleft()
            call.partner.partner = call
        elif end := self.members[call.peer].end:
            call.lost = end
        else:
            queue.append(call)
        executor.made_progress()

    def open_calls(self, member: Member) -> list[Call]:
        """The calls of a rank without a counterpart. The lock is held."""
        return [call for queue in self.waiting.values() for call in queue if call.member is member]

    def abandon(self, member: Member, ops: list[Op]) -> None:
        """A rank gives up: its operations end without their counterparts, and its partners wait
        for it in vain. The lock is held."""
        for queue in self.waiting.values():
            for call in [call for call in queue if call.member is member]:
                queue.remove(call)
        for op in ops:
            for call in op.calls:
                if call.partner is not None and not call.moved:
                    call.partner.partner = None
                    call.partner.lost = member.end
            executor.drop(op)
        executor.made_progress()

    def why_missing(self, call: Call) -> str:
        """Why a call has no counterpart, as far as can be seen. The lock is held."""
        verb = "send" if call.verb == "recv" else "receive"
        peer = self.members[call.peer]
        if peer.end:
            return peer.end
        for other in peer.thread.group_calls:
            if other.member is peer and other.peer == call.member.rank and other.verb != call.verb:
                return (
                    f"rank {call.peer} has not ended the NCCL group with its {verb} "
                    f"({place(other.where)})"
                )
        return f"rank {call.peer} has issued no {verb} for it"


def post_all(op: Op) -> None:
    """Post the calls of an operation that has been queued. The lock is held."""
    if op.calls:
        op.calls[0].member.keep(op)
    for call in op.calls:
        call.member.clique.post(call)


def again(call: Call) -> Call:
    """The same call once more, for another launch of a graph."""
    call.member.check_alive()
    return replace(call, op=None, partner=None, moved=False, lost="")
