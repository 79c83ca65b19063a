"""ringrt: exact attention over sequences too long for one device.

The names below are loaded when first used, so that `import ringrt` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringrt.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    ExchangeTimeout,
    HandoffError,
    KernelError,
    PeerLost,
    PlanError,
    RankMismatch,
    RingrtError,
    TransportError,
    TransportUnavailable,
    Unsupported,
)
from ringrt.version import __version__

if TYPE_CHECKING:
    from ringrt.launch import attention, attention_backward, run_threads
    from ringrt.plan import Mask, Piece
    from ringrt.ring import Ring

__all__ = [
    "BackendError",
    "BackendUnavailable",
    "ConfigError",
    "ExchangeTimeout",
    "HandoffError",
    "KernelError",
    "Mask",
    "PeerLost",
    "Piece",
    "PlanError",
    "RankMismatch",
    "Ring",
    "RingrtError",
    "TransportError",
    "TransportUnavailable",
    "Unsupported",
    "__version__",
    "attention",
    "attention_backward",
    "run_threads",
]

_HOMES = {
    "Mask": "ringrt.plan",
    "Piece": "ringrt.plan",
    "Ring": "ringrt.ring",
    "attention": "ringrt.launch",
    "attention_backward": "ringrt.launch",
    "run_threads": "ringrt.launch",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ringrt' has no attribute {name!r}")
