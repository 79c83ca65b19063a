"""`cupy.cuda.nccl`: sends and receives between ranks that are threads of this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

from ringrt.cudasim import core
from ringrt.cudasim.copies import duration
from ringrt.cudasim.core import CHANGED, HostThread, caller, enter, place
from ringrt.cudasim.errors import SimulatorError
from ringrt.cudasim.executor import Call
from ringrt.cudasim.heap import span
from ringrt.cudasim.lanes import Lane, Touch, find_lane, issue
from ringrt.cudasim.matching import (
    INVALID_ARGUMENT,
    INVALID_USAGE,
    Clique,
    Member,
    NcclError,
    post_all,
)

__all__ = [
    "NCCL_BFLOAT16",
    "NCCL_CHAR",
    "NCCL_DOUBLE",
    "NCCL_FLOAT",
    "NCCL_FLOAT16",
    "NCCL_FLOAT32",
    "NCCL_FLOAT64",
    "NCCL_HALF",
    "NCCL_INT",
    "NCCL_INT8",
    "NCCL_INT32",
    "NCCL_INT64",
    "NCCL_UINT8",
    "NCCL_UINT32",
    "NCCL_UINT64",
    "NcclCommunicator",
    "NcclError",
    "available",
    "get_unique_id",
    "get_version",
    "groupEnd",
    "groupStart",
]

available = True

NCCL_INT8 = NCCL_CHAR = 0
NCCL_UINT8 = 1
NCCL_INT32 = NCCL_INT = 2
NCCL_UINT32 = 3
NCCL_INT64 = 4
NCCL_UINT64 = 5
NCCL_FLOAT16 = NCCL_HALF = 6
NCCL_FLOAT32 = NCCL_FLOAT = 7
NCCL_FLOAT64 = NCCL_DOUBLE = 8
NCCL_BFLOAT16 = 9
_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2)

_cliques: dict[bytes, Clique] = {}


def get_version() -> int:
    """The version of NCCL whose behaviour is stood in for."""
    return 23203


def get_unique_id() -> bytes:
    """A new id, by which the ranks of one communicator find each other."""
    made = os.urandom(128)
    with CHANGED:
        _cliques[made] = Clique()
    return made


def groupStart() -> None:  # noqa: N802
    """Begin a group: its calls start together when the outermost one of the thread ends."""
    with CHANGED:
        enter().group_depth += 1


def groupEnd() -> None:  # noqa: N802
    """End a group. With the outermost its calls are queued, as one operation on each stream."""
    with CHANGED:
        thread = enter()
        if not thread.group_depth:
            raise NcclError(INVALID_USAGE, "groupEnd() without groupStart()")
        thread.group_depth -= 1
        if not thread.group_depth:
            _launch(thread)


class NcclCommunicator:
    """One rank's end, on the device that is current when it is made. Waits for the others."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
        if config is not None:
            raise SimulatorError("NcclCommunicator: config= is not simulated")
        with CHANGED:
            thread = enter()
            if commId not in _cliques:
                raise NcclError(
                    INVALID_ARGUMENT,
                    "commId is of no communicator to come in this process: simulated NCCL is "
                    "between threads",
                )
            if not 0 <= rank < ndev:
                raise NcclError(INVALID_ARGUMENT, f"rank {rank} of {ndev}")
            if thread.group_depth:
                raise SimulatorError("NcclCommunicator: making one in a group is not simulated")
            self._member = Member(_cliques[commId], rank, ndev, thread.device, thread)
            self._member.clique.join(self._member)
            _cliques.pop(commId, None)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Queue the sending of `count` elements to a rank."""
        self._call("send", sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Queue the receiving of `count` elements from a rank."""
        self._call("recv", recvbuf, count, datatype, peer, stream)

    def rank_id(self) -> int:
        """This rank."""
        self._member.check_alive()
        return self._member.rank

    def size(self) -> int:
        """How many ranks there are."""
        self._member.check_alive()
        return self._member.size

    def device_id(self) -> int:
        """The device it was made on."""
        self._member.check_alive()
        return self._member.device

    def check_async_error(self) -> None:
        """Raise what went wrong with an operation of this rank since it was issued."""
        with CHANGED:
            self._member.check_alive()
            if self._member.error:
                raise self._member.error.with_traceback(None)

    def abort(self) -> None:
        """Give up: what is queued ends without its counterparts. Others that wait for this rank
        wait until they give up too."""
        with CHANGED:
            member, thread = self._member, core.current()
            thread.group_calls = [call for call in thread.group_calls if call.member is not member]
            if not member.end:
                member.abort()

    def destroy(self) -> None:
        """End it in good order: all that was issued must have met its counterpart."""
        with CHANGED:
            enter()
            if not self._member.end:
                self._member.destroy()

    def _call(
        self, verb: str, address: int, count: int, datatype: int, peer: int, stream: int
    ) -> None:
        me = self._member
        what = f"NCCL {verb} of rank {me.rank}"
        with CHANGED:
            thread = enter()
            me.check_alive()
            if datatype not in range(len(_BYTES)):
                raise NcclError(INVALID_ARGUMENT, f"{what}: datatype {datatype}")
            if not 0 <= peer < me.size or count < 0:
                text = f"{what}: {count} elements, peer {peer} of {me.size} ranks"
                raise NcclError(INVALID_ARGUMENT, text)
            lane = find_lane(stream, me.device)
            memory = span(address, count * _BYTES[datatype], what)
            if lane.device != me.device or (count and memory.allocation.device != me.device):
                raise NcclError(
                    INVALID_ARGUMENT,
                    f"{what}: the communicator is on device {me.device}, "
                    f"the call on {lane} with {memory.allocation}",
                )
            thread.group_calls.append(Call(me, verb, peer, memory, lane, caller()))
            if not thread.group_depth:
                _launch(thread)


def _launch(thread: HostThread) -> None:
    """Queue the calls of the thread's group."""
    calls: list[Call] = thread.group_calls
    thread.group_calls = []
    groups: dict[tuple[Member, Lane], list[Call]] = {}
    for call in calls:
        call.member.check_alive()
        groups.setdefault((call.member, call.lane), []).append(call)
    for member in dict.fromkeys(call.member for call in calls):
        _check_own(member, [call for call in calls if call.member is member])
    for (_, lane), group in groups.items():
        _issue(lane, tuple(group))


def _check_own(member: Member, calls: list[Call]) -> None:
    verbs = [call.verb for call in calls if call.peer == member.rank]
    if verbs.count("send") != verbs.count("recv"):
        raise NcclError(
            INVALID_USAGE,
            f"rank {member.rank} sends {verbs.count('send')} messages to itself and receives "
            f"{verbs.count('recv')} from itself in one group",
        )


def _issue(lane: Lane, calls: tuple[Call, ...]) -> None:
    said = ", ".join(map(str, calls[:4])) + (f", ... {len(calls)} calls" if calls[4:] else "")
    label = f"NCCL {said}" if len(calls) == 1 else f"NCCL group ({said})"
    touches, traffic = [], {"send": 0, "recv": 0}
    for call in calls:
        name = f"{call.verb} buffer at {place(call.where)}"
        touches.append(Touch(*call.memory, call.verb == "recv", name))
        traffic[call.verb] += call.nbytes
    time = duration(max(traffic.values()))
    op = issue(lane, label, touches=touches, duration=time, calls=calls, where=calls[0].where)
    if lane.capture is None:
        post_all(op)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(f"the CUDA simulator does not implement cupy.cuda.nccl.{name}")
