"""Transports that are the one between threads but for one thing each, and the check that is meant
for it."""

from __future__ import annotations

import time

from ringrt.errors import ExchangeTimeout, PeerLost, TransportError
from ringrt.transport import Message

#: (class, the check that must fail, what its line says).
BROKEN: list[tuple[type, str, str]] = []


def meant_for(check, text=""):
    """Adds a class to `BROKEN`."""

    def note(kind):
        BROKEN.append((kind, check, text))
        return kind

    return note


class Same:
    """One end, over another, which does it all."""

    def __init__(self, end):
        self._end = end

    def __getattr__(self, name):
        return getattr(self._end, name)

    def exchange(self, sends, recvs, *, step, stream=None):
        return self.ticket(self._end.exchange(sends, recvs, step=step), sends, recvs)

    def ticket(self, ticket, sends, recvs):
        return ticket


class Ticket:
    """As its inner one."""

    def __init__(self, inner):
        self._inner, self.span = inner, None

    def __getattr__(self, name):
        return getattr(self._inner, name)


def wrapped(**methods):
    """A ticket with other methods."""
    kind = type("Other", (Ticket,), methods)
    return kind


@meant_for("attributes", "local_size: expected an int, got None")
class NoLocalSize(Same):
    local_size = None


@meant_for("attributes", "captures: expected True or False, got 'no'")
class WordForAFlag(Same):
    captures = "no"


@meant_for("rank-order", "all_gather_bytes: expected")
class LatestFirst(Same):
    def all_gather_bytes(self, payload, timeout):
        return self._end.all_gather_bytes(payload, timeout)[::-1]


@meant_for("gathered-payloads", "a payload of a megabyte")
class SmallPayloadsOnly(Same):
    def all_gather_bytes(self, payload, timeout):
        return [raw[:65_536] for raw in self._end.all_gather_bytes(payload, timeout)]


@meant_for("ring-exchange", "ExchangeTimeout")
@meant_for("all-to-all", "ExchangeTimeout")
@meant_for("large-both-ways", "ExchangeTimeout")
class SendsBeforeItReceives(Same):
    def exchange(self, sends, recvs, *, step, stream=None):
        self._end.exchange(sends, [], step=step).wait(0.3)
        return self._end.exchange([], recvs, step=step)


@meant_for("send-before-receive", "ExchangeTimeout")
class SendsWhenAsked(Same):
    """A send that is alone is waited for at once."""

    def exchange(self, sends, recvs, *, step, stream=None):
        ticket = self._end.exchange(sends, recvs, step=step)
        if sends and not recvs:
            ticket.wait(0.3)
        return ticket


@meant_for("matching-order", "message")
class AnyOrder(Same):
    """Messages of one length are sent in another order."""

    def exchange(self, sends, recvs, *, step, stream=None):
        lengths = [message.data.nbytes for message in sends]
        if len(set(lengths)) == 1:
            sends = sends[::-1]
        return self._end.exchange(sends, recvs, step=step)


@meant_for("empty-exchange", "nothing to do")
class NeedsMessages(Same):
    def exchange(self, sends, recvs, *, step, stream=None):
        if not sends and not recvs:
            raise TransportError("nothing to do")
        return self._end.exchange(sends, recvs, step=step)


@meant_for("zero-bytes", "ExchangeTimeout")
class SendsNothingForNothing(Same):
    def exchange(self, sends, recvs, *, step, stream=None):
        return self._end.exchange([m for m in sends if m.data.nbytes], recvs, step=step)


@meant_for("odd-sizes", "byte 65536 of 65537")
class LosesTheRest(Same):
    def ticket(self, ticket, sends, recvs):
        def wait(self, timeout):
            self._inner.wait(timeout)
            for message in recvs:
                message.data[65_536:] = 0

        return wrapped(wait=wait)(ticket)


@meant_for("several-in-flight", "one exchange at a time")
class OneAtATime(Same):
    busy = False

    def ticket(self, ticket, sends, recvs):
        if self.busy:
            raise TransportError("one exchange at a time")
        self.busy, end = bool(sends), self

        def wait(self, timeout):
            self._inner.wait(timeout)
            end.busy = False

        return wrapped(wait=wait)(ticket)


@meant_for("buffers-are-back", "after the sender wrote over it")
class ReadsLate(Same):
    """What is received is read once more from where it was sent, in the next control round."""

    lying = {}  # noqa: RUF012
    received = ()

    def exchange(self, sends, recvs, *, step, stream=None):
        for message in sends:
            self.lying[self.rank, message.peer] = message.data
        self.received = recvs
        return self._end.exchange(sends, recvs, step=step)

    def barrier(self, timeout):
        self._end.barrier(timeout)
        for message in self.received:
            message.data[...] = self.lying[message.peer, self.rank]
        self.received = []


@meant_for("buffers-are-back", "wrote into a buffer after the wait")
class WritesLate(Same):
    received = kept = ()

    def exchange(self, sends, recvs, *, step, stream=None):
        self.received = recvs
        return self._end.exchange(sends, recvs, step=step)

    def barrier(self, timeout):
        kept = [(m.data, m.data.copy()) for m in self.received if (m.data != 9).any()]
        self.kept = kept or self.kept
        for data, before in self.kept:
            data[...] = before
        self._end.barrier(timeout)


@meant_for("progress", "progress never says")
class NeverDone(Same):
    def ticket(self, ticket, sends, recvs):
        return wrapped(progress=lambda self: False)(ticket)


@meant_for("progress", "before the other side had begun")
class DoneAtOnce(Same):
    def ticket(self, ticket, sends, recvs):
        return wrapped(progress=lambda self: True)(ticket)


@meant_for("barrier", "passed the barrier before the last had come")
class NoBarrier(Same):
    def barrier(self, timeout):
        pass


@meant_for("control-beside-data", "exchanges come first")
class OneThingAtATime(OneAtATime):
    def all_gather_bytes(self, payload, timeout):
        if self.busy:
            raise TransportError("exchanges come first")
        return self._end.all_gather_bytes(payload, timeout)


@meant_for("quiet-poll", "PeerLost")
class NervousPoll(Same):
    def poll(self):
        raise PeerLost("somebody may have failed")


@meant_for("whole-pass", "expected")
@meant_for("direct-pass", "expected")
@meant_for("pass-of-few-rows", "expected")
@meant_for("pass-of-large-shards", "expected")
class Corrupts(Same):
    """Some bits of every message."""

    def ticket(self, ticket, sends, recvs):
        def wait(self, timeout):
            self._inner.wait(timeout)
            for message in recvs:
                message.data[2 :: max(1, message.data.nbytes // 64)] ^= 65

        return wrapped(wait=wait)(ticket)


@meant_for("more-bytes-than-expected", "nothing was raised")
@meant_for("fewer-bytes-than-expected", "nothing was raised")
class TakesAnySize(Same):
    def ticket(self, ticket, sends, recvs):
        def wait(self, timeout):
            try:
                self._inner.wait(timeout)
            except TransportError as error:
                if "meet" not in str(error):
                    raise

        return wrapped(wait=wait)(ticket)


@meant_for("fewer-bytes-than-expected", "got ExchangeTimeout")
class WaitsForTheRest(Same):
    def ticket(self, ticket, sends, recvs):
        def wait(self, timeout):
            try:
                self._inner.wait(timeout)
            except TransportError as error:
                raise ExchangeTimeout(f"{error}, and the rest never came") from error

        return wrapped(wait=wait)(ticket)


@meant_for("silent-peer", "it raised after")
class Patient(Same):
    def ticket(self, ticket, sends, recvs):
        def wait(self, timeout):
            self._inner.wait(timeout + 1)

        return wrapped(wait=wait)(ticket)


class TellsOtherwise(Same):
    """An `ExchangeTimeout` is another error."""

    def ticket(self, ticket, sends, recvs):
        end = self

        def wait(self, timeout):
            try:
                self._inner.wait(timeout)
            except ExchangeTimeout as error:
                raise end.other(str(error)) from error

        return wrapped(wait=wait)(ticket)


@meant_for("silent-peer", "expected ExchangeTimeout, got TimeoutError")
class PlainTimeout(TellsOtherwise):
    other = TimeoutError


@meant_for("silent-peer", "the error must name the rank, rank")
class NamelessTimeout(TellsOtherwise):
    def other(self, text):
        return ExchangeTimeout("timed out in ring step 4 with 640 bytes missing")


@meant_for("silent-peer", "the error must name the step, step 4")
class StepIsLost(TellsOtherwise):
    def other(self, text):
        return ExchangeTimeout(text.replace("step 4", "step ?"))


@meant_for("silent-peer", "the error must name the bytes, 640")
class BytesAreLost(TellsOtherwise):
    def other(self, text):
        return ExchangeTimeout(text.replace("640", "some"))


@meant_for("late-to-a-gathering", "the error must name the rank, 1")
@meant_for("late-to-a-barrier", "the error must name the rank, 1")
class NamelessLate(Same):
    def all_gather_bytes(self, payload, timeout):
        try:
            return self._end.all_gather_bytes(payload, timeout)
        except ExchangeTimeout as error:
            raise ExchangeTimeout("somebody is late") from error

    def barrier(self, timeout):
        self.all_gather_bytes(b"", timeout)


@meant_for("abort-ends-a-wait", "expected PeerLost, got ExchangeTimeout")
@meant_for("abort-ends-a-control-round", "expected PeerLost, got ExchangeTimeout")
@meant_for("abort-seen-by-poll", "nothing was raised")
@meant_for("abort-seen-by-progress", "nothing was raised")
@meant_for("after-an-abort", "nothing was raised")
class MuteAbort(Same):
    def abort(self, reason):
        pass


@meant_for("abort-ends-a-wait", "the error must name the reason")
class AbortsWithoutReason(Same):
    def abort(self, reason):
        self._end.abort("failed")


@meant_for("after-an-abort", "poll after an abort: expected TransportError, and nothing was raised")
class GoesOnAfterAnAbort(Same):
    aborted = False

    def abort(self, reason):
        self.aborted = True
        self._end.abort(reason)

    def poll(self):
        if not self.aborted:
            self._end.poll()


@meant_for("abort-ends-a-wait", "close raised RuntimeError")
class CannotCloseAfterAnAbort(GoesOnAfterAnAbort):
    def close(self):
        if self.aborted:
            raise RuntimeError("aborted already")


@meant_for("peer-that-left", "expected PeerLost, got ExchangeTimeout")
@meant_for("peer-that-left-a-control-round", "expected PeerLost, got ExchangeTimeout")
class LeavesUnseen(Same):
    def close(self):
        pass


@meant_for("last-message", "PeerLost")
class LeavesInHaste(Same):
    """What is only sent is not waited for, and taken along."""

    def ticket(self, ticket, sends, recvs):
        return ticket if recvs else wrapped(wait=lambda self, timeout: None)(ticket)

    def close(self):
        for (source, _), posts in self._end._group.unmatched.items():
            if source == self.rank:
                posts.clear()
        self._end.close()


class Hangs(Same):
    def ticket(self, ticket, sends, recvs):
        return wrapped(wait=lambda self, timeout: time.sleep(6))(ticket)


@meant_for("ring-exchange", "'NoneType' object has no attribute")
class Breaks(Same):
    def exchange(self, sends, recvs, *, step, stream=None):
        return self._end.exchange([Message(m.peer, None) for m in sends], recvs, step=step)
