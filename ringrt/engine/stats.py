"""What one rank did in one pass, counted as it happened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PassStats:
    """Counts and seconds of one pass on one rank.

    `peak_kv_bytes` is what the buffers of travelling tensors hold that were really made: the
    home shard, the slots, and what had to be packed to be sent. `seconds` is the pass from its
    first step to its result, of which `compute_s` was spent in the backend and `wait_s` waiting
    for peers after the compute of a step.
    """

    rank: int
    backend: str
    tokens: int = 0
    steps: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    peak_kv_bytes: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    seconds: float = 0.0
