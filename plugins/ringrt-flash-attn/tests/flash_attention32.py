"""What a block of attention is to the stand-ins: as FlashAttention's kernels compute it, in
float32, with the weights rounded to the inputs' dtype before they are multiplied."""

from __future__ import annotations

import torch


def bottom_right(rows: int, keys: int, left: int | None, right: int | None) -> torch.Tensor:
    """bool `[rows, keys]`: row i sees keys p - left .. p + right, p = i + keys - rows."""
    place = torch.arange(rows)[:, None] + keys - rows
    key = torch.arange(keys)[None, :]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None:
        seen &= key >= place - left
    if right is not None:
        seen &= key <= place + right
    return seen


def forward(q, k, v, scale, softcap, seen):
    """The sum of weighted values `[batch, rows, heads, dim]`, and by row the greatest score and
    the sum of weights `[batch, heads, rows]`. NaN is no greatest score, as by fmaxf."""
    scores, _ = _scores(q, k, scale, softcap)
    scores = torch.where(seen, scores, -torch.inf)
    top = torch.where(scores.isnan(), -torch.inf, scores).amax(-1)
    weights = torch.exp(scores - torch.where(top == -torch.inf, 0, top)[..., None])
    rounded = weights.to(q.dtype).float()
    return torch.einsum("bhij,bjhd->bihd", rounded, _per_head(v, q)), top, weights.sum(-1)


def backward(dout, q, k, v, out, lse, scale, softcap, seen):
    """dq, and dk and dv of every query head, float32. An lse of -inf counts as 0."""
    scores, slope = _scores(q, k, scale, softcap)
    scores = torch.where(seen, scores, -torch.inf)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0, lse)[..., None])
    wide, key, value = dout.float(), _per_head(k, q), _per_head(v, q)
    delta = (wide * out.float()).sum(-1).transpose(1, 2)
    slopes = weights * (torch.einsum("bihd,bjhd->bhij", wide, value) - delta[..., None]) * slope
    slopes, weights = (x.to(q.dtype).float() for x in (slopes, weights))
    dq = scale * torch.einsum("bhij,bjhd->bihd", slopes, key)
    dk = scale * torch.einsum("bhij,bihd->bjhd", slopes, q.float())
    return dq, dk, torch.einsum("bhij,bihd->bjhd", weights, wide)


def _scores(q, k, scale, softcap):
    """Scores `[batch, heads, rows, keys]`, and the slope that a softcap gives them."""
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), _per_head(k, q)) * scale
    if not softcap:
        return scores, 1.0
    bent = torch.tanh(scores / softcap)
    return softcap * bent, 1 - bent**2


def _per_head(x, q):
    """K or V for each of q's heads, float32."""
    return x.float().repeat_interleave(q.shape[2] // x.shape[2], dim=2)
