"""Forward and backward on whole rings, with everything attention can be, against the oracle;
and the oracle itself against finite differences and PyTorch's autograd."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from masks import mask_options, visible

import oracle
import ringrt
from ringrt import Mask, Piece
from ringrt.device.host import HOST
from support import BACKENDS, PARTITIONS as NAMES, assert_close, random_qkv

SCHEDULES = ("ring", "direct")
TRAVELS = ("kv", "q")
TIMEOUT = 30


def both_passes(q, k, v, dout, ranks, *, travel="auto", **options):
    """(out, lse), (dq, dk, dv[, dsink]) by the ring."""
    out, lse = ringrt.attention(q, k, v, ranks=ranks, timeout=TIMEOUT, **options)
    gradients = ringrt.attention_backward(
        dout, q, k, v, out, lse, ranks=ranks, travel=travel, timeout=TIMEOUT, **options
    )
    return (out, lse), gradients


#: Of the largest gradient: rounding of results, and of the 16-bit out that delta is made from.
GRADIENT_TOLERANCE = {"float64": 1e-13, "float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def assert_gradients(result, expected, dtype):
    assert len(result) == len(expected)
    for name, got, want in zip(("dq", "dk", "dv", "dsink"), result, expected, strict=False):
        assert got.shape == want.shape, name
        bound = GRADIENT_TOLERANCE[dtype] * max(1, abs(want).max(initial=0))
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=bound, err_msg=name)


def example(length=45, kv_length=None, dtype="float32", seed=0, **shape):
    shape = {"q_heads": 4, "kv_heads": 2, "head_dim": 8} | shape
    q, k, v = random_qkv(length, kv_length=kv_length, dtype=dtype, seed=seed, **shape)
    dout_shape = shape | {"head_dim": shape.get("value_dim") or shape["head_dim"]}
    return q, k, v, random_qkv(length, dtype=dtype, seed=seed + 50, **dout_shape)[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("travel", TRAVELS)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 9)}], ids=str)
def test_one_ring_again_and_again(schedule, travel, options):
    """Small buffers are kept from one pass to the next; what is in them is not, and what has been
    returned is the caller's."""
    every = [example(seed=seed) for seed in range(3)]

    def on_rank(ring):
        results = []
        for q, k, v, dout in (map(ring.cut, arrays) for arrays in every):
            out, lse = ring.attention(q, k, v, **options)
            results.append((out, lse, *ring.attention_backward(dout, q, k, v, out, lse, **options)))
        return [(*map(ring.unshard, (o, *grads)), ring.unshard(lse, 2))
                for o, lse, *grads in results]  # fmt: skip

    how = {"schedule": schedule, "travel": travel, "backend": "reference", "timeout": TIMEOUT}
    results = ringrt.run_threads(on_rank, 4, partition="contiguous", **how)[0]
    for (q, k, v, dout), (out, *gradients, lse) in zip(every, results, strict=True):
        seen = visible(45, 45, **options)
        assert_close((out, lse), oracle.attention(q, k, v, seen))
        assert_gradients(gradients, oracle.gradients(dout, q, k, v, seen), "float32")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("travel", TRAVELS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_ring(name, schedule, travel, ranks):
    arrays = example()
    how = {"partition": name, "schedule": schedule, "causal": True}
    result, gradients = both_passes(*arrays, ranks, travel=travel, **how)
    assert_close(result, oracle.attention(*arrays[:3], causal=True))
    assert_gradients(gradients, oracle.gradients(arrays[3], *arrays[:3], causal=True), "float32")


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (7, 2)},
    "causal window": {"causal": True, "window": (9, -1)},
    "documents": {"causal": True, "documents": [0, 11, 12, 30]},
    "documents with gaps": {"documents": [[3, 9], [14, 31], [31, 40]]},
    "prefix": {"causal": True, "prefix": 6},
    "sinks": {"causal": True, "window": (5, 0), "sink_tokens": 3},
    "prefix, sinks and documents": {
        "causal": True, "window": (4, 0), "sink_tokens": 3, "prefix": 1, "documents": [0, 20, 45],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_mask(name, mask, ranks, backend):
    arrays = example(dtype="float64")
    options = MASKS[mask]
    seen = visible(45, 45, **options)
    expected = oracle.attention(*arrays[:3], seen)
    wanted = oracle.gradients(arrays[3], *arrays[:3], seen)
    for schedule, travel in [("auto", "auto"), ("direct", "q"), ("ring", "kv")]:
        result, gradients = both_passes(
            *arrays, ranks, travel=travel, partition=name, schedule=schedule, backend=backend, **options
        )  # fmt: skip
        assert_close(result, expected, "float64")
        assert_gradients(gradients, wanted, "float64")


# On a new machine it compiles vector code for each size of heads.
@pytest.mark.timeout(600)
@settings(max_examples=250)
@given(st.data())
def test_anything(data):
    draw = data.draw
    q_length, kv_length = draw(st.integers(0, 30)), draw(st.integers(0, 30))
    kv_heads, dtype = draw(st.integers(1, 2)), draw(st.sampled_from(sorted(GRADIENT_TOLERANCE)))
    arrays = example(
        q_length,
        kv_length,
        dtype,
        seed=draw(st.integers(0, 40)),
        batch=draw(st.integers(1, 2)),
        q_heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
    )
    masking = draw(mask_options(q_length, kv_length))
    scores = {"softcap": draw(st.none() | st.just(2.0)), "scale": draw(st.none() | st.just(-0.4))}
    if draw(st.booleans()):
        heads = arrays[0].shape[2]
        scores["sink"] = np.array(draw(st.lists(st.floats(-3, 3), min_size=heads, max_size=heads)))
    result, gradients = both_passes(
        *arrays,
        draw(st.integers(1, 8)),
        partition=draw(st.sampled_from(NAMES)),
        schedule=draw(st.sampled_from(["auto", *SCHEDULES])),
        travel=draw(st.sampled_from(["auto", *TRAVELS])),
        backend=draw(st.sampled_from(BACKENDS)),
        **masking,
        **scores,
    )
    seen = visible(q_length, kv_length, **masking)
    for got in (result[0], *gradients[:3]):
        assert got.dtype == arrays[0].dtype
    assert_close(result, oracle.attention(*arrays[:3], seen, **scores), dtype, scale=4)
    assert_gradients(gradients, oracle.gradients(arrays[3], *arrays[:3], seen, **scores), dtype)


def test_an_own_mask():
    arrays = example()
    mask = Mask([Piece(0, 20, 0, 10, None, 4), Piece(0, 20, 10, 45, -30, -2), Piece(30, 45, 5, 45)])
    seen = np.zeros((45, 45), dtype=bool)
    for i in range(45):
        for j in range(45):
            seen[i, j] = (
                (i < 20 and j < 10 and i - j <= 4)
                or (i < 20 and j >= 10 and -30 <= i - j <= -2)
                or (i >= 30 and j >= 5)
            )
    for name in NAMES:
        result, gradients = both_passes(*arrays, 3, partition=name, mask=mask)
        assert_close(result, oracle.attention(*arrays[:3], seen))
        assert_gradients(gradients, oracle.gradients(arrays[3], *arrays[:3], seen), "float32")


def test_sinks_enter_once_and_their_gradient_is_the_sum_of_all_ranks():
    arrays = example(dtype="float64")
    sink = np.array([0.5, -1.0, 3.0, -np.inf])
    options = {"causal": True, "documents": [5, 30], "sink": sink}
    seen = visible(45, 45, causal=True, documents=[5, 30])
    expected = oracle.attention(*arrays[:3], seen, sink=sink)
    wanted = oracle.gradients(arrays[3], *arrays[:3], seen, sink=sink)
    for ranks in (1, 3, 4):
        result, gradients = both_passes(*arrays, ranks, **options)
        assert_close(result, expected, "float64")
        assert_gradients(gradients, wanted, "float64")
        assert gradients[3].dtype == sink.dtype


def test_padding_holds_nan_and_no_one_sees_it():
    """Rows outside every document, in q, k, v and dout: out 0, lse −inf, gradients 0."""
    arrays = example(20, dtype="float64")
    clean = [x.copy() for x in arrays]
    for x in arrays:
        x[:, 7:10] = np.nan
        x[:, 18:] = np.inf
    documents = [[0, 7], [10, 18]]
    seen = visible(20, 20, causal=True, documents=documents)
    sink = np.array([0.1, 0.2, 0.3, 0.4])
    for backend in BACKENDS:
        for name in NAMES:
            for extra in ({}, {"sink": sink}):
                how = {"partition": name, "backend": backend, "documents": documents}
                result, gradients = both_passes(*arrays, 3, causal=True, **how, **extra)
                assert_close(result, oracle.attention(*clean[:3], seen, **extra), "float64")
                wanted = oracle.gradients(clean[3], *clean[:3], seen, **extra)
                assert_gradients(gradients, wanted, "float64")


@pytest.mark.parametrize("travel", TRAVELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_runs_give_the_same_bits(travel, schedule):
    arrays = example(80)
    runs = [
        both_passes(*arrays, 4, travel=travel, schedule=schedule, causal=True, window=(30, 0))
        for _ in range(2)
    ]
    for first, second in zip(*runs, strict=True):
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_error_does_not_grow_with_the_ring(dtype):
    arrays = example(256, dtype=dtype, head_dim=32, seed=7)
    expected = (*oracle.attention(*arrays[:3], causal=True),
                *oracle.gradients(arrays[3], *arrays[:3], causal=True))  # fmt: skip

    def errors(ranks):
        result, gradients = both_passes(*arrays, ranks, causal=True, backend="cpu")
        pairs = zip((*result, *gradients), expected, strict=True)
        return [float(abs(got.astype(np.float64) - want).max()) for got, want in pairs]

    alone = errors(1)
    for ranks in (2, 4, 8):
        for error, bound in zip(errors(ranks), alone, strict=True):
            # In units of fp32's own rounding there is nothing to compare.
            assert error <= max(1.25 * bound, 2e-6)


def test_float16_gradients_have_float16_accuracy():
    """And not that of bfloat16, which has three bits less."""
    arrays = example(64, dtype="float16")
    _, gradients = both_passes(*arrays, 4, causal=True)
    for got, want in zip(
        gradients, oracle.gradients(arrays[3], *arrays[:3], causal=True), strict=True
    ):
        assert got.dtype == np.float16
        error = abs(got.astype(np.float64) - want) / np.maximum(1, abs(want))
        assert error.max() < 2**-9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("travel", TRAVELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_step_adds_its_own_part(name, travel, schedule):
    """The state after each ring step, and the gradients that each step adds, by themselves: a
    step's pairs are those of one shard of keys (or queries) with the rank's own."""
    from ringrt.plan import PARTITIONS
    from ringrt.plan.partition import positions, shard

    q, k, v, dout = example(26, dtype="float64")
    out, lse = oracle.attention(q, k, v, causal=True)
    ranks, rule = 3, PARTITIONS[name]
    visited = []

    def on_rank(ring):
        runs = rule.runs(26, ranks, ring.rank)
        at = positions(runs)
        own = [shard(x, runs) for x in (q, k, v)]
        spy = _Spy(ring)
        ring.attention(*own, causal=True)
        keys_so_far = []
        for owner, (got_out, got_lse) in spy.forward:
            keys_so_far += positions(rule.runs(26, ranks, owner)).tolist()
            seen = np.tril(np.ones((26, 26), dtype=bool))
            seen[:, [j for j in range(26) if j not in keys_so_far]] = False
            want_out, want_lse = oracle.attention(q, k, v, seen)
            assert_close((got_out, got_lse), (want_out[:, at], want_lse[:, :, at]), "float64")
        own_out, own_lse = shard(out, runs), shard(lse, runs, axis=2)
        ring.attention_backward(shard(dout, runs), *own, own_out, own_lse, causal=True)
        for owner, (dq, dk, dv, held) in spy.backward:
            there = positions(rule.runs(26, ranks, owner))
            rows, keys = (at, there[held]) if travel == "kv" else (there[held], at)
            # p and delta are those of whole rows; only the sums are over this step's pairs.
            want = _part(dout, q, k, v, out, lse, rows, keys)
            assert_gradients((dq, dk, dv), want, "float64")
            visited.append((ring.rank, owner))

    ringrt.run_threads(
        on_rank, ranks, partition=name, schedule=schedule, backend="reference", timeout=TIMEOUT,
        travel=travel,
    )  # fmt: skip
    assert len(visited) >= ranks * (ranks + 1) // 2


def _part(dout, q, k, v, out, lse, rows, keys):
    """Gradients of the causal pairs of some rows and keys alone, with p and delta of whole rows:
    dq [B, rows, ...], dk and dv [B, keys, ...]."""
    dq = np.zeros((1, len(rows), *q.shape[2:]))
    dk, dv = np.zeros((1, len(keys), *k.shape[2:])), np.zeros((1, len(keys), *v.shape[2:]))
    scale, group = q.shape[3] ** -0.5, q.shape[2] // k.shape[2]
    for a, i in enumerate(rows):
        for h in range(q.shape[2]):
            delta = dout[0, i, h] @ out[0, i, h]
            for b, j in enumerate(keys):
                if j <= i:
                    g = h // group
                    p = np.exp(scale * (q[0, i, h] @ k[0, j, g]) - lse[0, h, i])
                    ds = p * (dout[0, i, h] @ v[0, j, g] - delta) * scale
                    dq[0, a, h] += ds * k[0, j, g]
                    dk[0, b, g] += ds * q[0, i, h]
                    dv[0, b, g] += p * dout[0, i, h]
    return dq, dk, dv


class _Spy:
    """Looks over the shoulder of a rank's backend: after each step, what it would finish with
    (forward), and what the step added (backward)."""

    def __init__(self, ring):
        from ringrt_backends.reference import ReferenceBackend

        self.forward, self.backward = [], []
        spy, self.steps = self, None

        class Backend(ReferenceBackend):
            def accumulate(self, state, k, v, tiles, stream=None):
                super().accumulate(state, k, v, tiles)
                spy.forward.append((spy.owner(ring), super().finish(state)))

            def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
                before = super().finish_backward(grads), dk.copy(), dv.copy()
                super().accumulate_backward(grads, k, v, dk, dv, tiles)
                after = super().finish_backward(grads), dk, dv
                added = [new - old for new, old in zip(after, before, strict=True)]
                spy.backward.append((spy.owner(ring), (*added, spy.held())))

        ring._caller._backends["reference", HOST] = Backend()
        ring.on_step = lambda step: None

    def owner(self, ring):
        """Whose shard the next computing step is on."""
        [prepared] = [list(ring._caller._kept.values())[-1]]
        if self.steps is None or self.steps[0] is not prepared:
            self.steps = (prepared, iter([s for s in prepared.steps if len(s.tiles)]))
        self.step = next(self.steps[1])
        return self.step.shard

    def held(self):
        return [i for a, b in self.step.rows.ranges.tolist() for i in range(a, b)]


# The oracle itself.


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"softcap": 1.5, "causal": True}, {"sink": np.array([0.3, -1.0])}],
)
def test_the_oracle_s_gradients_are_those_of_finite_differences(options):
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal((1, 5, heads, 3)) for heads in (2, 1, 1)]
    dout = rng.standard_normal((1, 5, 2, 3))
    sink = options.get("sink")

    def loss():
        return (oracle.attention(*arrays, **options)[0] * dout).sum()

    gradients = oracle.gradients(dout, *arrays, **options)
    for x, gradient in zip(
        [*arrays, *([sink] if sink is not None else [])], gradients, strict=True
    ):
        for index in np.ndindex(x.shape):
            kept, step = x[index], 1e-6
            x[index] = kept + step
            above = loss()
            x[index] = kept - step
            below = loss()
            x[index] = kept
            assert gradient[index] == pytest.approx((above - below) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("mask", MASKS)
def test_pytorch_agrees_with_the_oracle_and_the_ring(mask):
    """Autograd through plain softmax in float64, where PyTorch can say the mask densely and
    every row sees something."""
    import torch

    arrays = example(dtype="float64")
    seen = visible(45, 45, **MASKS[mask])
    rows = seen.any(axis=1)
    q, k, v = (torch.tensor(x, requires_grad=True) for x in arrays[:3])
    heads = [x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v)]
    scores = q.transpose(1, 2) @ heads[0].transpose(2, 3) / 8**0.5
    scores = scores.masked_fill(~torch.tensor(seen), float("-inf"))
    out = torch.softmax(scores[:, :, rows], dim=-1) @ heads[1]
    out.backward(torch.tensor(arrays[3][:, rows]).transpose(1, 2))
    wanted = [x.grad.numpy() for x in (q, k, v)]
    dout = arrays[3] * rows[None, :, None, None]
    assert_gradients(oracle.gradients(dout, *arrays[:3], seen), wanted, "float64")
    _, gradients = both_passes(*arrays[:3], dout, 3, **MASKS[mask])
    assert_gradients(gradients, wanted, "float64")
