"""One training step of a small transformer: sequences over a ring of ranks, the batch over rings.

    torchrun --nproc-per-node 4 examples/torch_train_step.py     # two rings of two ranks
    python examples/torch_train_step.py                          # one rank

Every rank holds all weights, some sequences of the batch (its ring's) and some tokens of each (its
shard). The step is done once more on one rank, with plain PyTorch and the whole batch; loss, every
gradient and the weights after the step must be the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, rms_norm, silu
from torch.utils.checkpoint import checkpoint

import ringrt
from ringrt.torch import checkpoint_contexts, ring_attention

LAYERS, WIDTH, Q_HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 32, 4, 2, 8, 50
BATCH, LENGTH = 4, 61

#: out of q, k, v and sinks.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into_qkv = nn.Linear(WIDTH, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out_of_heads = nn.Linear(Q_HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.sink = nn.Parameter(torch.randn(Q_HEADS))

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        heads = self.into_qkv(rms_norm(x, (WIDTH,))).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=2)
        out = attend(rotary(q, positions), rotary(k, positions), v, self.sink)
        x = x + self.out_of_heads(out.flatten(2))
        return x + self.down(silu(self.up(rms_norm(x, (WIDTH,)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.unembed = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def loss(self, tokens: Tensor, targets: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The part of these tokens in the mean over the whole batch."""
        x = self.embed(tokens)
        for layer in self.layers:
            # In backward a layer is computed again, but for attention, whose result is kept.
            x = checkpoint(
                layer, x, positions, attend, use_reentrant=False, context_fn=checkpoint_contexts
            )
        logits = self.unembed(rms_norm(x, (WIDTH,)))
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / (BATCH * LENGTH)


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Pairs of x `[batch, rows, heads, head_dim]` turned by angles that grow with the position."""
    rates = 100.0 ** -torch.linspace(0, 1, HEAD_DIM // 2, dtype=x.dtype)
    turn = torch.polar(torch.ones((), dtype=x.dtype), positions[..., None, None] * rates)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Causal softmax attention of whole sequences; the sink is one more score, without a value."""
    k, v = (x.repeat_interleave(Q_HEADS // KV_HEADS, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / HEAD_DIM**0.5
    future = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    sinks = sink[None, :, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores.masked_fill(future, -torch.inf), sinks], dim=3)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=3)[..., :-1], v)


def sum_gradients(model: Model, ring: ringrt.Ring, across_rings: dist.ProcessGroup) -> None:
    """A rank's gradients of weights come from its own tokens: the whole is their sum over all
    ranks. Those of sinks are summed over the ring already, and so only over the rings."""
    for name, weight in model.named_parameters():
        everywhere = not name.endswith("sink")
        dist.all_reduce(weight.grad, group=None if everywhere else across_rings)


def ring_step(model: Model, batch: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """This rank's part of a training step; the loss of the whole batch."""
    ranks = 2 if dist.get_world_size() % 2 == 0 else 1
    shape = (dist.get_world_size() // ranks, ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "ring"))
    mine = batch.chunk(shape[0])[mesh["data"].get_local_rank()]
    group = mesh["ring"].get_group()
    with ringrt.Ring.from_process_group(group, partition="zigzag") as ring:
        # Which tokens a rank holds is the partition's affair: whatever belongs to a token, its
        # target and its position too, is cut like the tokens.
        tokens, targets = ring.shard(mine[:, :-1]), ring.shard(mine[:, 1:])
        positions = ring.shard(torch.arange(LENGTH)[None])
        where = f"ring {mesh['data'].get_local_rank()}, rank {ring.rank}"
        print(f"{where}: {tokens.shape[1]} of {LENGTH} tokens of {len(mine)} sequences\n", end="")
        attend = partial(_on_ring, ring)
        loss = model.loss(tokens, targets, positions, attend)
        loss.backward()
        sum_gradients(model, ring, mesh["data"].get_group())
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
    return total.item()


def _on_ring(ring: ringrt.Ring, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return ring_attention(q, k, v, ring=ring, causal=True, sink=sink)


def plain_step(model: Model, batch: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """The same on one rank."""
    loss = model.loss(batch[:, :-1], batch[:, 1:], torch.arange(LENGTH)[None], plain_attention)
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_default_dtype(torch.float64)
    results = []
    for step in (ring_step, plain_step):
        torch.manual_seed(0)  # the same weights and tokens on every rank
        model, batch = Model(), torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        loss = step(model, batch, torch.optim.AdamW(model.parameters(), lr=0.01))
        results.append((loss, model))
    (loss, model), (wanted_loss, wanted) = results
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-12, atol=0)
    for name, weight in model.named_parameters():
        other = wanted.get_parameter(name)
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)
        torch.testing.assert_close(weight, other, rtol=1e-9, atol=1e-9, msg=name)
    if dist.get_rank() == 0:
        count = sum(1 for _ in model.parameters())
        print(f"loss {loss:.12f} on {dist.get_world_size()} ranks, {wanted_loss:.12f} on one")
        print(f"the gradients of all {count} weights are those of one rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
