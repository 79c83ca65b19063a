"""Plugins that go wrong when they are used: one line each, and the rest keeps working."""

from __future__ import annotations

import pytest
from test_registry import (  # noqa: F401
    GOOD,
    active,
    backends,
    install,
    load,
    named,
    partitions,
    spec,
)

import ringrt
from ringrt.backend import BackendContext, BackendSpec
from ringrt.errors import BackendUnavailable, ConfigError, PlanError
from ringrt.plan.partition import Run
from ringrt.registry import missing_for
from ringrt.transport import TransportSpec
from ringrt_backends.reference import ReferenceBackend
from support import random_qkv, ringrt_command


def leave(*arguments):
    raise SystemExit(3)


def transports(**options):
    made = TransportSpec("far", "a test", lambda: None, **options)
    name = "ringrt_register_transports"
    return {name: named(name, lambda: [made])}


def test_a_plugin_that_wants_to_end_the_process_does_not(load):  # noqa: F811
    found = load(bad=backends(leave), good=GOOD)
    assert set(found.backends) == {"a"}
    assert found.problems == ["plugin bad: SystemExit: 3"]
    ends = BackendSpec("ends", "a test", probe=lambda: None, load=leave)
    found = load(bad=backends(lambda: [ends, spec("probes", probe=leave)]))
    with pytest.raises(BackendUnavailable, match="backend ends: SystemExit: 3"):
        found.load("ends", BackendContext(1))
    with pytest.raises(BackendUnavailable, match="backend probes: SystemExit: 3"):
        found.backend("probes")


def test_a_module_that_ends_the_process_is_one_line(load, install, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "plugin_ends.py").write_text("raise SystemExit(4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = load(ends=None, good=GOOD)
    assert set(found.backends) == {"a"}
    assert found.problems == ["plugin ends (plugin_ends): SystemExit: 4"]


@pytest.mark.parametrize("name", [3, None, "", "auto", "two words", "a\nb", "[/b]", "-x"])
def test_names_that_cannot_be_asked_for(load, name):  # noqa: F811
    found = load(bad=backends(lambda: [spec(name)]), good=GOOD)
    assert set(found.backends) == {"a"}
    [problem] = found.problems
    assert problem.startswith("plugin bad: TypeError: registers ")
    assert "whose name must be" in problem or "\n" in str(name)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (BackendSpec("b", "a test", None, lambda c: None), "whose probe cannot be called: None"),
        (BackendSpec("b", "a test", lambda: None, "b"), "whose load cannot be called: 'b'"),
        (spec("b", priority="10"), "whose priority must be a whole number or None, not '10'"),
        (BackendSpec("b", None, lambda: None, print), "whose summary must be one line of text"),
        (
            BackendSpec("b", "a test", lambda: None, print, device="gpu"),
            "whose device must be cpu or cuda, not 'gpu'",
        ),
    ],
)
def test_specs_that_are_none(load, made, text):  # noqa: F811
    found = load(bad=backends(lambda: [made]), good=GOOD)
    assert found.problems == [f"plugin bad: TypeError: registers 'b', {text}"]
    assert set(found.backends) == {"a"}


@pytest.mark.parametrize("answer", [True, False, "", " ", 1])
def test_a_probe_answers_in_words_or_none(answer):
    assert missing_for(spec("a", probe=lambda: answer)) == (
        f"its probe gave {answer!r}, which is neither None nor words"
    )


@pytest.mark.parametrize("launched", [leave, lambda: 1 / 0, lambda: True, lambda: (1, 2, 3)])
def test_a_transport_that_does_not_know_whether_it_was_launched(load, launched):  # noqa: F811
    found = load(bad=transports(launched=launched))
    assert found.launched() is None
    assert found.launched() is None
    [problem] = found.problems
    assert problem.startswith("transport far: launched: ")


def test_what_load_gives_must_be_a_backend(load):  # noqa: F811
    made = BackendSpec("odd", "a test", lambda: None, lambda context: object())
    found = load(bad=backends(lambda: [made]))
    with pytest.raises(BackendUnavailable, match="what load gave, a object, has no supports"):
        found.load("odd", BackendContext(1))


class Unsure(ReferenceBackend):
    def supports(self, problem):
        raise ZeroDivisionError("planted")


class Square(ReferenceBackend):
    def finish(self, state, stream=None):
        out, lse = super().finish(state, stream)
        return out[0], lse


@pytest.fixture
def use(active):  # noqa: F811
    def use(kind):
        made = BackendSpec("mine", "a test", lambda: None, lambda context: kind())
        active(mine=backends(lambda: [made]))
        return ringrt.attention(*random_qkv(9), ranks=2, backend="mine")

    return use


def test_a_backend_that_cannot_say_what_it_supports_is_named(use):
    with pytest.raises(BackendUnavailable, match="backend mine: supports: ZeroDivisionError: pla"):
        use(Unsure)


def test_a_result_of_another_shape_is_a_kernel_error(use):
    text = r"backend mine failed on rank \d at the end: ValueError: out has shape"
    with pytest.raises(ringrt.KernelError, match=text):
        use(Square)


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        (lambda n, p, r: (Run(n - 1 - r, -p, (n - 1 - r) // p + 1),), "stride must be 1 or more"),
        (lambda n, p, r: 1 / 0, r"runs\(23, 3, 0\): ZeroDivisionError: division by zero"),
        (lambda n, p, r: None, r"runs\(23, 3, 0\): TypeError: 'NoneType' object"),
        (lambda n, p, r: (5,), r"runs\(23, 3, 0\): AttributeError: 'int' object"),
    ],
)
def test_a_partition_that_fails_is_named(active, runs, text):  # noqa: F811
    active(mine=partitions(runs))
    with pytest.raises(PlanError, match=f"partition mine: .*{text}"):
        ringrt.attention(*random_qkv(23), ranks=3, partition="mine")


def test_nothing_there_is_said_in_words(load):  # noqa: F811
    found = load()
    for ask in (found.backend, found.transport, found.partition):
        with pytest.raises(ConfigError, match="expected one of a plugin .none is there"):
            ask("striped")


@pytest.mark.parametrize(
    ("command", "code"),
    [("backends", 0), ("doctor", 1), ("run examples/quickstart.yaml", 2), ("check-backend cpu", 2)],
)
def test_commands_where_every_plugin_is_blocked(command, code):
    blocked = "ringrt_backends,ringrt_partitions,ringrt_transports"
    done = ringrt_command(*command.split(), env={"RINGRT_BLOCK_PLUGINS": blocked}, timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (code == 2)


@pytest.mark.parametrize("value", ["x", ""])
def test_a_launcher_s_variables_that_are_no_numbers(value):
    done = ringrt_command(
        "run", "examples/quickstart.yaml", "--set", "ring.transport=mpi",
        env={"PMI_RANK": value, "PMI_SIZE": "2"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "got a plain process" in done.stderr
    assert len(done.stderr.splitlines()) == 1
