"""A backend under test: made by name, asked what it does, called by its verbs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from ringrt.backend import Backend, BackendContext, BackendSpec
from ringrt.conformance.cases import Case
from ringrt.conformance.checks import Failed, Refused
from ringrt.device import Device
from ringrt.device.cuda import CudaDevice
from ringrt.device.driver import simulated
from ringrt.device.host import HOST
from ringrt.errors import Unsupported
from ringrt.plan.problem import ITEMSIZE, Problem
from ringrt.plugins import one_line
from ringrt.registry import registry

#: Tried in turn for what a backend is asked by default: the first that it does.
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_HEAD_DIMS = (16, 8, 32, 64, 128)

_THREADS = 2


class Subject:
    """A backend by name, fresh. Raises `BackendUnavailable` where it cannot run."""

    def __init__(self, name: str, device: Device | None = None) -> None:
        self.spec: BackendSpec = registry().backend(name)
        self.name = name
        self.device: Device = device or new_device(self.spec)
        self.backend: Backend = registry().load(name, BackendContext(_THREADS, self.device))
        #: Words of refusals met on the way.
        self.refusals: list[str] = []

    @cached_property
    def base(self) -> Case:
        """Plain full attention in a dtype and of a head_dim that the backend does; `Refused` with
        its words if there is none."""
        words: list[str] = []
        for dtype in _DTYPES:
            for head_dim in _HEAD_DIMS:
                case = Case(dtype=dtype, head_dim=head_dim)
                try:
                    self.ask(case)
                except Refused as refusal:
                    words.append(str(refusal))
                else:
                    return case
        raise Refused("; ".join(dict.fromkeys(words)))

    def ask(self, case: Case) -> Problem:
        """The case's problem; `Refused` with the backend's words if it does not do it."""
        problem = case.problem
        words = self.backend.supports(problem)
        if words is None:
            return problem
        if not isinstance(words, str) or not words.strip():
            said = f"supports returned {words!r}; it must be None, or say in words what is not done"
            raise Failed(f"{said}; for {case}")
        raise Refused(words)

    def ask_backward(self, case: Case) -> Problem:
        """As `ask`, of the backward pass."""
        if not self.backend.backward:
            raise Refused("backward is not implemented")
        return self.ask(case)

    @contextmanager
    def verb(self, name: str, case: Case) -> Iterator[None]:
        """A call of the backend: what it raises is told with the verb and the problem."""
        try:
            with self.device.running():
                yield
        except (Failed, Refused):
            raise
        except Unsupported as error:
            if name == "prepare":
                raise Refused(str(error)) from error
            text = "a refusal comes from `supports` or `prepare`, before data moves"
            raise Failed(f"{name} raised {one_line(error)}; {text}; for {case}") from error
        except (Exception, SystemExit) as error:
            raise Failed(f"{name} raised {one_line(error)}; for {case}") from error

    def close(self) -> None:
        """Close the backend; what the simulator finds late is told here."""
        try:
            self.backend.close()
        except (Exception, SystemExit) as error:
            raise Failed(f"close raised {one_line(error)}") from error
        if self.spec.device == "cuda" and simulated():
            from ringrt import cudasim

            cudasim.check()


def new_device(spec: BackendSpec) -> Device:
    """Where the backend computes: the host, or the first GPU."""
    return CudaDevice(0) if spec.device == "cuda" else HOST


assert set(_DTYPES) == set(ITEMSIZE)
