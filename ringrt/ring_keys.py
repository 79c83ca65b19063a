"""Rings by number, for where a `Ring` cannot go and a number can: into the graph of a compiler."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from ringrt.errors import TransportError

# PyTorch's compiler makes a program of its own for each of 0 and 1, and one for all else.
_numbers = itertools.count(2)
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def key_of(ring: Any) -> int:
    """A number for a new ring, by which it is found as long as somebody holds it."""
    key = next(_numbers)
    _alive[key] = ring
    return key


def ring_of(key: int) -> Any:
    """The ring of that number. Raises `TransportError` if it is gone."""
    ring = _alive.get(key)
    if ring is None:
        raise TransportError(f"ring {key} of this process is gone; hold it as long as it is used")
    return ring
