"""Known failures of systems like ours that are one call with one right answer. Each runs on
every path: thread ranks (tests/test_cases.py) and MPI (tests/mpi_programs/cases.py), every
partition and every backend. Ids are those of the project's list of such failures."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """Ranks it needs, shapes as for `support.random_qkv`, options of the call."""

    id: str
    ranks: int
    shapes: dict
    options: dict


CASES = [
    Case("L1-uneven", 4, {"length": 2999, "head_dim": 4}, {"causal": True}),
    Case("L2-a-naive-split-gives-3-shards", 4, {"length": 5}, {"causal": True}),
    Case("L2-empty-shards", 8, {"length": 3}, {"causal": True}),
    Case("L2-nothing", 3, {"length": 0}, {"causal": True}),
    Case("L3-tiny", 2, {"length": 4, "q_heads": 1, "head_dim": 4}, {"causal": True}),
    *(Case(f"L6-odd-ring-{p}", p, {"length": 50}, {"causal": True}) for p in (1, 3, 5, 7)),
    Case("L9-not-causal", 4, {"length": 50}, {"causal": False}),
    Case("M4-grouped-heads", 2, {"length": 20, "q_heads": 4, "kv_heads": 2}, {}),
    Case(
        "M6-value-dim",
        2,
        {"length": 24, "q_heads": 8, "kv_heads": 2, "head_dim": 192, "value_dim": 128},
        {"causal": True},
    ),
    Case("M7-softcap", 3, {"length": 50}, {"causal": True, "softcap": 1.5}),
    *(
        Case(f"M8-sharded-by-sequence-{n}", 2, {"length": n, "q_heads": 2, "head_dim": 4}, {})
        for n in (512, 1024, 2048)
    ),
]
