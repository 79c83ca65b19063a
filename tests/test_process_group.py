"""The transport over torch.distributed: its contract, between ends in one process, over gloo.
Real processes are in tests/test_torchrun.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import cases as known
import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringrt
from ringrt import ConfigError, ExchangeTimeout, PeerLost, TransportError
from ringrt.registry import registry
from ringrt.transport import Launch, Message
from ringrt.transports import gloo
from ringrt.transports.gloo import Mesh
from ringrt.transports.gloo_link import SMALL
from ringrt.transports.process_group import ProcessGroupTransport
from support import PARTITIONS

pytestmark = pytest.mark.timeout(120)
LARGE = SMALL + 1


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


@pytest.mark.parametrize("count", [5, SMALL, LARGE, 1_000_000])
@pytest.mark.parametrize("order", ["send first", "recv first"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_grouped_exchange_completes_in_any_order(size, order, count):
    def rotate(end):
        received = data(255, count)
        after, before = (end.rank + 1) % size, (end.rank - 1) % size
        sends, recvs = [Message(after, data(end.rank, count))], [Message(before, received)]
        if order == "send first":
            tickets = [end.exchange(sends, [], step=0), end.exchange([], recvs, step=0)]
        else:
            tickets = [end.exchange([], recvs, step=0), end.exchange(sends, [], step=0)]
        for ticket in tickets:
            ticket.wait(10)
            assert ticket.progress()
        assert (received == received[0]).all()
        return int(received[0])

    with ends(size) as group:
        assert on_all(group, rotate) == [(r - 1) % size for r in range(size)]


@pytest.mark.parametrize("behind", ["sender", "receiver"])
def test_messages_between_two_ranks_match_in_order(behind):
    """Small ones do not overtake large ones, nor what was not awaited what was."""
    sizes = [5, LARGE, 0, 9, SMALL, SMALL, 2 * LARGE, 0, 1, LARGE, 7]

    def several(end):
        got = [data(0, n) for n in sizes]
        late = end.rank == (0 if behind == "sender" else 1)
        if late:
            time.sleep(0.2)
        if end.rank == 0:
            # One by one, and in one group.
            tickets = [
                end.exchange([Message(1, data(k + 1, n))], [], step=0)
                for k, n in enumerate(sizes[:4])
            ]
            rest = [Message(1, data(k + 1, n)) for k, n in enumerate(sizes)][4:]
            tickets.append(end.exchange(rest, [], step=0))
        else:
            tickets = [end.exchange([], [Message(0, x) for x in got[:2]], step=0)]
            tickets.append(end.exchange([], [Message(0, x) for x in got[2:]], step=0))
        for ticket in tickets:
            ticket.wait(10)
        return [(x.size, set(x.tolist())) for x in got]

    with ends(2) as group:
        received = on_all(group, several)[1]
    assert received == [(n, {k + 1} if n else set()) for k, n in enumerate(sizes)]


def test_messages_wait_for_a_rank_that_is_behind():
    def ahead(end):
        if end.rank == 0:
            tickets = [end.exchange([Message(1, data(n))], [], step=0) for n in range(20)]
        else:
            time.sleep(0.3)
            got = [data(255) for _ in range(20)]
            tickets = [end.exchange([], [Message(0, x) for x in got], step=0)]
        for ticket in tickets:
            ticket.wait(10)
        return end.rank and [x.tolist() for x in got]

    with ends(2) as group:
        assert on_all(group, ahead)[1] == [[n] * 5 for n in range(20)]


def test_more_messages_than_go_into_a_frame():
    counts = [n * 700 for n in range(300)]

    def many(end):
        got = [data(0, n) for n in counts]
        sends = [Message(1 - end.rank, data(k % 251, n)) for k, n in enumerate(counts)]
        end.exchange(sends, [Message(1 - end.rank, x) for x in got], step=0).wait(20)
        return all((x == k % 251).all() for k, x in enumerate(got))

    with ends(2) as group:
        assert on_all(group, many) == [True, True]


@pytest.mark.filterwarnings("error")
def test_memory_that_may_not_be_written_to_is_sent():
    """And PyTorch does not warn of it."""
    torch.set_warn_always(True)

    def swap(end):
        mine, got = data(end.rank + 1, LARGE), data(0, LARGE)
        mine.flags.writeable = False
        assert gloo._tensor(mine).data_ptr() == mine.ctypes.data, "without a copy"
        end.exchange([Message(1 - end.rank, mine)], [Message(1 - end.rank, got)], step=0).wait(10)
        return int(got[-1])

    with ends(2) as group:
        swapped = on_all(group, swap)
    torch.set_warn_always(False)
    assert swapped == [2, 1]


@pytest.mark.parametrize(
    ("sent", "expected"), [(4, 5), (5, 0), (LARGE, 4), (4, LARGE), (LARGE, LARGE + 1)]
)
@pytest.mark.parametrize("behind", [0, 1])
def test_sizes_that_do_not_match_are_an_error_on_both_sides(sent, expected, behind):
    def wrong(end):
        if end.rank == behind:
            time.sleep(0.1)
        if end.rank == 0:
            end.exchange([Message(1, data(0, sent))], [], step=7).wait(10)
        else:
            end.exchange([], [Message(0, data(0, expected))], step=7).wait(10)

    with ends(2) as group:
        errors = on_all(group, wrong)
    for rank, error in enumerate(errors):
        assert type(error) is TransportError
        assert str(error) == (
            f"rank {rank}, ring step 7, rank {1 - rank}: {sent} bytes sent meet {expected} expected"
        )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_gather_keeps_rank_order_over_many_rounds(size):
    def rounds(end):
        return [end.all_gather_bytes(bytes([end.rank] * n), 10) for n in range(30)]

    expected = [[bytes([rank] * n) for rank in range(size)] for n in range(30)]
    with ends(size) as group:
        assert on_all(group, rounds) == [expected] * size


def test_all_gather_of_megabytes_by_ranks_that_are_ahead():
    def gather(end):
        time.sleep(0.1 * end.rank)
        sizes = [end.rank * 2_000_000, SMALL, 3_000_000]
        parts = [end.all_gather_bytes(bytes([end.rank]) * n, 20) for n in sizes]
        return [[(len(p), set(p)) for p in each] for each in parts]

    with ends(3) as group:
        results = on_all(group, gather)
    for result in results:
        assert result[0] == [(0, set()), (2_000_000, {1}), (4_000_000, {2})]
        assert result[1:] == [[(n, {r}) for r in range(3)] for n in (SMALL, 3_000_000)]


def test_nobody_passes_a_barrier_early():
    arrived = []

    def late(end):
        time.sleep(0.05 * end.rank)
        arrived.append(end.rank)
        end.barrier(10)
        return len(arrived)

    with ends(4) as group:
        assert on_all(group, late) == [4] * 4


@pytest.mark.parametrize("count", [64, LARGE])
def test_a_peer_that_never_posts_is_named_with_step_and_bytes(count):
    def two_of_three(end):
        if end.rank != 1:
            before, after = (end.rank - 1) % 3, (end.rank + 1) % 3
            sends, recvs = [Message(after, data(0, count))], [Message(before, data(0, count))]
            end.exchange(sends, recvs, step=4).wait(0.7)

    with ends(3) as group:
        first, second, third = on_all(group, two_of_three)
    assert second is None
    begin = "waited 0.7 s in ring step 4 to"
    assert str(first) == f"rank 0 {begin} send {count} bytes to rank 1"
    assert str(third) == f"rank 2 {begin} recv {count} bytes from rank 1"
    assert type(first) is type(third) is ExchangeTimeout


def test_a_rank_that_misses_a_control_round_is_named():
    def but_two(end):
        if end.rank != 2:
            end.all_gather_bytes(b"", 0.5)

    with ends(4) as group:
        results = on_all(group, but_two)
    for rank in (0, 1, 3):
        text = f"rank {rank} waited 0.5 s for rank 2 to join a control round"
        assert (type(results[rank]), str(results[rank])) == (ExchangeTimeout, text)


WAITS = {
    "message": lambda end, peer: end.exchange([], [Message(peer, data(0))], step=0).wait(20),
    "round": lambda end, peer: end.barrier(20),
}


def cut_off(end):
    """As when its process dies."""
    end._mesh.shut()


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda end: end.abort("out of memory"), "rank 1 failed: out of memory"),
        (cut_off, "rank 1 failed: its connection ended without a goodbye"),
        (ProcessGroupTransport.close, "rank {} waits for rank 1, gone from the ring"),
    ],
    ids=["abort", "death", "close"],
)
def test_waiting_ends_at_once_when_a_peer_aborts_dies_or_leaves(how, said, wait):
    def leave(end):
        if end.rank == 1:
            time.sleep(0.1)
            how(end)
        else:
            WAITS[wait](end, 1)

    begin = time.monotonic()
    with ends(3) as group:
        errors = on_all(group, leave)
    assert time.monotonic() - begin < 10
    for rank in (0, 2):
        assert type(errors[rank]) is PeerLost
        assert str(errors[rank]) == said.format(rank)


def poll_until_it_raises(end):
    while True:
        end.poll()
        time.sleep(0.01)


@pytest.mark.parametrize("how", [lambda end: end.abort("out of memory"), cut_off])
def test_a_rank_that_waits_for_another_hears_of_a_failure_too(how):
    def third(end):
        if end.rank == 0:
            end.exchange([], [Message(1, data(0))], step=0).wait(20)
        if end.rank == 1:
            poll_until_it_raises(end)
        if end.rank == 2:
            how(end)

    begin = time.monotonic()
    with ends(3) as group:
        errors = on_all(group, third)
    assert time.monotonic() - begin < 10
    assert isinstance(errors[0], PeerLost)
    assert isinstance(errors[1], PeerLost)
    for error in errors[:2]:
        assert "rank 2 failed" in str(error)
    assert errors[2] is None


def test_a_rank_that_leaves_passes_on_why():
    """Whoever waits for it hears of the failure, and not only that it has gone."""
    with ends(3) as group:
        first, second, third = group
        third._links[0].report = lambda rank, reason: None
        third.abort("out of memory")
        with pytest.raises(PeerLost, match="rank 2 failed: out of memory"):
            second.barrier(10)
        at_once([second.close])
        with pytest.raises(PeerLost, match="rank 2 failed: out of memory"):
            first.exchange([], [Message(1, data(0))], step=0).wait(10)


def test_a_rank_that_another_has_lost_is_told():
    with ends(2) as (first, second):
        second._links[0].report(0, "no answer")
        with pytest.raises(PeerLost, match="rank 1 failed: it has lost rank 0: no answer"):
            first.barrier(10)


def test_an_aborted_ring_stays_aborted_and_the_first_reason_is_kept():
    with ends(2) as (first, second):
        first.abort("out of memory")
        first.abort("something else")
        with pytest.raises(TransportError, match="aborted by its rank 0: out of memory"):
            first.barrier(5)
        for _ in range(2):
            with pytest.raises(PeerLost, match="rank 0 failed: out of memory"):
                second.barrier(5)
        second.abort("late")
        with pytest.raises(PeerLost, match="rank 0 failed: out of memory"):
            second.exchange([], [], step=0)


def test_what_was_sent_before_a_goodbye_arrives():
    """However late the other rank asks for it."""

    def early(end):
        if end.rank == 0:
            end.exchange([Message(1, data(7))], [], step=0)
            end._links[1].contribute(b"a round")
            end.close()
            return None
        time.sleep(0.3)
        got = data(0)
        end.exchange([], [Message(0, got)], step=0).wait(10)
        return got.tolist(), end.all_gather_bytes(b"", 10)

    with ends(2) as group:
        assert on_all(group, early)[1] == ([7] * 5, [b"a round", b""])


def test_a_closed_end_is_of_no_more_use():
    with ends(2) as group:
        ticket = group[0].exchange([], [Message(1, data(0))], step=0)
        assert not ticket.progress()
        on_all(group, ProcessGroupTransport.close)
        for use in (group[0].poll, lambda: group[0].barrier(1), lambda: ticket.wait(1)):
            with pytest.raises(TransportError, match="the ring of rank 0 is closed"):
                use()


def test_closing_leaves_no_thread_and_no_socket_behind():
    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with ends(3):
        pass
    before = held()
    with ends(3) as group:
        on_all(group, lambda end: end.barrier(10))
        assert held() > before
    deadline = time.monotonic() + 10
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() <= before
    assert all(end._closed for end in group), "the ends themselves are still there"


class FakeGroup(dist.ProcessGroup):
    """A process group of which only the store is there."""

    def __init__(self, store, rank, size):
        super().__init__(rank, size)
        self.store = store

    def get_group_store(self):
        return self.store


def test_several_rings_of_one_group():
    """Each is one of its own; the ranks of a machine are counted by its name."""
    store = dist.HashStore()
    groups = [FakeGroup(store, rank, 2) for rank in range(2)]
    made = at_once(
        [lambda g=g: [ProcessGroupTransport.of(g, 20) for _ in range(2)] for g in groups]
    )
    for rank, rings in enumerate(made):
        assert [(r.rank, r.size, r.local_rank, r.local_size) for r in rings] == [
            (rank, 2, rank, 2)
        ] * 2
    for each in zip(*made, strict=True):
        assert (
            on_all(each, lambda end: end.all_gather_bytes(bytes([end.rank]), 10))
            == [[b"\0", b"\1"]] * 2
        )
        on_all(each, ProcessGroupTransport.close)


def test_a_rank_that_does_not_join_is_named():
    with pytest.raises(ExchangeTimeout) as caught:
        ProcessGroupTransport.of(FakeGroup(dist.HashStore(), 1, 4), 0.3)
    assert str(caught.value) == "rank 1 waited 0.3 s for ranks 0, 2, 3 to join the ring"


def test_ranks_of_a_machine(monkeypatch):
    hosts = ["a", "b", "a", "b", "a"]
    assert [gloo._local(hosts, rank) for rank in range(5)] == [
        (0, 3),
        (0, 2),
        (1, 3),
        (1, 2),
        (2, 3),
    ]
    torchrun_sets = {"TORCHELASTIC_RUN_ID": "x", "RANK": "4", "WORLD_SIZE": "5"}
    torchrun_sets |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in torchrun_sets.items():
        monkeypatch.setenv(name, value)
    assert gloo._local(hosts, 4) == (0, 2)
    assert gloo._local(hosts[:4], 3) == (1, 2), "not of the whole world"


BIG = [case for case in known.CASES if case.ranks > 4]


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("case", BIG, ids=[case.id for case in BIG])
def test_known_failures_of_more_ranks_than_torchrun_starts_here(case, partition):
    answers = known.expected(case)

    def run(end):
        ring = ringrt.Ring(end, partition=partition, backend="reference", timeout=30)
        known.check(ring, case, answers)

    with ends(case.ranks) as group:
        assert on_all(group, run) == [None] * case.ranks


ADDRESS = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
RANK = {"RANK": "2", "WORLD_SIZE": "4"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none"}
MPI = {"PMI_RANK": "1", "PMI_SIZE": "8"}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (RANK, None),
        (ADDRESS, None),
        (ELASTIC, None),
        (RANK | ADDRESS, "torch"),
        (RANK | ELASTIC, "torch"),
        # PyTorch over MPI, and torchrun that was started by srun.
        (RANK | ADDRESS | MPI, "mpi"),
        (RANK | ELASTIC | MPI, "torch"),
    ],
)
def test_who_started_this_process(monkeypatch, environment, name):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    launched = registry().launched()
    assert (launched[0].name if launched else None) == name
    if name == "torch":
        assert launched[1] == Launch(2, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"transport": "threads"}, ConfigError, "transport: expected torch, or one that works over it, got 'threads'"),
        ({"transport": "mpi"}, ConfigError, "transport: expected torch, or one that works over it, got 'mpi'"),
        ({"transport": "nccl"}, TransportError, "transport nccl: "),
        ({"timeout": 0}, ConfigError, "timeout: expected a number of seconds > 0, got 0"),
        ({"pg": dist.GroupMember.NON_GROUP_MEMBER}, ConfigError, "pg: expected a process group that this process is in"),
        ({}, TransportError, "transport torch: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(arguments, error, message):
    with pytest.raises(error) as caught:
        ringrt.Ring.from_process_group(**arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
