"""The hooks by which plugins join, ringrt's own included. All are prefixed `ringrt_`.

A plugin is a module named in the `ringrt` entry-point group:

    [project.entry-points.ringrt]
    my_plugin = "my_plugin"
"""

from __future__ import annotations

import pluggy

from ringrt.backend import BackendSpec
from ringrt.transport import TransportSpec

hookspec = pluggy.HookspecMarker("ringrt")
#: Marks a plugin's implementation of a hook.
hookimpl = pluggy.HookimplMarker("ringrt")


@hookspec
def ringrt_register_backends() -> list[BackendSpec]:
    """Attention backends the plugin brings. Called once, when the registry is first used;
    must not import what the backends need to run."""
    return []


@hookspec
def ringrt_register_transports() -> list[TransportSpec]:
    """Transports the plugin brings. As above."""
    return []
