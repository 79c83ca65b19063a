"""Ring attention in PyTorch: with gradients, under `torch.compile`, beside checkpointing.

`Ring.attention` takes tensors too, and is enough where no gradient is wanted. This package imports
PyTorch; nothing else of ringrt imports this package.
"""

from __future__ import annotations

from ringrt.torch.attention import ring_attention
from ringrt.torch.checkpoint import checkpoint_contexts, checkpoint_policy

__all__ = ["checkpoint_contexts", "checkpoint_policy", "ring_attention"]
