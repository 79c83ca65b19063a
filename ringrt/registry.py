"""Finds the plugins, asks what they bring and what works here, and chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from ringrt.backend import Backend, BackendContext, BackendSpec
from ringrt.errors import BackendUnavailable, ConfigError, TransportError, TransportUnavailable
from ringrt.plan.partition import Partition
from ringrt.plugins import ENTRY_POINT_GROUP, Item, Plugins, one_line
from ringrt.transport import Launch, Transport, TransportSpec


@dataclass(frozen=True, slots=True)
class Registry:
    """Backends, transports and partitions by name, and the plugins that bring them."""

    backends: Mapping[str, BackendSpec]
    transports: Mapping[str, TransportSpec]
    partitions: Mapping[str, Partition]
    plugins: Plugins

    @property
    def problems(self) -> Sequence[str]:
        """One line for each plugin that could not be used."""
        return self.plugins.problems

    def backend(self, name: str) -> BackendSpec:
        """The backend of that name, able to run here."""
        spec = _named(self.backends, name, "backend")
        if missing := missing_for(spec):
            raise BackendUnavailable(f"backend {name}: {missing}")
        return spec

    def load(self, name: str, context: BackendContext) -> Backend:
        """A backend of that name for one rank; `BackendUnavailable` if it cannot be made."""
        spec = self.backend(name)
        try:
            backend = spec.load(context)
        except (Exception, SystemExit) as error:
            raise BackendUnavailable(f"backend {name}: {one_line(error)}") from error
        if lacking := [verb for verb in _VERBS if not callable(getattr(backend, verb, None))]:
            made = f"what load gave, a {type(backend).__name__}"
            raise BackendUnavailable(f"backend {name}: {made}, has no {lacking[0]}")
        return backend

    def candidates(self) -> list[BackendSpec]:
        """What `auto` may take, best first: able to run here, and willing."""
        willing = [spec for spec in self.backends.values() if spec.priority is not None]
        willing.sort(key=lambda spec: -(spec.priority or 0))
        return [spec for spec in willing if missing_for(spec) is None]

    def transport(self, name: str) -> TransportSpec:
        """The transport of that name, able to run here."""
        spec = _named(self.transports, name, "transport")
        if missing := missing_for(spec):
            raise TransportUnavailable(f"transport {name}: {missing}")
        return spec

    def partition(self, name: str) -> Partition:
        """The partition of that name; `ConfigError` if there is none."""
        if not isinstance(name, str) or name not in self.partitions:
            known = " or ".join(self.partitions) or _NONE
            raise ConfigError("partition", known, repr(name))
        return self.partitions[name]

    def group(self, name: str, size: int) -> Sequence[Transport]:
        """The ends of a new ring of thread ranks."""
        spec = self.transport(name)
        if spec.over is not None:
            return [spec.over(end) for end in self.group("threads", size)]
        if spec.group is None:
            raise ConfigError("transport", "one whose ranks are threads", repr(name))
        return spec.group(size)

    def connect(self, name: str) -> Transport:
        """Join the ring of all processes that the transport's launcher started; for one that only
        moves data, that launcher's own transport is the control plane."""
        spec = self.transport(name)
        if spec.over is not None:
            launched = self.launched()
            return spec.over(self.connect(launched[0].name if launched else "mpi"))
        if spec.connect is None:
            raise TransportUnavailable(f"transport {name}: its ranks are threads, not processes")
        try:
            return spec.connect()
        except TransportError:
            raise
        except Exception as error:
            raise TransportUnavailable(f"transport {name}: {one_line(error)}") from error

    def launched(self) -> tuple[TransportSpec, Launch] | None:
        """The transport whose launcher started this process, and as which rank, if one did."""
        for spec in self.transports.values():
            if spec.launched is None:
                continue
            try:
                launch = spec.launched()
                if launch is not None:
                    return spec, Launch(*launch)
            except (Exception, SystemExit) as error:
                problem = f"transport {spec.name}: launched: {one_line(error)}"
                if problem not in self.plugins.problems:
                    self.plugins.problems.append(problem)
        return None


_NONE = "one of a plugin (none is there: see `ringrt backends`)"
#: What every backend has.
_VERBS = ("supports", "prepare", "begin", "accumulate", "finish", "close")


@cache
def registry() -> Registry:
    """The plugins installed here, loaded once."""
    return load(entry_points(group=ENTRY_POINT_GROUP))


def load(points: Iterable[EntryPoint]) -> Registry:
    """What the plugins of some entry points bring."""
    plugins = Plugins(points)
    return Registry(
        plugins.collect("ringrt_register_backends", BackendSpec),
        plugins.collect("ringrt_register_transports", TransportSpec),
        plugins.collect("ringrt_register_partitions", Partition),
        plugins,
    )


def _named(specs: Mapping[str, Item], name: str, kind: str) -> Item:
    if name not in specs:
        auto = ["auto"] if kind == "backend" and specs else []
        known = " or ".join([*auto, *specs]) or _NONE
        raise ConfigError(kind, known, repr(name))
    return specs[name]


def missing_for(spec: BackendSpec | TransportSpec) -> str | None:
    """What the spec's probe says is missing; a probe that fails is an answer too."""
    try:
        words = spec.probe()
    except (Exception, SystemExit) as error:
        return one_line(error)
    if words is None or (isinstance(words, str) and words.strip()):
        return words
    return f"its probe gave {words!r}, which is neither None nor words"
