"""The transport over torch.distributed: its contract, between ends in one process, over gloo.
Real processes are in tests/test_torchrun.py."""

from __future__ import annotations

import time

import cases as known
import pytest
import torch
import torch.distributed as dist
from process_group_support import ends, on_all

import ringrt
from ringrt import ConfigError, ExchangeTimeout, TransportError
from ringrt.registry import registry
from ringrt.transport import Launch, Message
from ringrt.transports import gloo
from ringrt.transports.gloo_link import SMALL
from ringrt.transports.process_group import ProcessGroupTransport
from support import PARTITIONS, at_once, data

pytestmark = pytest.mark.timeout(120)
LARGE = SMALL + 1


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
