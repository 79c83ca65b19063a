"""Known failures of systems like ours that are one call with one right answer. Each runs on
every path, forward and backward: thread ranks (tests/test_cases.py) and MPI
(tests/mpi_programs/cases.py), every partition, backend and schedule. Ids are those of the
project's list of such failures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from masks import visible

import oracle
from support import assert_close, random_qkv


class Case(NamedTuple):
    """Ranks it needs, shapes as for `support.random_qkv`, masking and other options."""

    id: str
    ranks: int
    shapes: dict
    masking: dict
    scores: dict = {}  # noqa: RUF012


CAUSAL = {"causal": True}
CASES = [
    Case("L2-a-naive-split-gives-3-shards", 4, {"length": 5}, CAUSAL),
    Case("L2-empty-shards", 8, {"length": 3}, CAUSAL),
    Case("L2-nothing", 3, {"length": 0}, CAUSAL),
    Case("L3-tiny", 2, {"length": 4, "q_heads": 1, "head_dim": 4}, CAUSAL),
    Case("L4-padding-in-the-buffer", 2, {"length": 10, "q_heads": 1}, {"documents": [0, 4, 7]}),
    Case("L5-one-padded-document", 4, {"length": 88}, {"causal": True, "documents": [0, 82]}),
    *(Case(f"L6-odd-ring-{p}", p, {"length": 50}, CAUSAL) for p in (1, 3, 5, 7)),
    Case("L8-more-keys", 3, {"length": 11, "kv_length": 30}, CAUSAL),
    Case("L8-more-queries", 3, {"length": 30, "kv_length": 11}, CAUSAL),
    Case("L9-not-causal", 4, {"length": 50}, {}),
    *(Case(f"M1-window-{w}", 4, {"length": 16}, {"window": w}) for w in ((3, 0), (3, -1))),
    Case("M4-grouped-heads", 2, {"length": 20, "q_heads": 4, "kv_heads": 2}, {}),
    Case(
        "M6-value-dim",
        2,
        {"length": 24, "q_heads": 8, "kv_heads": 2, "head_dim": 192, "value_dim": 128},
        CAUSAL,
    ),
    Case("M7-softcap", 3, {"length": 50}, CAUSAL, {"softcap": 1.5}),
    Case("N6-float16", 3, {"length": 50, "dtype": "float16"}, CAUSAL),
    Case("C6-one-query-many-keys", 3, {"length": 1, "kv_length": 41}, CAUSAL),
    Case("C6-fewer-queries-than-ranks", 4, {"length": 2, "kv_length": 39}, CAUSAL),
]


def dout_of(case):
    """The gradient of out, standard normal."""
    shapes = case.shapes | {"seed": 77}
    if case.shapes.get("value_dim"):
        shapes["head_dim"] = case.shapes["value_dim"]
    return random_qkv(**shapes)[0]


def expected(case):
    """By the oracle: (out, lse), (dq, dk, dv)."""
    q, k, v = random_qkv(**case.shapes)
    seen = visible(q.shape[1], k.shape[1], **case.masking)
    return (
        oracle.attention(q, k, v, seen, **case.scores),
        oracle.gradients(dout_of(case), q, k, v, seen, **case.scores),
    )


def check(ring, case, answers):
    """Both passes on one rank, against the oracle."""
    q, k, v = (ring.shard(x) for x in random_qkv(**case.shapes))
    options = case.masking | case.scores
    out, lse = ring.attention(q, k, v, **options)
    assert out.shape == (1, *q.shape[1:3], v.shape[3]), "what was sharded stays sharded"
    dtype = q.dtype.name
    assert_close((ring.unshard(out), ring.unshard(lse, axis=2)), answers[0], dtype)
    gradients = ring.attention_backward(ring.shard(dout_of(case)), q, k, v, out, lse, **options)
    for name, got, want in zip(("dq", "dk", "dv"), gradients, answers[1], strict=True):
        assert got.dtype == q.dtype
        whole = ring.unshard(got).astype(np.float64)
        bound = (2e-3 if dtype == "float16" else 3e-6) * max(1, abs(want).max(initial=0))
        np.testing.assert_allclose(whole, want, rtol=0, atol=bound, err_msg=name)
