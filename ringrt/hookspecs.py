"""The hooks by which plugins join, ringrt's own included. All are prefixed `ringrt_`.

A plugin is a module named in the `ringrt` entry-point group:

    [project.entry-points.ringrt]
    my_plugin = "my_plugin"

It says which protocol it was written for, and implements some of the hooks below:

    from ringrt.hookspecs import hookimpl

    RINGRT_PROTOCOL = 1

    @hookimpl
    def ringrt_register_backends():
        return [BackendSpec(...)]
"""

from __future__ import annotations

from dataclasses import dataclass

import pluggy

from ringrt.backend import BackendSpec
from ringrt.plan.partition import Partition
from ringrt.transport import TransportSpec

#: What hooks, backends and transports have to be like. A plugin states the number it was written
#: for; it is raised when something changes that a plugin must follow.
PROTOCOL = 1

hookspec = pluggy.HookspecMarker("ringrt")
#: Marks a plugin's implementation of a hook.
hookimpl = pluggy.HookimplMarker("ringrt")


@dataclass(frozen=True, slots=True)
class RingStep:
    """A ring step that a rank has done: number `done` (from 1) of `steps`, in the pass
    "forward" or "backward", by the backend of that name; so far in this pass it has sent and
    received so many bytes. On a GPU the step's work is queued, not over."""

    operation: str
    rank: int
    size: int
    backend: str
    done: int
    steps: int
    bytes_sent: int
    bytes_received: int


@hookspec
def ringrt_register_backends() -> list[BackendSpec]:
    """Attention backends the plugin brings. Called once, when the registry is first used;
    must not import what the backends need to run."""
    return []


@hookspec
def ringrt_register_transports() -> list[TransportSpec]:
    """Transports the plugin brings. As above."""
    return []


@hookspec
def ringrt_register_partitions() -> list[Partition]:
    """Partitions the plugin brings. As above."""
    return []


@hookspec
def ringrt_ring_step(step: RingStep) -> None:
    """Called by every rank after each of its ring steps, on the thread that computes, so it must
    be quick. What it raises is a warning that names the plugin, which is then not called again."""
