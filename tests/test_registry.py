"""Plugins: what is wrong with one is a line that names it, and the rest keeps working."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from ringrt import registry as module
from ringrt.backend import BackendSpec
from ringrt.errors import BackendUnavailable, TransportError
from ringrt.hookspecs import hookimpl
from ringrt.transport import TransportSpec


def spec(name, probe=lambda: None, priority=None):
    return BackendSpec(name, "a test", probe, load=lambda context: None, priority=priority)


@pytest.fixture
def load(monkeypatch):
    """A registry of plugins given as functions that register backends, or as exceptions."""

    def load(**plugins):
        points = []
        for name, register in plugins.items():
            plugin = types.ModuleType(f"plugin_{name}")
            if isinstance(register, str):
                plugin = None
            elif register is not None:
                register.__name__ = "ringrt_register_backends"
                plugin.ringrt_register_backends = hookimpl(register)
            if plugin is not None:
                monkeypatch.setitem(sys.modules, f"plugin_{name}", plugin)
            points.append(EntryPoint(name, f"plugin_{name}", module.ENTRY_POINT_GROUP))
        return module.load(points)

    return load


def test_first_party_plugins_come_in_by_entry_points():
    found = module.registry()
    assert set(found.backends) >= {"cpu", "reference", "null"}
    assert set(found.transports) >= {"threads", "mpi"}
    assert found.problems == ()


def test_a_plugin_that_cannot_be_imported_is_one_line(load):
    found = load(good=lambda: [spec("a")], gone="missing")
    assert set(found.backends) == {"a"}
    [problem] = found.problems
    assert problem.startswith("plugin gone (plugin_gone): ModuleNotFoundError")


def test_a_plugin_that_fails_to_register_is_one_line(load):
    def fail():
        raise RuntimeError("planted\nin two lines")

    found = load(bad=fail, good=lambda: [spec("a")])
    assert set(found.backends) == {"a"}
    assert found.problems == ("plugin bad: RuntimeError: planted",)


def test_a_plugin_that_registers_something_else_is_one_line(load):
    found = load(bad=lambda: ["cpu"], good=lambda: [spec("a")])
    assert set(found.backends) == {"a"}
    assert found.problems == ("plugin bad: TypeError: registers 'cpu' instead of a BackendSpec",)


def test_a_name_that_is_taken_is_told_and_the_first_kept(load):
    found = load(one=lambda: [spec("a", priority=1)], two=lambda: [spec("a", priority=2)])
    assert found.backends["a"].priority in (1, 2)
    [problem] = found.problems
    assert "the name 'a' is taken" in problem


def test_auto_takes_the_best_that_runs_here_and_is_willing(load):
    def fail():
        raise OSError("planted")

    found = load(
        all=lambda: [
            spec("slow", priority=0),
            spec("fast", priority=9),
            spec("gone", lambda: "it is gone", priority=99),
            spec("broken", fail, priority=99),
            spec("never"),
        ]
    )
    assert [each.name for each in found.candidates()] == ["fast", "slow"]
    with pytest.raises(BackendUnavailable, match="backend gone: it is gone"):
        found.backend("gone")
    with pytest.raises(BackendUnavailable, match="backend broken: OSError: planted"):
        found.backend("broken")


def test_a_transport_that_is_missing_says_so():
    missing = TransportSpec("far", "a test", lambda: "far is not installed: pip install far")
    found = module.Registry({}, {"far": missing}, ())
    with pytest.raises(TransportError, match="transport far: far is not installed"):
        found.transport("far")
    assert found.launched() is None
