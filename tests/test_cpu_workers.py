"""The threads of the cpu backend: what they share, and how they leave off."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ringrt.errors import KernelError
from ringrt.plan import Mask, Problem, Run
from ringrt.plan.tiles import lower
from ringrt_backends.cpu.calls import base, driver, take
from ringrt_backends.cpu.workers import Workers
from support import ROOT, random_qkv

pytestmark = pytest.mark.timeout(100)


@driver
def _count(control, tasks, counts, work):
    """Add 1 where each task says."""
    while True:
        task = take(base(control))
        if task >= len(tasks) or control[1] != 0:
            return
        total = 0.0
        for i in range(work):
            total += np.sqrt(i)
        counts[tasks[task]] += 1 if total >= 0 else 2


@pytest.fixture(params=[1, 2, 8])
def workers(request):
    made = Workers(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("number", [0, 1, 2, 63, 64, 65, 1000])
def test_every_task_is_done_once(workers, number):
    for _ in range(5):
        counts = np.zeros(number, np.int64)
        workers.drive(_count, np.arange(number), counts, 500)
        assert (counts == 1).all()


def test_several_callers_do_not_take_one_another_s_tasks(workers):
    all_counts = [np.zeros(300, np.int64) for _ in range(4)]
    threads = [
        threading.Thread(target=workers.drive, args=(_count, np.arange(300), counts, 500))
        for counts in all_counts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert all((counts == 1).all() for counts in all_counts)


def test_each_thread_has_arguments_of_its_own(workers):
    seen, both = [], threading.Barrier(workers.count)

    def run(control, tasks, shared, mine):
        both.wait(20)
        seen.append((shared, mine))

    workers.drive(run, np.arange(1000)[: 2 if workers.count > 1 else 1], "shared", own=[(n,) for n in range(workers.count)])  # fmt: skip
    assert sorted(seen) == [("shared", n) for n in range(workers.count)]


def test_an_error_of_a_driver_reaches_the_caller(workers):
    def fail(control, tasks):
        raise ValueError("a driver fails")

    for _ in range(2):
        with pytest.raises(ValueError, match="a driver fails"):
            workers.drive(fail, np.arange(10))
    counts = np.zeros(10, np.int64)
    workers.drive(_count, np.arange(10), counts, 1)
    assert (counts == 1).all(), "the next call is as ever"


def test_an_error_of_one_thread_breaks_off_the_others():
    workers, left = Workers(3), []

    def run(control, tasks, mine):
        if mine == 1:
            raise ValueError("one fails")
        begun = time.monotonic()
        while not control[1]:
            assert time.monotonic() < begun + 20
            time.sleep(0.001)
        left.append(mine)

    with pytest.raises(ValueError, match="one fails"):
        workers.drive(run, np.arange(10), own=[(0,), (1,), (2,)])
    assert sorted(left) == [0, 2], "they were waited for"
    workers.close()


def test_tasks_of_the_plain_path(workers):
    done = []
    workers.each([lambda check, n=n: done.append(n) for n in range(20)])
    assert sorted(done) == list(range(20))
    with pytest.raises(ZeroDivisionError):
        workers.each([lambda check: 1 / 0, lambda check: done.append(99)])


def test_nothing_is_computed_after_close(workers):
    workers.close()
    counts = np.zeros(10, np.int64)
    with pytest.raises(KernelError):
        workers.drive(_count, np.arange(10), counts, 1)
    assert not counts.any()
    with pytest.raises(KernelError):
        workers.each([lambda check: check()])
    workers.close()


@pytest.mark.parametrize("way", ["drive", "each"])
def test_close_reaches_what_is_running(workers, way):
    begun, errors = threading.Event(), []

    def until(told):
        begun.set()
        end = time.monotonic() + 20
        while not told():
            assert time.monotonic() < end, "it was not told to leave off"
            time.sleep(0.001)

    def caller():
        try:
            if way == "drive":
                workers.drive(lambda control, tasks: until(lambda: control[1]), np.arange(2))
            else:
                workers.each([lambda check: until(lambda: check() is not None)] * 2)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=caller)
    thread.start()
    assert begun.wait(20)
    workers.close()
    thread.join(40)
    assert [type(error) for error in errors] == [KernelError]


def long_pass(made, pass_, length=60_000):
    """Some minutes of work."""
    q, k, v = random_qkv(length, q_heads=1, head_dim=64)
    mask, zeros = Mask.full(length, length), np.zeros((1, 1, length), np.float32)
    problem = Problem(1, 1, 1, 64, 64, length, length, "float32", mask, 1.0)
    tiles = lower(mask, (Run(0, 1, length),), (Run(0, 1, length),))
    if pass_ == "forward":
        made.accumulate(made.begin(q, problem), k, v, tiles)
    else:
        grads = made.begin_backward(q, v, zeros + 9, zeros, problem)
        made.accumulate_backward(grads, k, v, np.zeros_like(k), np.zeros_like(v), tiles)


_INTERRUPTED = """
import signal, sys, threading, time
# A process in the background of a shell is started such that it ignores this.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, "tests")
from cpu_support import MACHINES, cpu
from test_cpu_workers import long_pass
from ringrt.plan import Mask, Problem
made = cpu(MACHINES["8"], int(sys.argv[2]))
made.prepare(Problem(1, 1, 1, 64, 64, 1, 1, "float32", Mask.full(1, 1), 1.0))
print("ready", flush=True)
try:
    long_pass(made, sys.argv[1])
except KeyboardInterrupt:
    before = time.process_time()
    time.sleep(0.5)
    # Threads that still compute would use half a second or more of the processor.
    print("interrupted", time.process_time() - before < 0.25, flush=True)
"""


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_an_interrupt_leaves_nothing_running(pass_, threads):
    command = [sys.executable, "-c", _INTERRUPTED, pass_, threads]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=40)
    finally:
        process.kill()
    assert out == "interrupted True\n"
