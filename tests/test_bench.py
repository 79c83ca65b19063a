"""`ringrt bench`, all but its runs: how it pairs and sums up, its targets, and what it prints and
writes. Nothing here holds a time to anything."""

from __future__ import annotations

import gc
import json
import re
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

import ringrt.cli.bench as command
from ringrt.bench import cores, session as sessions
from ringrt.bench.cases import Case, Settings, Shape, chosen, settings_from_json
from ringrt.bench.chart import chart
from ringrt.bench.interleave import GAP_S, Contender, interleave, quartiles, ratio, timed
from ringrt.bench.measurement import Measurement, passed
from ringrt.bench.report import from_json, to_json
from ringrt.bench.suites import cases
from ringrt.bench.targets import TARGETS, Target, target
from ringrt.cli.main import cli
from ringrt.errors import ConfigError
from support import ringrt_command


class FakeMachine:
    """A clock that only its contenders and gaps move, and what was done in which order."""

    def __init__(self, **seconds):
        self.now, self.log, self.seconds = 0.0, [], seconds

    def contender(self, name):
        def call():
            assert not gc.isenabled(), "garbage is collected while something is timed"
            self.log.append(name)
            took = self.seconds[name]
            self.now += took(self.log.count(name)) if callable(took) else took

        return Contender(name, timed(call, lambda: self.now))

    def sleep(self, seconds):
        self.log.append(seconds)
        self.now += seconds

    def run(self, repeats):
        return interleave([self.contender(name) for name in self.seconds], repeats, self.sleep)


def test_times_are_those_of_the_calls_alone():
    times = FakeMachine(a=1.0, b=0.5).run(3)
    assert times == {"a": pytest.approx([1.0] * 3), "b": pytest.approx([0.5] * 3)}


def test_order_alternates_behind_a_warm_up_and_each_call_has_its_gap():
    machine = FakeMachine(a=1.0, b=0.5)
    machine.run(3)
    assert machine.log[0::2] == [GAP_S] * 8
    assert "".join(machine.log[1::2]) == "ab" + "ab" + "ba" + "ab"


def test_the_warm_up_does_not_count():
    assert FakeMachine(a=lambda nth: 1.5 if nth == 1 else 0.1).run(2)["a"] == pytest.approx(
        [0.1] * 2
    )


@pytest.mark.parametrize(("seconds", "repeats"), [(1.9, 7), (2.1, 5), (29.0, 5), (31.0, 1)])
def test_long_calls_are_repeated_less(seconds, repeats):
    assert len(FakeMachine(a=0.1, b=seconds).run(7)["a"]) == repeats


def test_few_repeats_stay_few():
    assert len(FakeMachine(a=3.0).run(3)["a"]) == 3


@pytest.mark.parametrize("on", [True, False])
def test_collection_is_left_as_it_was(on):
    was = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            interleave([Contender("a", lambda: 1 / 0)], 1, lambda _: None)
        assert gc.isenabled() == on
    finally:
        (gc.enable if was else gc.disable)()


def test_the_ratio_is_the_median_of_paired_ratios():
    """And not the ratio of medians, which is 1 here: the machine was slow in one repeat."""
    found = ratio({"a": [2.0, 20.0, 10.0], "b": [1.0, 10.0, 20.0]}, "a", "b")
    assert found.value == 2.0
    assert found.best == 2.0
    assert found.quartiles == (1.25, 2.0)
    assert found.of == "a / b"


def test_a_factor_scales_all():
    found = ratio({"a": [1.0, 3.0], "b": [1.0, 2.0]}, "a", "b", factor=4)
    assert (found.value, found.best, found.quartiles) == (5.0, 4.0, (4.5, 5.5))


def test_the_quartiles_of_one_value():
    assert quartiles([3.0]) == (3.0, 3.0)


def test_targets_by_name_and_head_dim():
    assert target("forward float32 full", 64).limit == 1.2
    assert target("forward float32 full", 128).limit == 1.15
    assert target("backward float32 causal", 256).limit == 1.4
    assert target("forward bfloat16 causal", 128).limit == 2.4
    assert target("one rank", 128).at_least is False


def test_every_target_says_where_it_comes_from():
    assert all(each.source for each in TARGETS.values())


@pytest.mark.parametrize("suite", ["cpu", "kernel", "ring", "limits"])
def test_every_aim_is_a_target_and_every_name_is_one(suite):
    found = cases(suite, Settings())
    assert found
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    for case in found:
        assert case.aim is None or target(case.aim, case.shape.head_dim)


def row(value=None, limit=None, at_least=True, **more):
    aim = None if limit is None else Target(limit, "here", at_least)
    fields = {"name": "kernel forward float32 full", "suite": "kernel", "group": "forward float32"}
    return Measurement(**(fields | {"threads": 1, "value": value, "target": aim} | more))


@pytest.mark.parametrize(
    ("measured", "verdict", "good"),
    [
        (row(1.2, 1.2), "reached", True),
        (row(1.19, 1.2), "missed", False),
        (row(1.02, 1.02, at_least=False), "reached", True),
        (row(1.03, 1.02, at_least=False), "missed", False),
        (row(float("nan"), 1.2), "missed", False),
        (row(0.1), "no target", True),
        (row(None, 1.2), "no target", True),
        (row(None, 1.2, state="failed", why="wrong"), "failed", False),
        (row(None, 1.2, state="skipped"), "skipped", True),
    ],
)
def test_verdicts(measured, verdict, good):
    assert measured.verdict == verdict
    assert passed([row(1.3, 1.2), measured]) == good


def test_a_target_counts_from_its_length_on():
    short, long = (
        Case("n", "ring", "g", "one rank", shape=Shape(length=n), aim="one rank").row(value=9.0)
        for n in (1024, 4096)
    )
    assert (short.verdict, long.verdict) == ("no target", "missed")
    assert short.why == "the target counts from 4096 tokens on"


def test_json_round_trip():
    rows = [
        row(1.5, 1.2, best=1.6, quartiles=(1.4, 1.5), times={"torch": [3.0, 2.0], "ringrt": [2.0, 1.0]}),
        row(state="failed", why="wrong"),
    ]  # fmt: skip
    text = to_json({"cores": 2}, Settings(), rows)
    assert from_json(text) == rows
    record = json.loads(text)
    assert record["passed"] is False
    assert record["rows"][0]["times"]["torch"] == [3.0, 2.0]
    assert record["rows"][0]["verdict"] == "reached"
    assert record["rows"][0]["target"]["source"] == "here"
    assert settings_from_json(record["settings"]) == Settings()


def test_cases_go_through_json():
    for case in cases("cpu", Settings()):
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def drawn(rows):
    tree = ElementTree.fromstring(chart(rows, "bench <of> & more"))
    name = "{http://www.w3.org/2000/svg}"
    bars = [each for each in tree.iter(f"{name}rect") if each.get("class") == "bar"]
    ticks = [each for each in tree.iter(f"{name}line") if each.get("class") == "target"]
    return bars, ticks, [each.text for each in tree.iter(f"{name}text")]


def test_the_chart_has_a_bar_for_each_ratio_and_a_tick_for_each_target():
    rows = [
        row(0.8, 1.2, quartiles=(0.7, 0.9)),
        row(1.6, 1.2),
        row(1.0),
        row(90.0, 88.0, unit="% of limit"),
    ]
    bars, ticks, words = drawn(rows)
    assert len(bars) == 3
    assert len(ticks) == 2
    widths = [float(bar.get("width")) for bar in bars]
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-3)
    assert len({bar.get("fill") for bar in bars}) == 3, "reached, missed and no target"
    assert float(ticks[0].get("x1")) == pytest.approx(1.2 * widths[2], rel=1e-3)
    assert {"forward float32", "target missed", "0.80 (≥ 1.2)", "bench <of> & more"} <= set(words)


def test_what_failed_is_in_the_chart_without_a_bar():
    bars, _, words = drawn([row(1.0), row(state="failed")])
    assert len(bars) == 1
    assert "failed" in words


def test_an_empty_chart_is_one_too():
    assert drawn([]) is not None


def test_the_best_of_the_limit_is_that_of_its_group_and_threads():
    found = cases(
        "kernel", Settings(threads=(1,), dtypes=("float32",), lengths=(64,), head_dims=(64,))
    )
    shares = iter((80.0, 90.0, 95.0, 97.0))

    def measure(batch, settings):
        return [case.row(value=1.0, figures={"% of limit": next(shares)}) for case in batch]

    rows = {each.name: each for each in sessions.session(found, Settings(), measure)}
    assert rows["kernel forward float32 best of the limit t1"].value == 90.0
    assert rows["kernel backward float32 best of the limit t1"].value == 97.0


def test_what_is_not_installed_is_skipped_and_said(monkeypatch):
    monkeypatch.setattr(sessions, "find_spec", lambda name: None if name == "torch" else name)
    found = chosen(cases("limits", Settings(threads=(1,))), ["1024³"])
    rows = list(
        sessions.session(found, Settings(), lambda batch, _: [x.row(value=1.0) for x in batch])
    )
    assert [each.verdict for each in rows] == ["no target", "skipped", "skipped"]
    assert rows[1].why == "torch is not installed: pip install torch"


def test_siblings_of_a_core_come_last(monkeypatch):
    """Four hardware threads of two cores: 0 with 1, 2 with 3."""
    monkeypatch.setattr(cores, "can_pin", lambda: True)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(cores, "_siblings", lambda core: {core & ~1, core | 1})
    assert cores.cores(1) == [0]
    assert cores.cores(2) == [0, 2]
    assert cores.cores(3) == [0, 2, 1]


def bench(*arguments):
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def test_list_shows_rows_and_targets_and_runs_none(monkeypatch):
    monkeypatch.setattr(command, "session", None)
    done = bench("--list", "--quick", "--lengths", "4096", "--only", "one rank")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"ring of one rank forward d64 4096 +≤ 1.02", lines[0])


def test_only_may_be_repeated():
    done = bench("--list", "--only", "sgemm 1024", "--only", "import")
    assert "sgemm 1024³ t1" in done.output
    assert "import ringrt" in done.output
    assert "torch.mm" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "no such row"), "--only: expected part of the name of a row (see --list), got no such row"),
        (("--lengths", "12,x"), "--lengths: expected whole numbers of at least 1, with commas between, got '12,x'"),
        (("--head-dims", "0"), "--head-dims: expected whole numbers"),
        (("--threads", "1,4096"), "--threads: expected from 1 to"),
        (("--dtypes", "float32,int8"), "--dtypes: expected float16 or bfloat16 or float32 or float64, got 'int8'"),
        (("--backend", "nobody"), "backend: expected"),
        (("--json", "/no/such/folder/a.json"), "--json: expected a file that can be written"),
        (("--chart", "/no/such/folder/a.svg"), "--chart: expected a file that can be written"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(arguments, message):
    done = bench(*arguments)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def test_a_handled_error_is_one_line_and_exit_code_2():
    done = ringrt_command("bench", "--threads", "4096")
    assert done.returncode == 2
    assert done.stderr.startswith("ringrt: --threads: expected from 1 to ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("value", "code"), [(1.3, 0), (1.1, 1)])
def test_the_exit_code_and_the_files(monkeypatch, tmp_path, value, code):
    def session(found, settings):
        yield row(value, 1.2, of="torch / ringrt", times={"ringrt": [1.0], "torch": [value]})

    monkeypatch.setattr(command, "session", session)
    files = tmp_path / "a.json", tmp_path / "a.svg"
    done = bench("--only", "full", "--json", files[0], "--chart", files[1])
    assert done.exit_code == code, done.output
    assert f"{value:.3f}" in done.output
    assert done.output.splitlines()[-1] == ("1 reached" if code == 0 else "1 missed")
    [kept] = from_json(files[0].read_text())
    assert kept.value == value
    assert json.loads(files[0].read_text())["machine"]["cores"] >= 1
    assert ElementTree.fromstring(files[1].read_text()).tag.endswith("svg")
