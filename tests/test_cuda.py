"""The CUDA path without a GPU: the backend `cupy` and the transport `nccl` on thread ranks of the
simulator, forward and backward, against the oracle. What the simulator finds wrong in kernels
or in the order of what is queued is an error too."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_support import (
    PATH,
    assert_right,
    both_passes,
    check,
    example,
    gpu,
    simulator,  # noqa: F401
)

import ringrt
from ringrt import Mask, Piece
from support import PARTITIONS

pytestmark = pytest.mark.timeout(300)

MASKS = {
    "full": {},
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


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("ranks", range(1, 6))
def test_every_ring(partition, ranks):
    """Schedules, travels and dtypes in turn."""
    turn = 3 * ranks + PARTITIONS.index(partition)
    dtype, schedule = ("float16", "float32")[turn % 2], ("ring", "direct")[turn // 2 % 2]
    arrays = example(61, dtype=dtype, q_heads=4, kv_heads=2)
    how = {"partition": partition, "schedule": schedule, "travel": ("kv", "q")[turn // 4 % 2]}
    check(arrays, ranks, {"causal": True}, **how)


@pytest.mark.parametrize("schedule", ["ring", "direct"])
@pytest.mark.parametrize("travel", ["kv", "q"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_every_way_of_travelling(schedule, travel, dtype):
    masking = {"causal": True, "window": (20, 0)}
    check(example(43, dtype=dtype), 4, masking, schedule=schedule, travel=travel)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_every_mask(mask, dtype):
    turn = list(MASKS).index(mask) + (dtype == "float64")
    how = {"partition": PARTITIONS[turn % 3], "schedule": ("ring", "direct")[turn % 2]}
    check(example(dtype=dtype), 3, MASKS[mask], travel=("q", "kv")[turn // 2 % 2], **how)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_own_mask(dtype):
    mask = Mask([Piece(0, 20, 0, 10, None, 4), Piece(0, 20, 10, 45, -30, -2), Piece(30, 45, 5, 45)])
    seen = np.zeros((45, 45), dtype=bool)
    for i in range(45):
        for j in range(45):
            seen[i, j] = (
                (i < 20 and j < 10 and i - j <= 4)
                or (i < 20 and j >= 10 and -30 <= i - j <= -2)
                or (i >= 30 and j >= 5)
            )
    check(example(dtype=dtype), 2, {"mask": mask}, seen=seen, partition="zigzag")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim"),
    [
        ("float16", 64, 64),
        ("bfloat16", 80, 128),
        ("bfloat16", 128, 67),
        ("float16", 192, 128),
        ("bfloat16", 256, 256),
        ("float32", 80, 64),
        ("float32", 192, 256),
        ("float64", 128, 80),
    ],
)
def test_dims(dtype, head_dim, value_dim):
    """Dims that fill their tile and dims that do not, on blocks with few and with many sums."""
    length = 75 if dtype.endswith("16") else 33
    arrays = example(length, dtype=dtype, head_dim=head_dim, value_dim=value_dim)
    check(arrays, 2, {"causal": True})


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_shards_of_many_tiles(dtype):
    """Several blocks of rows a shard, and several tiles of keys a block."""
    arrays = example(331, dtype=dtype, q_heads=1, head_dim=16)
    check(arrays, 2, {"causal": True, "window": (150, 0)}, partition="contiguous", travel="kv")


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("heads", [(6, 2), (3, 1)])
def test_heads_and_batches(heads, dtype):
    q_heads, kv_heads = heads
    arrays = example(29, dtype=dtype, batch=2, q_heads=q_heads, kv_heads=kv_heads, value_dim=5)
    check(arrays, 3, {"causal": True}, travel=("kv", "q")[kv_heads - 1])


@pytest.mark.parametrize(
    ("lengths", "ranks"), [((3, 3), 5), ((0, 0), 2), ((11, 70), 3), ((70, 11), 3), ((1, 41), 3)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lengths(lengths, ranks, dtype):
    """Shards without rows, and more keys or more queries."""
    check(example(*lengths, dtype=dtype), ranks, {"causal": True})


SINK = np.array([0.5, -np.inf])
SCORES = {
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.7},
    "scale 0": {"scale": 0.0},
    "sink": {"sink": SINK},
    "all": {"softcap": 2.0, "scale": 0.9, "sink": np.array([3.0, -1.0])},
}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scores(scores, dtype):
    """The documents leave rows that see nothing."""
    masking = {"causal": True, "documents": [5, 30]}
    check(example(dtype=dtype), 3, masking, SCORES[scores])


def test_scores_far_apart():
    """Maxima that grow, and that shrink, from tile to tile and from step to step."""
    q, k, v, dout = example(150, dtype="float16", q_heads=1)
    for order in (1, -1):
        loud = (k * np.linspace(0.01, 12, 150)[::order, None, None]).astype(k.dtype)
        check((q, loud, v, dout), 2, partition="contiguous", scores={"softcap": 60.0, "scale": 0.4})


def test_two_runs_and_any_order_of_threads_give_the_same_bits():
    from ringrt import cudasim

    for dtype, travel in (("bfloat16", "kv"), ("float32", "q")):
        arrays = example(40, dtype=dtype)
        runs = []
        for seed in (0, 0, 12345):
            cudasim.set_seed(seed)
            result, gradients = both_passes(*arrays, 3, travel=travel, causal=True)
            runs.append((*result, *gradients))
        for other in runs[1:]:
            for a, b in zip(runs[0], other, strict=True):
                np.testing.assert_array_equal(a, b)


DTYPES = ("float16", "bfloat16", "float32")


def dirty(arrays, rows, *names):
    """Copies in which these rows hold NaN, or in every other of them inf."""
    copies = [x.copy() for x in arrays]
    for x, name in zip(copies, ("q", "k", "v", "dout"), strict=True):
        if name in names:
            x[:, rows], x[:, rows][:, ::2] = np.nan, np.inf
    return copies


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_reaches_nobody(dtype):
    """NaN and inf outside every document, in all that goes in."""
    arrays, documents = example(60, dtype=dtype), [[0, 17], [20, 41]]
    masking = {"causal": True, "documents": documents}
    padded = dirty(arrays, slice(17, 20), "q", "k", "v", "dout")
    padded = dirty(padded, slice(41, 60), "q", "k", "v", "dout")
    partition = PARTITIONS[DTYPES.index(dtype)]
    for scores, travel in (({}, "kv"), ({"sink": SINK}, "q")):
        check(padded, 2, masking, scores, clean=arrays, partition=partition, travel=travel)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edge", [128, 20])
@pytest.mark.parametrize("names", [("q", "dout"), ("k", "v")])
def test_another_document_reaches_nobody(dtype, edge, names):
    """Whether two documents have rows in one block, or each its own."""
    arrays = example(edge + 25, dtype=dtype, q_heads=1)
    masking = {"causal": True, "documents": [0, edge, edge + 25]}
    bad = dirty(arrays, slice(edge, None), *names)
    (out, lse), gradients = both_passes(*bad, 1, **masking)
    first = (out[:, :edge], lse[:, :, :edge]), [x[:, :edge] for x in gradients]
    assert_right(*first, [x[:, :edge] for x in arrays], {"causal": True})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("travel", ["kv", "q"])
def test_what_a_row_does_not_see_of_a_tile_does_not_reach_it(dtype, travel):
    """In fp32 and fp64; so also where the pairs that it sees lie beside the others."""
    arrays = example(70, dtype=dtype)
    bad = dirty(arrays, slice(40, None), "q", "k", "v", "dout")
    mask = Mask([Piece(0, 40, 0, 40, 0), Piece(40, 70, 40, 70, 0)])
    how = {"partition": "striped", "travel": travel, "mask": mask}
    (out, lse), gradients = both_passes(*bad, 2, **how)
    first = (out[:, :40], lse[:, :, :40]), [x[:, :40] for x in gradients]
    assert_right(*first, [x[:, :40] for x in arrays], {"causal": True})
    assert np.isnan(gradients[0][:, 41:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_a_row_does_not_see_of_a_tile_do_not_reach_its_result(dtype):
    """Keys in every dtype. Values of a tile are multiplied by a weight of 0 in 16 bits, which
    leaves NaN and inf; in fp32 and fp64 they are left out."""
    arrays = example(70, dtype=dtype)
    bad = dirty(arrays, slice(40, None), *("kv" if dtype == "float32" else "k"))
    out, lse = ringrt.attention(*bad[:3], ranks=2, causal=True, **PATH)
    clean = [x[:, :40] for x in arrays]
    assert_right((out[:, :40], lse[:, :, :40]), (), clean, {"causal": True})
    assert np.isnan(out[:, 40:]).all()
    assert np.isnan(lse[:, :, 40:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinite_scores(dtype):
    """A visible value of NaN reaches its element alone; +inf as a score is NaN, -inf is nothing,
    and a row of nothing else is empty."""
    q, k, v, dout = example(40, dtype=dtype, q_heads=1, kv_heads=1)
    one = v.copy()
    one[0, 7, 0, 3] = np.nan
    out, lse = ringrt.attention(q, k, one, ranks=2, **PATH)
    assert np.isnan(out[..., 3]).all()
    assert np.isfinite(np.delete(out, 3, axis=3)).all()
    assert np.isfinite(lse).all()
    q, loud = abs(q), k.copy()
    loud[0, 3] = np.inf
    out, lse = ringrt.attention(q, loud, v, ranks=2, causal=True, **PATH)
    assert np.isnan(out[0, 3:]).all()
    assert np.isnan(lse[:, :, 3:]).all()
    assert np.isfinite(out[0, :3]).all()
    loud[0, 0], loud[0, 3] = -np.inf, -np.inf
    check((q, k, v, dout), 2, {"causal": True})
    result = ringrt.attention(q, loud, v, ranks=2, causal=True, **PATH)
    assert not result[0][:, 0].any()
    assert result[1][0, 0, 0] == -np.inf
    assert_right(result, (), (q, loud, v, dout), {"causal": True})


def transposed(x):
    """The elements of a row do not lie side by side."""
    return gpu(np.ascontiguousarray(x.transpose(3, 0, 2, 1))).transpose(1, 3, 2, 0)


def heads_first(x):
    return gpu(np.ascontiguousarray(x.transpose(0, 2, 1, 3))).transpose(0, 2, 1, 3)


def sliced(x):
    """From an odd element on, so that nothing begins at a multiple of 16 bytes."""
    return gpu(np.pad(x, ((0, 0), (3, 2), (1, 1), (1, 6))))[:, 3:-2, 1:-1, 1:-6]


def every_other(x):
    return gpu(np.repeat(x, 2, axis=1))[:, ::2]


@pytest.mark.parametrize("layout", [transposed, heads_first, sliced, every_other])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_inputs_of_any_layout(layout, dtype, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    arrays = example(45, dtype=dtype, batch=2, q_heads=2, kv_heads=2, head_dim=16)
    for ranks, partition in ((1, "striped"), (2, PARTITIONS[len(layout.__name__) % 3])):
        there = [layout(x) for x in arrays]
        assert not any(x.flags.c_contiguous for x in there)
        result, gradients = both_passes(*there, ranks, partition=partition, causal=True)
        host = [tuple(x.get() for x in each) for each in (result, gradients)]
        assert_right(*host, arrays, {"causal": True})


def test_inputs_of_stride_0(monkeypatch):
    """k and v the same for all heads and batches, q for all rows."""
    from ringrt.cudasim import api as cp

    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    arrays = example(33, dtype="float16", batch=2, q_heads=4, kv_heads=2)
    q, k, v, dout = arrays[0][:, :1], *(x[:1, :, :1] for x in arrays[1:3]), arrays[3]
    whole = [np.broadcast_to(x, y.shape) for x, y in zip((q, k, v, dout), arrays, strict=True)]
    bases = [gpu(x) for x in (q, k, v, dout)]
    there = [
        cp.ndarray(x.shape, x.dtype, base.data, tuple(
            0 if n == 1 else s for n, s in zip(base.shape, base.strides, strict=True)))
        for x, base in zip(whole, bases, strict=True)
    ]  # fmt: skip
    for ranks in (1, 2):
        result, gradients = both_passes(*there, ranks, causal=True)
        host = [tuple(x.get() for x in each) for each in (result, gradients)]
        assert_right(*host, whole, {"causal": True})
