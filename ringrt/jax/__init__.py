"""Ring attention in JAX: with gradients, outside `jax.jit` and inside of it.

`Ring.attention` takes JAX arrays too, and is enough where no gradient is wanted and nothing is
traced. This package imports JAX; nothing else of ringrt imports this package.
"""

from __future__ import annotations

from ringrt.jax.attention import original_errors, ring_attention

__all__ = ["original_errors", "ring_attention"]
