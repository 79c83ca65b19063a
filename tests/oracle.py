"""Dense attention in float64, written from the definition. Shares no code with ringrt."""

from __future__ import annotations

import numpy as np


def visible_pairs(q_length: int, kv_length: int, causal: bool = False) -> np.ndarray:
    """bool [q_length, kv_length]; causal is aligned at the bottom right."""
    seen = np.ones((q_length, kv_length), dtype=bool)
    if causal:
        for i in range(q_length):
            for j in range(kv_length):
                seen[i, j] = kv_length - 1 - j >= q_length - 1 - i
    return seen


def attention(q, k, v, seen=None, *, causal=False, scale=None, softcap=None):
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq]: each row a plain softmax over what it sees."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    batch, q_length, q_heads, head_dim = q.shape
    kv_length, kv_heads, value_dim = k.shape[1], k.shape[2], v.shape[3]
    if seen is None:
        seen = visible_pairs(q_length, kv_length, causal)
    scale = head_dim**-0.5 if scale is None else scale
    out = np.zeros((batch, q_length, q_heads, value_dim))
    lse = np.full((batch, q_heads, q_length), -np.inf)
    for b in range(batch):
        for h in range(q_heads):
            g = h * kv_heads // q_heads
            scores = np.einsum("id,jd->ij", q[b, :, h], k[b, :, g]) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            for i in range(q_length):
                keys = np.flatnonzero(seen[i])
                if len(keys) == 0 or np.all(scores[i, keys] == -np.inf):
                    continue
                row = scores[i, keys]
                top = row.max()
                weights = np.exp(row - top)
                out[b, i, h] = weights @ v[b, keys, g] / weights.sum()
                lse[b, h, i] = top + np.log(weights.sum())
    return out, lse
