"""A ring as one would write it by hand: PyTorch's flash kernel for the CPU on every block, the
blocks merged by the online softmax, and K,V on their way by gloo while the present block is
computed. It is the peer that our own ring is held to, so it is made as good as it gets.

Causal sequences are cut in zigzag: rank r holds chunks r and 2p−1−r of 2p. So at every step but
the first half a block is to be computed, all of it visible: all queries see the early half of the
keys of a shard that comes before their own, and the late half of the queries all keys of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_ALL = slice(None)
#: Tags of what is under way at the same time.
_KV, _GRADIENTS = 1, 2


def chunks(length: int, size: int, rank: int, causal: bool) -> list[slice]:
    """The positions of a rank. `length` is a multiple of the size, or if causal of twice that."""
    if not causal:
        rows = length // size
        return [slice(rank * rows, (rank + 1) * rows)]
    rows = length // (2 * size)
    both = (rank, 2 * size - 1 - rank)
    return [slice(each * rows, (each + 1) * rows) for each in both]


class _Block(NamedTuple):
    """Which of the own rows and of the present keys meet in a step, and whether causally."""

    rows: slice
    keys: slice
    causal: bool


class GlooRing:
    """One rank of the default process group. Tensors are its shards, `[1, heads, rows, dim]` in
    float32, K and V stacked as one, `[2, 1, heads, rows, dim]`, so that they travel as one."""

    def __init__(self, causal: bool, kv: Any) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._causal = causal
        self._slots = [torch.empty_like(kv) for _ in range(2)]
        self._sums = [torch.empty_like(kv) for _ in range(2)]

    def forward(self, q: Any, kv: Any) -> tuple[Any, Any]:
        """out and lse `[1, heads, rows]`."""
        kernel = self._torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out: Any = None
        lse: Any = None
        for step in range(self._size):
            under_way, arriving = self._pass_on(step, kv)
            rows, keys, causal = self._block(step, q.shape[2])
            part = kernel(q[:, :, rows], *kv[:, :, :, keys], 0.0, causal)
            if out is None:
                out, lse = part
            else:
                self._merge(out[:, :, rows], lse[:, :, rows], *part)
            self._wait(under_way)
            kv = arriving
        return out, lse

    def backward(self, dout: Any, q: Any, kv: Any, out: Any, lse: Any) -> tuple[Any, Any]:
        """dq, and dk and dv stacked as kv. Sums of the own shard stay at home; those of others
        travel with it, one step behind, and so come home at the end."""
        dq: Any = None
        home: Any = None
        coming: list[Any] = []
        sums = self._sums[0]
        for step in range(self._size):
            under_way, arriving = self._pass_on(step, kv)
            block = self._block(step, q.shape[2])
            parts = self._gradients(block, dout, q, kv, out, lse)
            if dq is None:
                dq, home = parts[0], self._torch.stack(list(parts[1:]))
            else:
                dq[:, :, block.rows] += parts[0]
                self._wait(coming)
                self._add(sums, parts[1:], block.keys, begins=step == 1)
                after = self._sums[step % 2]
                coming = self._exchange(sums, after, _GRADIENTS)
                sums = after
            self._wait(under_way)
            kv = arriving
        self._wait(coming)
        return dq, home if self._size == 1 else home.add_(sums)

    def _gradients(
        self, block: _Block, dout: Any, q: Any, kv: Any, out: Any, lse: Any
    ) -> Sequence[Any]:
        kernel = self._torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        rows, keys, causal = block
        own = [x[:, :, rows] for x in (dout, q, out, lse)]
        pair = kv[:, :, :, keys]
        found: Sequence[Any] = kernel(own[0], own[1], *pair, own[2], own[3], 0.0, causal)
        return found

    def _block(self, step: int, rows: int) -> _Block:
        source = (self._rank - step) % self._size
        if not self._causal:
            return _Block(_ALL, _ALL, False)
        if step == 0:
            return _Block(_ALL, _ALL, True)
        if source < self._rank:
            return _Block(_ALL, slice(0, rows // 2), False)
        return _Block(slice(rows // 2, rows), _ALL, False)

    def _merge(self, out: Any, lse: Any, part: Any, part_lse: Any) -> None:
        """out += w (part − out), where w = e^part_lse / (e^lse + e^part_lse)."""
        weight = self._torch.sigmoid(part_lse - lse)
        out.lerp_(part, weight[..., None])
        lse.copy_(self._torch.logaddexp(lse, part_lse))

    def _add(self, sums: Any, parts: Sequence[Any], keys: slice, begins: bool) -> None:
        """Add dk and dv of some keys to the sums, which begin at 0."""
        if begins:
            sums.zero_()
        for total, part in zip(sums, parts, strict=True):
            total[:, :, keys] += part

    def _pass_on(self, step: int, kv: Any) -> tuple[list[Any], Any]:
        """Send the present shard on, but after the last step; what comes in its place."""
        if step == self._size - 1:
            return [], kv
        arriving = self._slots[step % 2]
        return self._exchange(kv, arriving, _KV), arriving

    def _exchange(self, leaving: Any, arriving: Any, tag: int) -> list[Any]:
        dist = self._dist
        after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        operations = [
            dist.P2POp(dist.isend, leaving, after, tag=tag),
            dist.P2POp(dist.irecv, arriving, before, tag=tag),
        ]
        requests: list[Any] = dist.batch_isend_irecv(operations)
        return requests

    def _wait(self, requests: list[Any]) -> None:
        for request in requests:
            request.wait()
