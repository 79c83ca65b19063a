"""Activation checkpointing that keeps what ring attention computed, and recomputes the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ringrt.torch.ops import attention

#: What says of each operator whether its results are kept.
Policy = Callable[..., CheckpointPolicy]


def checkpoint_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Results of ring attention are kept, those of other operators are not, unless a compiler
    thinks otherwise. See `torch.utils.checkpoint.create_selective_checkpoint_contexts`."""
    if op is attention._opoverload:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_contexts(
    policy: Policy | None = None,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For `torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False,
    context_fn=ringrt.torch.checkpoint_contexts)`: in backward the layer is computed again, but for
    ring attention, which would send K,V round the ring once more. What that costs is out and lse,
    `batch · rows · q_heads · (value_dim + 1)` numbers a layer.

    `policy` decides on all other operators; give it with `functools.partial`. Under
    `torch.compile` this is a must: without it PyTorch 2.13 would have to compute an ordered
    operator again in a compiled backward pass, and fails with an AssertionError."""

    def both(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        said = checkpoint_policy(ctx, op, *args, **kwargs)
        if policy is None or said is CheckpointPolicy.MUST_SAVE:
            return said
        return policy(ctx, op, *args, **kwargs)

    forward, recompute = create_selective_checkpoint_contexts(both)  # type: ignore[no-untyped-call]
    return forward, recompute
