"""What a transport does when all goes well: bytes of every size, in order, and control rounds.
Each check is what one rank does; all ranks do it together."""

from __future__ import annotations

import time

from ringrt.conformance.checks import CheckList, expect
from ringrt.conformance.ranks import Rank, pattern

CHECKS: CheckList[Rank] = CheckList()

_LARGE = 8 << 20


def rotate(rank: Rank, sizes: list[int], step: int = 0) -> None:
    """Messages of these sizes go one rank on, all in one group."""
    if rank.size == 1:
        return
    sent = [rank.put(pattern(n, rank.rank, rank.after, i)) for i, n in enumerate(sizes)]
    got = [rank.empty(n) for n in sizes]
    ticket = rank.exchange([(rank.after, x) for x in sent], [(rank.before, x) for x in got], step)
    rank.wait(ticket)
    for i, (n, x) in enumerate(zip(sizes, got, strict=True)):
        what = f"message {i} of {n} bytes from rank {rank.before}"
        rank.hold(x, pattern(n, rank.before, rank.rank, i), what)


@CHECKS.add
def attributes(rank: Rank) -> None:
    """rank, size, local_rank, local_size, device, needs_progress and captures are there and make
    sense."""
    end = rank.end
    for name in ("rank", "size", "local_rank", "local_size"):
        value = getattr(end, name, None)
        whole = isinstance(value, int) and not isinstance(value, bool)
        expect(whole, f"{name}: expected an int, got {value!r}")
    for name in ("needs_progress", "captures"):
        value = getattr(end, name, None)
        expect(isinstance(value, bool), f"{name}: expected True or False, got {value!r}")
    expect(end.device in ("cpu", "cuda"), f"device: expected cpu or cuda, got {end.device!r}")
    expect(0 <= end.rank < end.size, f"rank {end.rank} is none of {end.size}")
    local = f"local_rank {end.local_rank} of {end.local_size}"
    expect(0 <= end.local_rank < end.local_size <= end.size, f"{local} in a ring of {end.size}")


@CHECKS.add
def rank_order(rank: Rank) -> None:
    """Every rank is there once, and `all_gather_bytes` gives payloads in rank order."""
    told = rank.end.all_gather_bytes(str(rank.rank).encode(), rank.timeout)
    want = [str(r).encode() for r in range(rank.size)]
    expect(list(told) == want, f"all_gather_bytes: expected {want}, got {told}")


@CHECKS.add
def ring_exchange(rank: Rank) -> None:
    """Everybody sends to the next and receives from the one before, some times over."""
    for step in range(4):
        rotate(rank, [100 + step], step)


@CHECKS.add
def all_to_all(rank: Rank) -> None:
    """Everybody sends to everybody at once, each pair another number of bytes."""
    peers = [peer for peer in range(rank.size) if peer != rank.rank]

    def size(source: int, destination: int) -> int:
        return 100 * source + 10 * destination + 1

    sent = {p: rank.put(pattern(size(rank.rank, p), rank.rank, p)) for p in peers}
    got = {p: rank.empty(size(p, rank.rank)) for p in peers}
    rank.wait(rank.exchange([*sent.items()], [*got.items()]))
    for p in peers:
        rank.hold(got[p], pattern(size(p, rank.rank), p, rank.rank), f"message from rank {p}")


@CHECKS.add
def matching_order(rank: Rank) -> None:
    """Between two ranks messages of one size match in the order in which they were given."""
    rotate(rank, [64] * 5)
    rotate(rank, [64, 3, 64, 0, 64, 3])


@CHECKS.add
def send_before_receive(rank: Rank) -> None:
    """Everybody may begin to send before anybody has begun to receive, and the other way
    round."""
    if rank.size == 1 or not rank.on_host:
        return
    for first in ("send", "recv"):
        sent = [(rank.after, pattern(50_000, rank.rank, rank.after))]
        got = rank.empty(50_000)
        recvs = [(rank.before, got)]
        halves = [rank.exchange(sent, []), rank.exchange([], recvs)] if first == "send" else [
            rank.exchange([], recvs), rank.exchange(sent, [])]  # fmt: skip
        for ticket in halves:
            rank.wait(ticket)
        rank.hold(got, pattern(50_000, rank.before, rank.rank), f"{first} first")


@CHECKS.add
def empty_exchange(rank: Rank) -> None:
    """An exchange of nothing is complete."""
    for step in range(3):
        rank.wait(rank.exchange([], [], step))


@CHECKS.add
def zero_bytes(rank: Rank) -> None:
    """Messages without a byte, alone and among others."""
    rotate(rank, [0])
    rotate(rank, [0, 17, 0, 0, 5])


@CHECKS.add
def odd_sizes(rank: Rank) -> None:
    """1, 3, 1023, 4097, 65537 and a million and one bytes."""
    rotate(rank, [1, 3, 1023, 4097, 65_537, 1_000_001])


@CHECKS.add
def large_both_ways(rank: Rank) -> None:
    """8 MB to both neighbours and from both at once: nobody waits for anybody's buffer."""
    if rank.size == 1:
        return
    count = _LARGE if rank.size <= 3 else _LARGE // 8
    peers = [rank.after, rank.before]
    sent = [(p, rank.put(pattern(count, rank.rank, p, i))) for i, p in enumerate(peers)]
    # What the one behind sends first goes on, and what it sends second comes back.
    got = [(rank.before, rank.empty(count)), (rank.after, rank.empty(count))]
    rank.wait(rank.exchange(sent, got))
    for i, (peer, x) in enumerate(got):
        rank.hold(x, pattern(count, peer, rank.rank, i), f"{count} bytes from rank {peer}")


@CHECKS.add
def several_in_flight(rank: Rank) -> None:
    """Several exchanges are begun before the first is waited for."""
    if rank.size == 1:
        return
    tickets, received = [], []
    for step in range(4):
        count = 20_000 - 3000 * step
        sent = rank.put(pattern(count, rank.rank, rank.after, step))
        got = rank.empty(count)
        tickets.append(rank.exchange([(rank.after, sent)], [(rank.before, got)], step))
        received.append((count, got))
    for ticket in tickets:
        rank.wait(ticket)
    for step, (count, got) in enumerate(received):
        want = pattern(count, rank.before, rank.rank, step)
        rank.hold(got, want, f"exchange {step} of 4 in flight")


@CHECKS.add
def buffers_are_back(rank: Rank) -> None:
    """After the wait the buffers are the caller's: what is sent may be written over, and nothing
    more is written into what was received."""
    if rank.size == 1 or not rank.on_host:
        return
    for count in (100, 300_000):
        sent, got = pattern(count, rank.rank, rank.after), rank.empty(count)
        rank.wait(rank.exchange([(rank.after, sent)], [(rank.before, got)]))
        sent[:] = 0
        rank.end.barrier(rank.timeout)
        rank.hold(got, pattern(count, rank.before, rank.rank), "after the sender wrote over it")
        got[:] = 9
        rank.end.barrier(rank.timeout)
        time.sleep(0.02)
        expect((got == 9).all(), "the transport wrote into a buffer after the wait for it")


@CHECKS.add
def progress(rank: Rank) -> None:
    """`Ticket.progress` does not wait, and is True once the exchange is complete."""
    if rank.size == 1 or not rank.on_host:
        return
    sent, got = pattern(200_000, rank.rank, rank.after), rank.empty(200_000)
    if rank.rank == 0:
        ticket = rank.exchange([(rank.after, sent)], [(rank.before, got)])
        first = ticket.progress()
        expect(first is False, f"progress gave {first!r} before the other side had begun")
        rank.end.barrier(rank.timeout)
    else:
        rank.end.barrier(rank.timeout)
        ticket = rank.exchange([(rank.after, sent)], [(rank.before, got)])
    deadline = time.monotonic() + rank.timeout
    while not ticket.progress():
        expect(time.monotonic() < deadline, "progress never says that the exchange is complete")
        time.sleep(1e-3)
    rank.wait(ticket)
    expect(ticket.progress() is True, "progress must be True after the wait")
    rank.hold(got, pattern(200_000, rank.before, rank.rank), "moved by progress")


@CHECKS.add
def gathered_payloads(rank: Rank) -> None:
    """`all_gather_bytes` of unequal payloads, empty ones and a megabyte among them, over many
    rounds."""
    for turn in range(20):
        told = rank.end.all_gather_bytes(bytes([turn]) * (rank.rank * 7), rank.timeout)
        want = [bytes([turn]) * (r * 7) for r in range(rank.size)]
        expect(list(told) == want, f"round {turn}: payloads are mixed up")
    large = [pattern(1_000_000 + r, r, r).tobytes() for r in range(rank.size)]
    told = rank.end.all_gather_bytes(large[rank.rank], rank.timeout)
    expect(list(told) == large, "a payload of a megabyte came otherwise than it was given")


@CHECKS.add
def barrier(rank: Rank) -> None:
    """Nobody passes a barrier before everybody has come."""
    for _ in range(3):
        rank.end.barrier(rank.timeout)
    time.sleep(0.03 * rank.rank)
    came = time.monotonic()
    rank.end.barrier(rank.timeout)
    left = time.monotonic()
    told = rank.end.all_gather_bytes(f"{came} {left}".encode(), rank.timeout)
    times = [tuple(map(float, raw.split())) for raw in told]
    if rank.end.local_size == rank.size:
        latest = max(came for came, _ in times)
        early = [r for r, (_, left) in enumerate(times) if left < latest]
        expect(not early, f"ranks {early} passed the barrier before the last had come")


@CHECKS.add
def control_beside_data(rank: Rank) -> None:
    """A control round while an exchange is under way."""
    if rank.size == 1:
        return
    sent = rank.put(pattern(100_000, rank.rank, rank.after))
    got = rank.empty(100_000)
    ticket = rank.exchange([(rank.after, sent)], [(rank.before, got)])
    told = rank.end.all_gather_bytes(bytes([rank.rank]), rank.timeout)
    expect(list(told) == [bytes([r]) for r in range(rank.size)], "payloads are mixed up")
    rank.wait(ticket)
    rank.hold(got, pattern(100_000, rank.before, rank.rank), "beside a control round")


@CHECKS.add
def quiet_poll(rank: Rank) -> None:
    """`poll` and `settle` return while nobody has failed and nothing is under way."""
    for _ in range(3):
        rank.end.poll()
        rank.settle()
    rank.end.barrier(rank.timeout)
