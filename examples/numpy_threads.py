"""Attention over shards that are cut by hand, forward and backward, with NumPy alone.

    python examples/numpy_threads.py

Four thread ranks hold a sequence of three packed documents in the zigzag way: of eight chunks, rank
r has the r-th and the r-th from the end, so that causal work is even. Each row sees its own
document, at most 100 tokens back. What the ranks return is put together by hand too, and compared
with a softmax written out in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import ringrt

RANKS, TOKENS, HEADS, KV_HEADS, DIM = 4, 640, 4, 2, 32
DOCUMENTS = [0, 150, 450, TOKENS]
OPTIONS: dict[str, Any] = {"causal": True, "window": (100, 0), "documents": DOCUMENTS}


def main() -> None:
    """Compute on four ranks, compare, and say how far apart the results are."""
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((1, TOKENS, HEADS, DIM), dtype=np.float32) for _ in range(2))
    k, v = (rng.standard_normal((1, TOKENS, KV_HEADS, DIM), dtype=np.float32) for _ in range(2))
    mine = [np.concatenate([chunk(r), chunk(2 * RANKS - 1 - r)]) for r in range(RANKS)]

    def on_rank(ring: ringrt.Ring) -> tuple[np.ndarray, ...]:
        rows = mine[ring.rank]
        shards = q[:, rows], k[:, rows], v[:, rows]
        out, lse = ring.attention(*shards, **OPTIONS)
        return out, *ring.attention_backward(dout[:, rows], *shards, out, lse, **OPTIONS)

    results = ringrt.run_threads(on_rank, ranks=RANKS, partition="zigzag")
    expected = dense(q, k, v, dout)
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        whole = np.empty_like(expected[index])
        for rows, parts in zip(mine, results, strict=True):
            whole[:, rows] = parts[index]
        error = np.abs(whole - expected[index]).max()
        print(f"{name:>3} {whole.shape}: {error:.1e} from the dense softmax in float64")
        assert error < 1e-5, name


def chunk(index: int) -> np.ndarray:
    """The positions of one of the chunks of equal length, two for each rank."""
    length = TOKENS // (2 * RANKS)
    return np.arange(index * length, (index + 1) * length)


def visible() -> np.ndarray:
    """Who sees whom, bool `[TOKENS, TOKENS]`: causal, at most 100 back, in one's document."""
    position = np.arange(TOKENS)
    back = position[:, None] - position[None, :]
    document = np.searchsorted(DOCUMENTS, position, side="right")
    return (back >= 0) & (back <= 100) & (document[:, None] == document[None, :])


def dense(q: Any, k: Any, v: Any, dout: Any) -> tuple[np.ndarray, ...]:
    """out, dq, dk and dv in float64, by the chain rule through one big softmax."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    group, scale = HEADS // KV_HEADS, DIM**-0.5
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.where(visible(), np.einsum("bihd,bjhd->bhij", q, k) * scale, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    out = np.einsum("bhij,bjhd->bihd", p, v)
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
    dq = np.einsum("bhij,bjhd->bihd", ds, k)
    dk, dv = np.einsum("bhij,bihd->bjhd", ds, q), np.einsum("bhij,bihd->bjhd", p, dout)
    # A key head serves `group` query heads: its gradient is their sum.
    dk, dv = (x.reshape(1, TOKENS, KV_HEADS, group, DIM).sum(axis=3) for x in (dk, dv))
    return out, dq, dk, dv


if __name__ == "__main__":
    main()
