"""Plugins: what is wrong with one is a line that names it, and the rest keeps working."""

from __future__ import annotations

import sys
import types
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import numpy as np
import pytest

import ringrt
from ringrt import plugins as module, registry as registry_module
from ringrt.backend import BackendSpec
from ringrt.errors import BackendUnavailable, ConfigError, PlanError, TransportError
from ringrt.hookspecs import PROTOCOL, hookimpl
from ringrt.plan.partition import PARTITIONS, Partition, Run
from ringrt.transport import TransportSpec
from support import random_qkv


def spec(name, probe=lambda: None, priority=None):
    return BackendSpec(name, "a test", probe, load=lambda context: None, priority=priority)


def named(name, function):
    """The function as a plugin's implementation of the hook of that name."""
    function.__name__ = name
    return hookimpl(function)


@pytest.fixture
def install(monkeypatch):
    """Entry points of plugins given as what their modules hold; None cannot be imported."""

    def install(**plugins):
        points = []
        for name, content in plugins.items():
            if content is not None:
                plugin = types.ModuleType(f"plugin_{name}")
                vars(plugin).update({"RINGRT_PROTOCOL": PROTOCOL} | content)
                monkeypatch.setitem(sys.modules, f"plugin_{name}", plugin)
            points.append(EntryPoint(name, f"plugin_{name}", module.ENTRY_POINT_GROUP))
        return points

    return install


def backends(register):
    return {"ringrt_register_backends": named("ringrt_register_backends", register)}


@pytest.fixture
def load(install):
    return lambda **plugins: registry_module.load(install(**plugins))


GOOD = backends(lambda: [spec("a")])


@pytest.fixture
def active(load, monkeypatch):
    """Plugins beside ringrt's own, for calls."""

    def active(**plugins):
        own = registry_module.registry()
        made = load(**plugins)
        assert not made.problems
        registry = registry_module.Registry(
            own.backends | made.backends,
            own.transports,
            own.partitions | made.partitions,
            made.plugins,
        )
        for name in ("ringrt.ring", "ringrt.launch", "ringrt.calls"):
            monkeypatch.setattr(import_module(name), "registry", lambda: registry)

    return active


def test_first_party_plugins_come_in_by_entry_points():
    found = registry_module.registry()
    assert set(found.backends) >= {"cpu", "reference", "null"}
    assert set(found.transports) >= {"threads", "mpi"}
    assert set(found.partitions) >= {"contiguous", "striped", "zigzag"}
    assert not found.problems


def test_a_plugin_that_cannot_be_imported_is_one_line(load):
    found = load(good=GOOD, gone=None)
    assert set(found.backends) == {"a"}
    [problem] = found.problems
    assert problem.startswith("plugin gone (plugin_gone): ModuleNotFoundError")


def test_a_plugin_that_fails_to_register_is_one_line(load):
    def fail():
        raise RuntimeError("planted\nin two lines")

    found = load(bad=backends(fail), good=GOOD)
    assert set(found.backends) == {"a"}
    assert found.problems == ["plugin bad: RuntimeError: planted"]


@pytest.mark.parametrize("hook", ["backends", "transports", "partitions"])
def test_a_plugin_that_registers_something_else_is_one_line(load, hook):
    kind = {"backends": "BackendSpec", "transports": "TransportSpec", "partitions": "Partition"}
    name = f"ringrt_register_{hook}"
    found = load(bad={name: named(name, lambda: ["cpu"])}, good=GOOD)
    assert set(found.backends) == {"a"}
    assert found.problems == [f"plugin bad: TypeError: registers 'cpu' instead of a {kind[hook]}"]


def test_a_name_that_is_taken_is_told_and_the_first_kept(load):
    one, two = (backends(lambda p=p: [spec("a", priority=p)]) for p in (1, 2))
    found = load(one=one, two=two)
    assert found.backends["a"].priority == 1
    assert found.problems == ["plugin two: the name 'a' is taken"]


def test_nobody_takes_a_name_from_ringrt_s_own(install):
    thief = install(thief=backends(lambda: [spec("cpu")]))
    found = registry_module.load([*thief, *entry_points(group=module.ENTRY_POINT_GROUP)])
    assert found.backends["cpu"].priority == 50
    assert found.problems == ["plugin thief: the name 'cpu' is taken"]


def test_two_plugins_of_one_name_are_told(load, install):
    points = install(twin=GOOD)
    found = registry_module.load([*points, *points])
    assert set(found.backends) == {"a"}
    [problem] = found.problems
    assert problem.startswith(
        "plugin twin (plugin_twin): ValueError: Plugin name already registered"
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (
            {"ringrt_register_backend": named("ringrt_register_backend", lambda: [])},
            "ringrt_register_backend is not one of ringrt's hooks; ringrt_register_backends is meant?",
        ),
        (
            {"register_transports": named("register_transports", lambda: [])},
            "register_transports is not one of ringrt's hooks; ringrt_register_transports is meant?",
        ),
        (
            {"ringrt_register_backends": lambda: []},
            "ringrt_register_backends is not marked with ringrt.hookspecs.hookimpl",
        ),
        (
            {"ringrt_ring_step": named("ringrt_ring_step", lambda step, stream: None)},
            "Argument(s) {'stream'} are declared in the hookimpl but can not be found in the hookspec",
        ),
        (
            {"RINGRT_PROTOCOL": PROTOCOL + 1},
            f"it speaks protocol {PROTOCOL + 1}, and this ringrt {PROTOCOL}: update ringrt",
        ),
        (
            {"RINGRT_PROTOCOL": 0},
            f"it speaks protocol 0, and this ringrt {PROTOCOL}: update the plugin",
        ),
        (
            {"RINGRT_PROTOCOL": None},
            f"it does not say RINGRT_PROTOCOL = {PROTOCOL}, the protocol it was written for",
        ),
    ],
)  # fmt: skip
def test_a_plugin_that_is_not_as_it_should_be_is_one_line(load, content, complaint):
    found = load(bad=GOOD | content, good=backends(lambda: [spec("b")]))
    assert found.problems == [f"plugin bad (plugin_bad): {complaint}"]
    assert set(found.backends) == {"b"}, "nothing of a refused plugin is used"


def test_plugins_can_be_blocked(load, monkeypatch):
    monkeypatch.setenv("RINGRT_BLOCK_PLUGINS", "bad, absent")
    found = load(bad=None, good=GOOD)
    assert set(found.backends) == {"a"}
    assert found.plugins.blocked == ["bad"]
    assert found.problems == ["RINGRT_BLOCK_PLUGINS names 'absent', which is not installed"]


def test_auto_takes_the_best_that_runs_here_and_is_willing(load):
    def fail():
        raise OSError("planted")

    specs = [
        spec("slow", priority=0),
        spec("fast", priority=9),
        spec("gone", lambda: "it is gone", priority=99),
        spec("broken", fail, priority=99),
        spec("never"),
    ]
    found = load(all=backends(lambda: specs))
    assert [each.name for each in found.candidates()] == ["fast", "slow"]
    with pytest.raises(BackendUnavailable, match="backend gone: it is gone"):
        found.backend("gone")
    with pytest.raises(BackendUnavailable, match="backend broken: OSError: planted"):
        found.backend("broken")


def test_a_transport_that_is_missing_says_so(load):
    missing = TransportSpec("far", "a test", lambda: "far is not installed: pip install far")
    name = "ringrt_register_transports"
    found = load(far={name: named(name, lambda: [missing])})
    with pytest.raises(TransportError, match="transport far: far is not installed"):
        found.transport("far")
    assert found.launched() is None


def reversed_stripes(length, size, rank):
    """Stripes, dealt from the last rank to the first, and the last position first for rank 0."""
    return PARTITIONS["striped"].runs(length, size, size - 1 - rank)


def partitions(runs):
    made = Partition("mine", "a test", runs)
    name = "ringrt_register_partitions"
    return {name: named(name, lambda: [made])}


def test_a_plugin_s_partition_is_used(active):
    active(mine=partitions(reversed_stripes))
    q, k, v = random_qkv(23)
    expected = ringrt.attention(q, k, v, ranks=1, causal=True, backend="reference")
    out, lse = ringrt.attention(
        q, k, v, ranks=3, causal=True, partition="mine", backend="reference"
    )
    np.testing.assert_allclose(out, expected[0], atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], atol=1e-6)
    with pytest.raises(
        ConfigError, match="partition: expected contiguous or striped or zigzag or mine"
    ):
        ringrt.attention(q, k, v, ranks=3, partition="yours")


@pytest.mark.parametrize(
    ("runs", "complaint"),
    [
        (lambda n, p, r: (Run(0, 1, n),), "position 0 of 23 is held 3 times by 3 ranks"),
        (lambda n, p, r: (Run(0, 1, n - 1),) * (r == 0), "position 22 of 23 is held 0 times"),
        (lambda n, p, r: (Run(1, 1, n),) * (r == 0), "rank 0 of 3 holds positions 1 to 23 of"),
    ],
)
def test_a_partition_that_is_none_is_refused(active, runs, complaint):
    active(mine=partitions(runs))

    with pytest.raises(PlanError, match=complaint):
        ringrt.attention(*random_qkv(23), ranks=3, partition="mine")


def test_a_plugin_hears_of_every_ring_step(active):
    heard = []
    name = "ringrt_ring_step"
    active(ear={name: named(name, lambda step: heard.append(step))})
    q, k, v = random_qkv(24)
    out, lse = ringrt.attention(q, k, v, ranks=3, backend="reference", schedule="ring")
    steps = sorted((step.rank, step.done) for step in heard)
    assert steps == [(rank, done) for rank in range(3) for done in (1, 2, 3)]
    assert {(s.operation, s.size, s.steps, s.backend) for s in heard} == {
        ("forward", 3, 3, "reference")
    }
    row = k[:, :8].nbytes + v[:, :8].nbytes
    assert {(s.done, s.bytes_sent) for s in heard} == {(1, row), (2, 2 * row), (3, 2 * row)}
    heard.clear()
    ringrt.attention_backward(q, q, k, v, out, lse, ranks=3, backend="reference")
    assert {step.operation for step in heard} == {"backward"}


def test_a_plugin_that_raises_in_a_ring_step_is_not_called_again(active):
    calls = []

    def fail(step):
        calls.append(step)
        raise ValueError("planted")

    active(ear={"ringrt_ring_step": named("ringrt_ring_step", fail)})
    with pytest.warns(
        RuntimeWarning, match="plugin ear: ringrt_ring_step: ValueError: planted; it"
    ):
        ringrt.attention(*random_qkv(24), ranks=1, backend="reference", schedule="ring")
    ringrt.attention(*random_qkv(24), ranks=1, backend="reference")
    assert len(calls) == 1
