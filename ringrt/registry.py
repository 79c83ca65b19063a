"""Finds the plugins, asks what they bring and what works here, and chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

import pluggy

from ringrt import hookspecs
from ringrt.backend import Backend, BackendContext, BackendSpec
from ringrt.errors import BackendUnavailable, ConfigError, TransportError, TransportUnavailable
from ringrt.transport import Launch, Transport, TransportSpec

ENTRY_POINT_GROUP = "ringrt"

Spec = TypeVar("Spec", BackendSpec, TransportSpec)


@dataclass(frozen=True, slots=True)
class Registry:
    """Backends and transports by name, and one line for each plugin that could not be used."""

    backends: Mapping[str, BackendSpec]
    transports: Mapping[str, TransportSpec]
    problems: tuple[str, ...]

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
            return spec.load(context)
        except Exception as error:
            raise BackendUnavailable(f"backend {name}: {one_line(error)}") from error

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
            if spec.launched is not None and (launch := spec.launched()) is not None:
                return spec, launch
        return None


@cache
def registry() -> Registry:
    """The plugins installed here, loaded once."""
    return load(entry_points(group=ENTRY_POINT_GROUP))


def load(plugins: tuple[EntryPoint, ...] | list[EntryPoint]) -> Registry:
    """Load plugins from their entry points. One that fails is a line in `problems`; the
    others keep working."""
    manager = pluggy.PluginManager("ringrt")
    manager.add_hookspecs(hookspecs)
    problems: list[str] = []
    for point in plugins:
        try:
            manager.register(point.load(), name=point.name)
        except Exception as error:
            problems.append(f"plugin {point.name} ({point.value}): {one_line(error)}")
    hook = manager.hook
    backends = _collect(hook.ringrt_register_backends.get_hookimpls(), problems, BackendSpec)
    transports = _collect(hook.ringrt_register_transports.get_hookimpls(), problems, TransportSpec)
    return Registry(backends, transports, tuple(problems))


def _collect(
    implementations: list[pluggy.HookImpl], problems: list[str], kind: type[Spec]
) -> dict[str, Spec]:
    """What every plugin registers, plugin by plugin, so that one's failure is its own."""
    found: dict[str, Spec] = {}
    for implementation in implementations:
        try:
            specs = list(implementation.function())  # type: ignore[call-overload]
            wrong = [spec for spec in specs if not isinstance(spec, kind)]
            if wrong:
                raise TypeError(f"registers {wrong[0]!r} instead of a {kind.__name__}")
        except Exception as error:
            problems.append(f"plugin {implementation.plugin_name}: {one_line(error)}")
            continue
        for spec in specs:
            if spec.name in found:
                problems.append(
                    f"plugin {implementation.plugin_name}: the name {spec.name!r} is taken"
                )
            else:
                found[spec.name] = spec
    return dict(sorted(found.items()))


def _named(specs: Mapping[str, Spec], name: str, kind: str) -> Spec:
    if name not in specs:
        raise ConfigError(kind, "auto or " + " or ".join(specs), repr(name))
    return specs[name]


def missing_for(spec: BackendSpec | TransportSpec) -> str | None:
    """What the spec's probe says is missing; a probe that fails is an answer too."""
    try:
        return spec.probe()
    except Exception as error:
        return one_line(error)


def one_line(error: BaseException) -> str:
    """An error's kind and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
