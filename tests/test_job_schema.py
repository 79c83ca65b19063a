"""Job files: strict, and one line for each mistake with its key and what was expected."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from ringrt.errors import ConfigError, ConfigErrors
from ringrt.jobs.load import job_schema, load_job
from support import ROOT

MINIMAL = "input: {source: random, length: 8, q_heads: 2, kv_heads: 1, head_dim: 4}\n"


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides):
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return load_job(path, overrides).job

    return load


def test_every_key_but_input_has_a_default(load):
    job = load(MINIMAL)
    assert job.input.dtype == "float32"
    assert job.ring.partition == "striped"
    assert job.ring.timeout == 60
    assert job.passes == ["forward"]
    assert job.verify.rows == 64
    assert job.output is None


def test_overrides_take_dotted_paths_and_yaml_values(load):
    job = load(
        MINIMAL,
        "ring.partition=zigzag",
        "attention.causal=true",
        "attention.softcap=2.5",
        "input.length=0",
        "verify.rows=all",
        "output.path=x.safetensors",
    )
    assert (job.ring.partition, job.attention.causal, job.attention.softcap) == (
        "zigzag",
        True,
        2.5,
    )
    assert (job.input.length, job.verify.rows, job.output.path) == (0, "all", "x.safetensors")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring: {}", "input: expected a value, got nothing"),
        ("input: 3", "input: expected a section of keys, got 3"),
        ("input: {length: 3}", "input: expected a key source: 'file' or 'random'"),
        ("input: {source: tape}", "input.source: expected 'file', 'random', got 'tape'"),
        ("input: {source: file}", "input.path: expected a value, got nothing"),
        (MINIMAL + "speed: 3", "speed: expected one of input, attention, ring, passes, verify, output, got an unknown key"),
        (MINIMAL + "ring: {rank: 3}", "ring.rank: expected one of ranks, partition, .*, got an unknown key"),
        (MINIMAL + "ring: {ranks: '3'}", "ring.ranks: expected a whole number, got '3'"),
        (MINIMAL + "ring: {ranks: 2.5}", "ring.ranks: expected a whole number, got 2.5"),
        (MINIMAL + "ring: {ranks: true}", "ring.ranks: expected a whole number, got True"),
        (MINIMAL + "ring: {ranks: 0}", "ring.ranks: expected at least 1, got 0"),
        (MINIMAL + "ring: {timeout: 0}", "ring.timeout: expected more than 0, got 0"),
        (MINIMAL + "ring: {timeout: .inf}", "ring.timeout: expected a finite number, got inf"),
        (MINIMAL + "attention: {causal: 1}", "attention.causal: expected true or false, got 1"),
        (MINIMAL + "attention: {dropout: 3}", "attention.dropout: expected one of causal, window, .*, got an unknown key"),
        (MINIMAL + "attention: {window: 3}", "attention.window: expected a list, got 3"),
        (MINIMAL + "attention: {window: [3]}", "attention.window: expected at least 2 entries"),
        (MINIMAL + "attention: {documents: [[1, 2], 3]}", "attention.documents: expected whole numbers: cu_seqlens, or"),
        (MINIMAL + "attention: {scale: big}", "attention.scale: expected a number, got 'big'"),
        (MINIMAL + "passes: [forward, sideways]", "passes.1: expected 'forward' or 'backward', got 'sideways'"),
        (MINIMAL + "passes: [backward]", "passes: expected forward among the passes"),
        (MINIMAL + "passes: [forward, forward]", "passes: expected each pass once"),
        (MINIMAL + "passes: []", "passes: expected at least 1 entries"),
        (MINIMAL + "verify: {rows: some}", "verify.rows: expected all, or a whole number of rows >= 0, got 'some'"),
        (MINIMAL + "verify: {rows: -1}", "verify.rows: expected all, or a whole number of rows >= 0, got -1"),
        ("input: {source: random, length: 8, q_heads: 3, kv_heads: 2, head_dim: 4}", "input: expected q_heads to be a multiple of kv_heads"),
        ("input: {source: random, length: 8, q_heads: 2, kv_heads: 1, head_dim: 4, dtype: int8}", "input.dtype: expected 'float16', 'bfloat16', 'float32' or 'float64', got 'int8'"),
        ("input: {source: random, seed: 1, seed: 2}", "seed: expected each key once, got it twice in the block at line 1"),
        ("- a list", "job.yaml: expected a mapping of keys"),
        ("", "job.yaml: expected a mapping of keys, got nothing"),
        ("input: {", "job.yaml: expected YAML, got line 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_key(load, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(text)
    assert len(str(caught.value).splitlines()) == 1
    assert isinstance(caught.value, ValueError)


def test_merge_keys_may_be_overridden(load):
    job = load(
        "input: {source: random, length: 8, q_heads: 2, kv_heads: 1, head_dim: 4}\n"
        "ring:\n  <<: {backend: reference, timeout: 10}\n  timeout: 20\n"
    )
    assert (job.ring.backend, job.ring.timeout) == ("reference", 20)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("2E3", 2e3), ("-1.5e+2", -150.0), ("3", 3.0)]
)
def test_numbers_as_people_write_them(load, text, value):
    assert load(MINIMAL, f"attention.scale={text}").attention.scale == value


def test_the_backend_null_needs_no_quotes(load):
    assert load(MINIMAL, "ring.backend=null").ring.backend == "null"


def test_every_mistake_is_told_at_once(load):
    with pytest.raises(ConfigErrors) as caught:
        load(MINIMAL + "ring: {ranks: 0, rank: 1}\nverify: {rows: x}")
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["ring.ranks", "ring.rank", "verify.rows"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ring.partition", "--set: expected key=value, got 'ring.partition'"),
        ("=3", "--set: expected key=value"),
        ("passes.0=forward", "--set passes.0: expected passes to be a section"),
        ("ring.ranks={", "--set ring.ranks: expected YAML"),
        ("ring.rnks=3", "ring.rnks: expected one of"),
        ("ring.file=3", "ring.file: expected one of"),
        ("input.random=3", "input.random: expected one of source, seed"),
    ],
)
def test_a_wrong_override_is_told_by_its_key(load, override, message):
    with pytest.raises(ConfigError, match=message):
        load(MINIMAL + "passes: [forward]", override)


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match=r"none\.yaml: expected a readable job file, got No such"):
        load_job(Path("none.yaml"))


def test_the_json_schema_accepts_the_examples_and_refuses_mistakes():
    schema = job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in (ROOT / "examples").glob("*.yaml"):
        validator.validate(yaml.safe_load(path.read_text()))
    wrong = yaml.safe_load(MINIMAL) | {"ring": {"rank": 3}}
    assert not validator.is_valid(wrong)
    assert not validator.is_valid({})
    json.dumps(schema)
