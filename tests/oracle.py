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


def attention(q, k, v, seen=None, *, causal=False, scale=None, softcap=None, sink=None):
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq]: each row a plain softmax over what it sees, and
    over the sink of its head, whose value is 0."""
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
                extra = -np.inf if sink is None else float(sink[h])
                if np.all(scores[i, keys] == -np.inf) and extra == -np.inf:
                    continue
                row = scores[i, keys]
                top = max(row.max(initial=-np.inf), extra)
                weights = np.exp(row - top)
                total = weights.sum() + np.exp(extra - top)
                out[b, i, h] = weights @ v[b, keys, g] / total
                lse[b, h, i] = top + np.log(total)
    return out, lse


def gradients(dout, q, k, v, seen=None, *, causal=False, scale=None, softcap=None, sink=None):
    """dq, dk, dv, and dsink [Hq] if there is a sink: the chain rule through each row."""
    dout, q, k, v = (np.asarray(x).astype(np.float64) for x in (dout, q, k, v))
    batch, q_length, q_heads, head_dim = q.shape
    kv_length, kv_heads = k.shape[1:3]
    if seen is None:
        seen = visible_pairs(q_length, kv_length, causal)
    scale = head_dim**-0.5 if scale is None else scale
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dsink = np.zeros(q_heads)
    for b in range(batch):
        for h in range(q_heads):
            g = h * kv_heads // q_heads
            extra = -np.inf if sink is None else float(sink[h])
            for i in range(q_length):
                keys = np.flatnonzero(seen[i])
                raw = k[b, keys, g] @ q[b, i, h] * scale
                scores = raw if softcap is None else softcap * np.tanh(raw / softcap)
                if np.all(scores == -np.inf):
                    continue
                top = max(scores.max(), extra)
                weights = np.append(np.exp(scores - top), np.exp(extra - top))
                p = weights / weights.sum()
                # softmax: ds = p * (dp - sum of p * dp); the sink's value is 0, so its dp is 0.
                dp = np.append(v[b, keys, g] @ dout[b, i, h], 0.0)
                ds = p * (dp - p @ dp)
                dsink[h] += ds[-1]
                slope = 1.0 if softcap is None else 1 - np.tanh(raw / softcap) ** 2
                draw = ds[:-1] * slope * scale
                dq[b, i, h] += draw @ k[b, keys, g]
                dk[b, keys, g] += np.outer(draw, q[b, i, h])
                dv[b, keys, g] += np.outer(p[:-1], dout[b, i, h])
    return (dq, dk, dv) if sink is None else (dq, dk, dv, dsink)
