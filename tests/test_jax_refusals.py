"""What ringrt.jax refuses, and that it says so in one line."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_support import arrays, counted, on_ranks

import ringrt
from ringrt.jax import ring_attention

pytestmark = pytest.mark.timeout(100)


def python(code, timeout=60, **options):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, **options
    )


def lowered_for(platform):
    def lower(ring):
        call = jax.jit(lambda *x: ring_attention(*x, ring=ring))
        call.trace(*arrays()).lower(lowering_platforms=(platform,))

    return lower


def call_with(**options):
    return lambda ring: ring_attention(*arrays(), ring=ring, **options)


def traced(name, value):
    def run(ring):
        jax.jit(lambda x: ring_attention(*arrays(), ring=ring, **{name: x}))(value)

    return run


def with_q(make):
    q, k, v = arrays()
    return lambda ring: ring_attention(make(q), k, v, ring=ring)


def loss(ring):
    _, k, v = arrays()
    return lambda q: ring_attention(q, k, v, ring=ring).sum()


REFUSED = {
    "a GPU": (lowered_for("cuda"), ringrt.Unsupported, "inside jax.jit on cuda"),
    "a TPU": (lowered_for("tpu"), ringrt.Unsupported, "inside jax.jit on tpu"),
    "traced documents": (
        traced("documents", jnp.array([0, 9])), ringrt.ConfigError, "documents: .* a traced array",
    ),
    "a traced scale": (traced("scale", 1.0), ringrt.ConfigError, "scale: expected a number"),
    "a traced causal": (traced("causal", True), ringrt.ConfigError, "causal: expected True or"),
    "a traced window": (
        traced("window", (jnp.array(1), 0)), ringrt.ConfigError, "window: expected",
    ),
    "a sink of another shape": (
        traced("sink", jnp.zeros(3)), ringrt.ConfigError, r"sink: expected shape \[q_heads\], \(2,\)",
    ),
    "a sink of integers": (
        call_with(sink=jnp.zeros(2, int)), ringrt.ConfigError, "sink: expected dtype",
    ),
    "a sink that is a list": (
        call_with(sink=[0.0, 0.0]), ringrt.ConfigError, "sink: expected an array of JAX or NumPy",
    ),
    "a mask beside causal": (
        call_with(causal=True, mask=ringrt.Mask.causal(9, 9)), ringrt.ConfigError, "mask: expected no",
    ),
    "no ring": (lambda ring: ring_attention(*arrays(), ring=None), ringrt.ConfigError, "ring: expected"),
    "integers": (with_q(lambda q: q.astype(int)), ringrt.ConfigError, "q: expected dtype"),
    "a key": (with_q(lambda q: jax.random.key(0)), ringrt.ConfigError, "q: expected shape"),
    "64 bits": (with_q(lambda q: np.ones(q.shape)), ringrt.ConfigError, "q: .* jax_enable_x64 is"),
    "another dtype": (
        with_q(lambda q: q.astype(jnp.bfloat16)), ringrt.ConfigError, "k: expected the dtype of q",
    ),
    "a masked array": (
        with_q(lambda q: np.ma.masked_array(q)), ringrt.HandoffError, "q: a masked array",
    ),
    "a second derivative": (
        lambda ring: jax.grad(lambda q: jax.grad(loss(ring))(q).sum())(arrays()[0]),
        ringrt.Unsupported, "second derivatives: not implemented",
    ),
    "forward mode": (
        lambda ring: jax.jvp(loss(ring), arrays()[:1], arrays()[:1]), TypeError, "forward-mode",
    ),
    "a sink under vmap": (
        lambda ring: jax.vmap(
            lambda s: ring_attention(*arrays(), ring=ring, sink=s)
        )(jnp.zeros((3, 2))),
        ringrt.Unsupported, "sink under jax.vmap: not implemented",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ["a second derivative", "a sink under vmap"])
def test_what_is_refused_late_is_told_to_the_others(case):
    run, kind, words = REFUSED[case]
    heard = {}

    def on_rank(ring):
        try:
            if ring.rank == 1:
                run(ring)
            if case == "a second derivative":
                jax.grad(loss(ring))(arrays()[0])
            ring_attention(*arrays(), ring=ring)
        except Exception as error:
            heard[ring.rank] = error
            raise

    with pytest.raises(kind, match=words):
        ringrt.run_threads(on_rank, 2, timeout=30)
    assert type(heard[0]) is ringrt.RankMismatch
    assert words in str(heard[0])


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(case):
    run, kind, words = REFUSED[case]

    def on_rank(ring):
        passes = counted(ring)
        with pytest.raises(kind, match=words):
            run(ring)
        return [name for name, _ in passes]

    assert "backward" not in on_ranks(on_rank)[0]


@pytest.fixture
def two_workers(monkeypatch):
    """What XLA reads when JAX is first used; here no more than what the refusal believes."""
    monkeypatch.setenv("NPROC", "2")


@pytest.mark.usefixtures("two_workers")
def test_more_thread_ranks_than_workers_are_refused_inside_jit_and_only_there():
    qkv = arrays(9)

    def on_rank(ring):
        call = lambda *x: ring_attention(*x, ring=ring)  # noqa: E731
        with pytest.raises(ringrt.Unsupported, match="jit on 3 thread ranks: .* 2 workers"):
            jax.jit(call)(*qkv)
        return call(*(ring.shard(x) for x in qkv)).shape

    assert on_ranks(on_rank, 3) == 3 * [(1, 3, 2, 8)]


@pytest.mark.parametrize("setting", ["NPROC", "jax_num_cpu_devices", None])
def test_the_workers_of_jax_s_client_are_as_many_as_the_refusal_says(setting):
    code = f"""if True:
        import os, jax
        if {setting!r} == "jax_num_cpu_devices":
            jax.config.update("jax_num_cpu_devices", 5)
        jax.devices()
        from pathlib import Path
        from ringrt.jax.passes import workers
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        print(sum("XLAEigen" in name for name in names), workers())
    """
    done = python(code, env={"NPROC": "4"} if setting == "NPROC" else None)
    counted, said = map(int, done.stdout.split())
    assert counted == said
    assert said == {"NPROC": 4, "jax_num_cpu_devices": 5}.get(setting, said)


def test_several_devices_in_one_program_are_refused():
    code = """if True:
        import jax, jax.numpy as jnp, numpy as np, ringrt
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from ringrt.jax import ring_attention
        jax.config.update("jax_num_cpu_devices", 2)
        x = jnp.ones((2, 8, 2, 4))
        def attempt(devices, over):
            mesh = Mesh(np.array(jax.devices()[:devices]), "d")
            def on_rank(ring):
                call = lambda x: ring_attention(x, x, x, ring=ring)
                if over:
                    call = jax.shard_map(call, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
                return jax.jit(call)(jax.device_put(x, NamedSharding(mesh, P("d")))).shape
            try:
                print(*ringrt.run_threads(on_rank, 1))
            except ValueError as error:
                print(error)
        for devices in (1, 2):
            for over in (False, True):
                attempt(devices, over)
    """
    *fine, sharded, mapped = python(code).stdout.splitlines()
    assert fine == 2 * ["(2, 8, 2, 4)"]
    for line in (sharded, mapped):
        assert "more than 1 device: [ringrt.jax.ring_attention, of which each device" in line


def test_a_jax_whose_effects_are_others_is_refused():
    code = """if True:
        import jax.extend.core, jax.interpreters.mlir
        from jax._src import effects
        del effects.remat_allowed_effects
        import ringrt.jax
    """
    last = python(code).stderr.splitlines()[-1]
    assert last.startswith("ringrt.errors.BackendUnavailable: JAX "), last
    assert "remat_allowed_effects" in last
