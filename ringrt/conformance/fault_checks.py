"""What a transport does when a rank fails: every other rank learns of it, within its deadline and
in words. Each check is what one rank does; rank 1 is the one that fails. Ends that a check leaves
open are closed when all ranks are through with it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import numpy as np

from ringrt.conformance.checks import CheckList, Failed, Refused, expect
from ringrt.conformance.oracle import Array
from ringrt.conformance.ranks import Rank, pattern
from ringrt.errors import ExchangeTimeout, PeerLost, TransportError
from ringrt.plugins import one_line

CHECKS: CheckList[Rank] = CheckList()

_FAULTY = 1
#: Within so many seconds a rank must hear of what it could wait for much longer.
_SOON = 8.0
#: How late a deadline may be noticed.
_SLACK = 5.0
#: After which the others are waiting, in seconds.
_A_WHILE = 0.2
_REASON = "out of memory, as planned"


def raised(
    call: Callable[[], object],
    kind: type[Exception],
    what: str,
    but: type[Exception] | tuple[()] = (),
) -> str:
    """The text of the error of that kind, and not of a certain other, that a call raises, soon."""
    begin = time.monotonic()
    try:
        call()
    except kind as error:
        took = time.monotonic() - begin
        expect(took < _SOON, f"{what}: took {took:.1f} s to raise {kind.__name__}")
        expect(not isinstance(error, but), f"{what}: got {one_line(error)}")
        return str(error)
    except Exception as error:
        raise Failed(f"{what}: expected {kind.__name__}, got {one_line(error)}") from error
    raise Failed(f"{what}: expected {kind.__name__}, and nothing was raised")


def names(text: str, **parts: object) -> None:
    """The text names each of these numbers or words."""
    for name, part in parts.items():
        found = re.search(rf"(?<![\w.]){re.escape(str(part))}(?!\w|\.\d)", text)
        expect(found, f"the error must name the {name}, {part}: {text!r}")


def receive(
    rank: Rank, peer: int, count: int = 64, step: int = 4, timeout: float | None = None
) -> None:
    """Wait for a message of a peer."""
    rank.wait(rank.exchange([], [(peer, rank.empty(count))], step), timeout)


def ready(rank: Rank) -> None:
    """The faulty rank waits until every other is about to make the call in question, and a while
    longer. So none of them is still in an earlier call, where the fault would meet it too; they
    do not wait for it to hear."""
    if rank.rank != _FAULTY:
        rank.unwaited.append(rank.exchange([(_FAULTY, rank.empty(1))], []))
        return
    peers = [peer for peer in range(rank.size) if peer != _FAULTY]
    rank.wait(rank.exchange([], [(peer, rank.empty(1)) for peer in peers]))
    time.sleep(_A_WHILE)


def watched(rank: Rank) -> int:
    """Of whom a rank waits to hear: of the faulty one, or, as the first of several, of another
    that waits for it."""
    return 2 if rank.rank == 0 and rank.size > 2 else _FAULTY


def _meet(rank: Rank, sent: int, expected: int) -> None:
    if not rank.on_host:
        raise Refused("sizes that do not meet are not checked on a transport between GPUs")
    data, got = pattern(sent, rank.rank, rank.after), rank.empty(expected)

    def meet() -> None:
        rank.wait(rank.exchange([(rank.after, data)], [(rank.before, got)], 7), 3.0)

    what = f"{sent} bytes sent meet {expected} expected"
    text = raised(meet, TransportError, what, but=ExchangeTimeout)
    names(text, bytes=sent if str(sent) in text else expected)


@CHECKS.add
def more_bytes_than_expected(rank: Rank) -> None:
    """A message larger than its receiver expects is a `TransportError` there."""
    _meet(rank, 5000, 4000)


@CHECKS.add
def fewer_bytes_than_expected(rank: Rank) -> None:
    """A message smaller than its receiver expects is a `TransportError` there, and not a wait for
    the rest."""
    _meet(rank, 4000, 5000)


@CHECKS.add
def silent_peer(rank: Rank) -> None:
    """A wait that passes its deadline is an `ExchangeTimeout` that names rank, peer, ring step and
    bytes."""
    if rank.rank == _FAULTY:
        return
    begin = time.monotonic()
    what = f"a silent peer, with a deadline of {rank.short} s"
    text = raised(lambda: receive(rank, _FAULTY, 640, 4, rank.short), ExchangeTimeout, what)
    took = time.monotonic() - begin
    expect(rank.short / 2 < took < rank.short + _SLACK, f"{what}: it raised after {took:.2f} s")
    own, peer = f"rank {rank.rank}", f"rank {_FAULTY}"
    names(text, rank=own, peer=peer, step="step 4", bytes=640)


def _late(rank: Rank, call: Callable[[], object]) -> None:
    if rank.rank == _FAULTY:
        return
    text = raised(call, ExchangeTimeout, f"a control round without rank {_FAULTY}")
    names(text, rank=_FAULTY)


@CHECKS.add
def late_to_a_gathering(rank: Rank) -> None:
    """`all_gather_bytes` past its deadline is an `ExchangeTimeout` that names who did not come."""
    _late(rank, lambda: rank.end.all_gather_bytes(b"", rank.short))


@CHECKS.add
def late_to_a_barrier(rank: Rank) -> None:
    """`barrier` past its deadline is an `ExchangeTimeout` that names who did not come."""
    _late(rank, lambda: rank.end.barrier(rank.short))


def _aborted(rank: Rank, call: Callable[[], object], what: str) -> None:
    """Rank 1 aborts while the others are in a call, which must end with its reason."""
    ready(rank)
    if rank.rank == _FAULTY:
        rank.end.abort(_REASON)
    else:
        names(raised(call, PeerLost, what), rank=_FAULTY, reason=_REASON)


@CHECKS.add
def abort_ends_a_wait(rank: Rank) -> None:
    """A rank that waits in an exchange, for the failed one or for another, hears at once that it
    failed, and why."""
    _aborted(rank, lambda: receive(rank, watched(rank)), "an abort while waiting in an exchange")


@CHECKS.add
def abort_ends_a_control_round(rank: Rank) -> None:
    """The same in a control round."""
    _aborted(rank, lambda: rank.end.barrier(rank.timeout), "an abort while waiting in a barrier")


def _until(call: Callable[[], object]) -> Callable[[], None]:
    """Call again and again, not for ever."""

    def repeat() -> None:
        deadline = time.monotonic() + _SOON
        while time.monotonic() < deadline:
            call()
            time.sleep(1e-3)

    return repeat


@CHECKS.add
def abort_seen_by_poll(rank: Rank) -> None:
    """The same by `poll`, which itself never waits."""
    _aborted(rank, _until(rank.end.poll), "an abort while polling")


@CHECKS.add
def abort_seen_by_progress(rank: Rank) -> None:
    """The same by `Ticket.progress` of an exchange that can no longer complete."""
    if not rank.on_host:
        raise Refused("an exchange between GPUs needs no progress, and tells by `settle`")
    if rank.rank == _FAULTY:
        _aborted(rank, lambda: None, "")
        return
    ticket = rank.exchange([], [(watched(rank), rank.empty(64))], 4)
    _aborted(rank, _until(ticket.progress), "an abort while making progress")


@CHECKS.add
def after_an_abort(rank: Rank) -> None:
    """A rank that aborted, or another that heard of it, can use its end no more, and the other
    is told why; to abort again or to close the end is no error."""
    ready(rank)
    if rank.rank == _FAULTY:
        rank.end.abort(_REASON)
    else:
        raised(_until(rank.end.poll), PeerLost, "an abort while polling")
    for what, call in (
        ("poll", rank.end.poll),
        ("a wait for an exchange", lambda: receive(rank, watched(rank), timeout=rank.short)),
        ("all_gather_bytes", lambda: rank.end.all_gather_bytes(b"", rank.short)),
    ):
        kind = TransportError if rank.rank == _FAULTY else PeerLost
        text = raised(call, kind, f"{what} after an abort")
        if rank.rank != _FAULTY:
            names(text, rank=_FAULTY, reason=_REASON)
    if rank.rank == _FAULTY:
        rank.end.abort("once more")


@CHECKS.add
def peer_that_left(rank: Rank) -> None:
    """A wait for a rank that has closed its end is `PeerLost`, and names it. (Between GPUs nobody
    may be there to tell of it: then it is an `ExchangeTimeout` at the deadline.)"""
    ready(rank)
    if rank.rank == _FAULTY:
        rank.close()
        return
    kind, timeout = (PeerLost, rank.timeout) if rank.on_host else (TransportError, rank.short)
    text = raised(lambda: receive(rank, _FAULTY, timeout=timeout), kind, "a peer that left")
    names(text, rank=_FAULTY)


@CHECKS.add
def peer_that_left_a_control_round(rank: Rank) -> None:
    """The same in a control round."""
    ready(rank)
    if rank.rank == _FAULTY:
        rank.close()
        return
    text = raised(lambda: rank.end.barrier(rank.timeout), PeerLost, "a peer that left")
    names(text, rank=_FAULTY)


@CHECKS.add
def last_message(rank: Rank) -> None:
    """What a rank had sent before it left arrives, also where it is received later."""
    count = 3000
    ready(rank)
    if rank.rank == _FAULTY:
        sent: list[tuple[int, Array]] = [
            (peer, rank.put(pattern(count, _FAULTY, peer)))
            for peer in range(rank.size)
            if peer != _FAULTY
        ]
        rank.wait(rank.exchange(sent, []))
        rank.close()
        return
    # By now it has left.
    time.sleep(4 * _A_WHILE)
    got = rank.put(np.zeros(count, np.uint8))
    rank.wait(rank.exchange([], [(_FAULTY, got)]))
    rank.hold(got, pattern(count, _FAULTY, rank.rank), "the last message of a rank that left")
