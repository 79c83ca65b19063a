"""Loads plugins from entry points and asks each what it brings. What is wrong with one is a line
that names it, and the others keep working."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from importlib.metadata import EntryPoint
from typing import Any, Protocol, TypeVar

import pluggy

from ringrt import hookspecs
from ringrt.hookspecs import PROTOCOL, RingStep

ENTRY_POINT_GROUP = "ringrt"
#: Names of plugins, with commas between, that are not to be loaded.
BLOCK_VARIABLE = "RINGRT_BLOCK_PLUGINS"

_HOOKS = [name for name in vars(hookspecs) if name.startswith("ringrt_")]


class Named(Protocol):
    """What plugins register: it has a name, which is its own among its kind."""

    @property
    def name(self) -> str:
        """By which users ask for it."""


Item = TypeVar("Item", bound=Named)


class Plugins:
    """The plugins of some entry points, and one line in `problems` for each that cannot be used.
    Those that the environment blocks are in `blocked`."""

    def __init__(self, points: Iterable[EntryPoint]) -> None:
        self._manager = _manager()
        self.problems: list[str] = []
        asked = {name.strip() for name in os.environ.get(BLOCK_VARIABLE, "").split(",")} - {""}
        # Nobody takes a name from ringrt's own.
        points = sorted(points, key=lambda p: p.dist is None or p.dist.name != "ringrt")
        self.blocked = sorted(asked & {point.name for point in points})
        for name in sorted(asked.difference(self.blocked)):
            self.problems.append(f"{BLOCK_VARIABLE} names {name!r}, which is not installed")
        for point in points:
            if point.name not in self.blocked:
                self._register(point)
        self._observers = self._manager.hook.ringrt_ring_step.get_hookimpls()

    def collect(self, hook: str, kind: type[Item]) -> dict[str, Item]:
        """What every plugin registers by a hook, by name. The first plugin to come keeps a
        name."""
        found: dict[str, Item] = {}
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            plugin = implementation.plugin_name
            try:
                items = _checked(implementation.function(), kind)
            except (Exception, SystemExit) as error:
                self.problems.append(f"plugin {plugin}: {one_line(error)}")
                continue
            for item in items:
                if item.name in found:
                    self.problems.append(f"plugin {plugin}: the name {item.name!r} is taken")
                else:
                    found[item.name] = item
        return dict(sorted(found.items()))

    @property
    def observed(self) -> bool:
        """Whether any plugin wants to hear of ring steps."""
        return bool(self._observers)

    def ring_step(self, step: RingStep) -> None:
        """Tell every plugin that wants to hear of it. One that raises is heard no more."""
        for implementation in list(self._observers):
            try:
                implementation.function(*(step,)[: len(implementation.argnames)])
            except Exception as error:
                self._observers = [each for each in self._observers if each is not implementation]
                text = f"plugin {implementation.plugin_name}: ringrt_ring_step: {one_line(error)}"
                warnings.warn(f"{text}; it is not called again", RuntimeWarning, stacklevel=2)

    def _register(self, point: EntryPoint) -> None:
        try:
            plugin = point.load()
            complaint = next(_complaints(plugin), None)
            if complaint is None:
                # In a manager of its own first: one that is refused leaves nothing behind.
                _manager().register(plugin, name=point.name)
                self._manager.register(plugin, name=point.name)
        except pluggy.PluginValidationError as error:
            complaint = str(error).splitlines()[-1]
        except (Exception, SystemExit) as error:
            complaint = one_line(error)
        if complaint is not None:
            self.problems.append(f"plugin {point.name} ({point.value}): {complaint}")


def one_line(error: BaseException) -> str:
    """An error's kind and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("ringrt")
    manager.add_hookspecs(hookspecs)
    return manager


def _complaints(plugin: Any) -> Iterator[str]:
    """What is wrong with a plugin, before it is asked for anything."""
    spoken = getattr(plugin, "RINGRT_PROTOCOL", None)
    if spoken is None:
        yield f"it does not say RINGRT_PROTOCOL = {PROTOCOL}, the protocol it was written for"
    elif spoken != PROTOCOL:
        newer = isinstance(spoken, int) and spoken > PROTOCOL
        mend = "update ringrt" if newer else "update the plugin"
        yield f"it speaks protocol {spoken!r}, and this ringrt {PROTOCOL}: {mend}"
    for name in dir(plugin):
        marked = hasattr(getattr(plugin, name), "ringrt_impl")
        if not marked and not name.startswith("ringrt_"):
            continue
        if name not in _HOOKS:
            near = difflib.get_close_matches(name, _HOOKS, 1, cutoff=0.5)
            meant = f"; {near[0]} is meant?" if near else ""
            yield f"{name} is not one of ringrt's hooks{meant}"
        elif not marked:
            yield f"{name} is not marked with ringrt.hookspecs.hookimpl"


#: Fields of specs by what they hold: a function, or that or None.
_FUNCTIONS, _OPTIONAL = {"probe", "load", "runs"}, {"group", "connect", "launched", "over"}
#: What users can type, and `auto` means another thing.
_NAME = re.compile(r"(?!auto$)[A-Za-z0-9][\w.-]*")


def _fault(item: Any) -> str | None:
    """What is wrong with a field of a spec."""
    if not isinstance(item.name, str) or not _NAME.fullmatch(item.name):
        return "whose name must be letters, digits, '-', '_' and '.', and not auto"
    if not isinstance(item.summary, str):
        return "whose summary must be one line of text"
    for each in fields(item):
        value = getattr(item, each.name)
        needed = each.name in _FUNCTIONS or (each.name in _OPTIONAL and value is not None)
        if needed and not callable(value):
            return f"whose {each.name} cannot be called: {value!r}"
    if not isinstance(getattr(item, "priority", None), int | None):
        return f"whose priority must be a whole number or None, not {item.priority!r}"
    if getattr(item, "device", "cpu") not in ("cpu", "cuda"):
        return f"whose device must be cpu or cuda, not {item.device!r}"
    return None


def _checked(items: Iterable[Any], kind: type[Item]) -> Sequence[Item]:
    checked = []
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"registers {item!r} instead of a {kind.__name__}")
        if fault := _fault(item):
            raise TypeError(f"registers {item.name!r}, {fault}")
        checked.append(item)
    return checked
