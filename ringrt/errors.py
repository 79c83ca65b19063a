"""The exception tree. Everything ringrt raises on purpose is a `RingrtError`.

    RingrtError
    ├── ConfigError (also ValueError)   a wrong argument, option or job key
    ├── PlanError                       a plan that cannot be built
    ├── HandoffError                    an array that cannot be handed over
    ├── BackendError
    │   ├── BackendUnavailable          it cannot run on this machine
    │   ├── Unsupported                 it runs, but does not do what was asked
    │   └── KernelError                 it failed while computing
    └── TransportError
        ├── TransportUnavailable        it cannot run on this machine
        ├── RankMismatch                ranks called with different things
        ├── ExchangeTimeout             a peer did not answer within the deadline
        └── PeerLost                    a peer failed, died or left

Third-party exceptions are mapped to these once, at the edge where they come in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class RingrtError(Exception):
    """Base of every error that ringrt raises on purpose."""


class ConfigError(RingrtError, ValueError):
    """A wrong argument, option or job key: where it is, what was expected, what came."""

    def __init__(self, key: str, expected: str, got: object) -> None:
        self.key, self.expected, self.got = key, expected, got
        super().__init__(f"{key}: expected {expected}, got {got}")


class ConfigErrors(ConfigError):
    """Several `ConfigError`s of one job file, one line each."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.key, first.expected, first.got)
        self.args = ("\n".join(str(error) for error in self.errors),)


class PlanError(RingrtError):
    """A plan that cannot be built from its problem, partition and size."""


class HandoffError(RingrtError):
    """An array that cannot be handed over, and why."""


class BackendError(RingrtError):
    """Base of what goes wrong in an attention backend."""


class BackendUnavailable(BackendError):
    """The backend cannot run on this machine; the text says what would mend it."""


class Unsupported(BackendError):
    """What was asked is not implemented on this path; the text names both."""


class KernelError(BackendError):
    """A backend failed while computing; the text names rank and ring step."""


class TransportError(RingrtError):
    """Base of what goes wrong between ranks."""


class TransportUnavailable(TransportError):
    """The transport cannot run on this machine; the text says what would mend it."""


class RankMismatch(TransportError):
    """Ranks that should agree do not: the field, and the value of every rank."""

    def __init__(self, field: str, values: Mapping[int, object]) -> None:
        self.field, self.values = field, dict(values)
        super().__init__(f"ranks disagree on {field}: {_group_by_value(self.values)}")


class ExchangeTimeout(TransportError):
    """A wait passed its deadline; the text names rank, peer, ring step and bytes."""


class PeerLost(TransportError):
    """Another rank failed, died or left; the text names it and its reason."""


def _group_by_value(values: Mapping[int, object]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks_of.setdefault(str(value), []).append(rank)
    return "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_of.items())


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0, 1, 2, ... (1023 in all)`, for error messages."""
    listed = sorted(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    shown = ", ".join(str(rank) for rank in listed[:8])
    return f"ranks {shown}" + (f", ... ({len(listed)} in all)" if len(listed) > 8 else "")
