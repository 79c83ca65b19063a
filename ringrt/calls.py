"""A collective call, up to the point where data moves: the ranks agree on it, each prepares its
part, and all learn whether the others could."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ringrt.backend import Backend, BackendContext
from ringrt.device import Device
from ringrt.device.cuda import CudaDevice
from ringrt.device.driver import cupy
from ringrt.device.host import HOST
from ringrt.engine.agree import Record, agree, agree_ready, said, say, tell_failure
from ringrt.engine.buffers import Shelf
from ringrt.errors import (
    BackendUnavailable,
    HandoffError,
    RankMismatch,
    TransportError,
    Unsupported,
)
from ringrt.inputs import Place, Shapes, place_name
from ringrt.options import CallOptions
from ringrt.places import shard_of
from ringrt.plan import Partition, Plan, Problem, plan
from ringrt.plan.partition import Array, check_partition
from ringrt.plan.schedule import Step
from ringrt.plan.tiles import lower
from ringrt.plugins import one_line
from ringrt.registry import registry
from ringrt.transport import Transport
from ringrt.transports.staged import StagedTransport
from ringrt.version import __version__

#: A first call may compile kernels; ranks wait at least this long for one another there.
_PREPARE_TIMEOUT = 120.0
#: Agreed calls whose plans are kept.
_KEPT = 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a pass needs, once all ranks have agreed to it."""

    problem: Problem
    steps: list[Step]
    travel: str
    backend_name: str
    backend: Backend
    device: Device
    #: What moves arrays of that device.
    transport: Transport
    operation: str = "forward"
    #: For the gradient of sinks: which query rows see any key, bool `[rows]`.
    seen: Array | None = None
    shelf: Shelf = field(default_factory=Shelf)


@dataclass(frozen=True, slots=True)
class RingOptions:
    """What all calls of one ring have in common."""

    partition: Partition
    schedule: str
    travel: str
    timeout: float
    threads: int | None


class _Said(NamedTuple):
    """What all ranks said of a pass, in which they agree: their records, what of it a plan depends
    on, as text, and where each rank's arrays lie."""

    records: list[Record]
    key: str
    places: list[str]

    @classmethod
    def of(cls, records: list[Record]) -> _Said:
        # Sinks are compared, but a plan only depends on whether there are any.
        common = {name: value for name, value in records[0].items() if name != "local"}
        common["sink"] = common["sink"] is not None
        key = json.dumps([common, [record["local"] for record in records]])
        places = [f"{record['local'][3]} {record['local'][4]}" for record in records]
        return cls(records, key, places)


class Caller:
    """Agrees and prepares on behalf of one `Ring`. `backend` may be set anew between calls."""

    def __init__(self, transport: Transport, options: RingOptions, backend: str) -> None:
        self.transport, self.options, self.backend = transport, options, backend
        self._threads = options.threads or max(1, available_cores() // transport.local_size)
        self._backends: dict[tuple[str, Device], Backend] = {}
        self._devices: dict[int, CudaDevice] = {}
        self._kept: OrderedDict[str, Prepared] = OrderedDict()
        self._read: OrderedDict[tuple[bytes, ...], _Said] = OrderedDict()
        self._staged: StagedTransport | None = None
        self._closed = False

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What goes wrong with this rank's own arguments is raised here as it is, and told to
        the others, which are about to agree on the call."""
        if self._closed:
            raise TransportError(f"the ring of rank {self.transport.rank} is closed")
        try:
            yield
        except Exception as error:
            tell_failure(self.transport, error, self.options.timeout)
            raise

    def agree(self, record: Record) -> list[Record]:
        """Compare this rank's record with every other's; see `ringrt.engine.agree`."""
        return agree(self.transport, self._common() | dict(record), self.options.timeout)

    def prepare(
        self,
        operation: str,
        shapes: Shapes,
        place: Place,
        options: CallOptions,
        dlse: bool = False,
    ) -> Prepared:
        """Agree on a pass ("forward" or "backward"; `dlse` says whether a gradient of lse comes in
        on this rank) and prepare it. Kept, so that a call like an earlier one costs one round of
        the control plane and no planning. Whether it is like an earlier one is found from what all
        ranks said, so that all find the same."""
        local = [shapes.q_rows, shapes.kv_rows, self.backend, *place, dlse]
        common = {"operation": operation} | shapes.common() | options.record()
        record = self._common() | common | {"local": local}
        read = self._read_all(say(self.transport, record, self.options.timeout))
        if read.key not in self._kept:
            self._kept[read.key] = self._prepare(read.records, shapes, place, options)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(read.key)
        prepared = self._kept[read.key]
        prepared.transport.attach(prepared.device, read.places, self._prepare_timeout)
        return prepared

    def _common(self) -> dict[str, Any]:
        """In what all rings of the ranks must be alike."""
        options = self.options
        common = {"version": __version__, "partition": options.partition.name}
        return common | {"schedule": options.schedule, "travel": options.travel}

    def _read_all(self, raw: list[bytes]) -> _Said:
        """What the ranks said before a pass. It is found to agree, or not, once."""
        spoken = tuple(raw)
        if spoken not in self._read:
            self._read[spoken] = _Said.of(said(raw))
            if len(self._read) > _KEPT:
                self._read.popitem(last=False)
        self._read.move_to_end(spoken)
        return self._read[spoken]

    def check_shares(self, field: str, rows: list[int]) -> None:
        """`RankMismatch` unless every rank's rows are its share of the total."""
        partition = self.options.partition
        check_partition(partition, sum(rows), self.transport.size)
        shares = partition.counts(sum(rows), self.transport.size)
        if rows != shares:
            pairs = zip(rows, shares, strict=True)
            raise RankMismatch(
                f"{field} ({partition.name} shards of {sum(rows)})",
                {r: f"{n}, its share is {s}" for r, (n, s) in enumerate(pairs)},
            )

    def shard(self, x: Array, axis: int) -> Array:
        """This rank's rows of a whole array."""
        transport, partition = self.transport, self.options.partition
        check_partition(partition, x.shape[axis], transport.size)
        runs = partition.runs(x.shape[axis], transport.size, transport.rank)
        return shard_of(x, runs, axis, self.gpu)

    def gpu(self, index: int) -> CudaDevice:
        """This rank's stream and kernels on a GPU."""
        if index not in self._devices:
            self._devices[index] = CudaDevice(index)
        return self._devices[index]

    def close(self) -> None:
        """Close the backends; no further call."""
        self._closed = True
        for backend in list(self._backends.values()):
            backend.close()

    def _prepare(
        self, records: list[Record], shapes: Shapes, place: Place, call: CallOptions
    ) -> Prepared:
        failure, prepared, alike = None, None, {}
        try:
            prepared = self._prepare_here(records, shapes, place, call)
            alike = {"the kind of device": prepared.device.kind, "travel": prepared.travel}
        except Exception as error:
            failure = error
        agree_ready(self.transport, alike, failure, self._prepare_timeout)
        assert prepared is not None
        return prepared

    @property
    def _prepare_timeout(self) -> float:
        return max(self.options.timeout, _PREPARE_TIMEOUT)

    def _prepare_here(
        self, records: list[Record], shapes: Shapes, place: Place, call: CallOptions
    ) -> Prepared:
        rank, options = self.transport.rank, self.options
        backward = records[rank]["operation"] == "backward"
        problem = self._problem(records, shapes, call)
        dlse = bool(records[rank]["local"][5])
        name, backend, device = self._choose_backend(problem, backward, dlse, place)
        planned = plan(
            problem,
            options.partition,
            self.transport.size,
            options.schedule,
            backward=backward,
            travel="kv" if backend.needs_out else options.travel,
        )
        with device.running():
            device.prepare(problem.dtype)
            backend.prepare(problem)
        steps = planned.backward_steps(rank) if backward else planned.steps(rank)
        seen = _seen_rows(planned, rank) if backward and problem.sink else None
        transport = self._transport_for(device)
        return Prepared(
            problem,
            steps,
            planned.travel,
            name,
            backend,
            device,
            transport,
            records[rank]["operation"],
            seen,
        )

    def _problem(self, records: list[Record], shapes: Shapes, call: CallOptions) -> Problem:
        """The whole problem, from what every rank said of its part."""
        q_rows, kv_rows = ([each["local"][side] for each in records] for side in (0, 1))
        self.check_shares("q rows", q_rows)
        self.check_shares("kv rows", kv_rows)
        lengths = sum(q_rows), sum(kv_rows)
        return call.problem(shapes, *lengths)

    def _transport_for(self, device: Device) -> Transport:
        """The ring's own, or what brings a GPU's arrays to it by way of the host."""
        if isinstance(device, CudaDevice) and self.transport.device == "cpu":
            if self._staged is None or self._staged.on is not device:
                self._staged = StagedTransport(self.transport, device)
            return self._staged
        return self.transport

    def _choose_backend(
        self, problem: Problem, backward: bool, dlse: bool, place: Place
    ) -> tuple[str, Backend, Device]:
        auto = self.backend == "auto"
        names = [spec.name for spec in registry().candidates()] if auto else [self.backend]
        refusals, misplaced = [], []
        for name in names:
            try:
                refusal = self._misplaced(name, place)
                if refusal is not None:
                    misplaced.append(f"backend {name}: {refusal}")
                    continue
                device = self._device_of(name, place)
                backend = self._load(name, device)
            except BackendUnavailable as error:
                if not auto:
                    raise
                # A backend that should run here does not: say so, since the next is slower.
                warnings.warn(f"{error}; trying the next", RuntimeWarning, stacklevel=2)
                refusals.append(str(error))
                continue
            refusal = _refusal(name, backend, problem)
            if refusal is None and backward:
                refusal = self._refuses_backward(backend, dlse)
            if refusal is None:
                return name, backend, device
            refusals.append(f"backend {name}: {refusal}")
        if refusals:
            raise Unsupported("; ".join(refusals + misplaced))
        if misplaced:
            raise (HandoffError if place[0] == "cuda" else Unsupported)("; ".join(misplaced))
        raise BackendUnavailable("no backend can run here; see `ringrt doctor`")

    def _refuses_backward(self, backend: Backend, dlse: bool) -> str | None:
        if not backend.backward:
            return "backward is not implemented"
        if backend.needs_out and self.options.travel == "q":
            return "travel q is not implemented: backward needs out, which does not travel"
        if backend.needs_out and dlse:
            return "dlse is not implemented: it makes delta of dout and out by itself"
        return None

    def _misplaced(self, name: str, place: Place) -> str | None:
        """Why a backend cannot compute on arrays that lie there, or move them by this ring."""
        if registry().backend(name).device == "cuda":
            return None
        if place[0] == "cuda":
            return f"it computes on the host, and q, k and v lie on {place_name(place)}"
        if self.transport.device == "cuda":
            return "it computes on the host, and the ring's transport moves arrays of GPUs"
        return None

    def _device_of(self, name: str, place: Place) -> Device:
        """The GPU on which the arrays lie; for arrays of the host, the ranks of a machine take
        its GPUs in turn."""
        if registry().backend(name).device == "cpu":
            return HOST
        kind, index = place
        if kind == "cpu":
            index = self.transport.local_rank % cupy().cuda.runtime.getDeviceCount()
        return self.gpu(index)

    def _load(self, name: str, device: Device) -> Backend:
        key = name, device
        if key not in self._backends:
            context = BackendContext(self._threads, device)
            self._backends[key] = registry().load(name, context)
        return self._backends[key]


def _refusal(name: str, backend: Backend, problem: Problem) -> str | None:
    """What `supports` says; if it fails, `BackendUnavailable` names the backend."""
    try:
        return backend.supports(problem)
    except Exception as error:
        raise BackendUnavailable(f"backend {name}: supports: {one_line(error)}") from error


def _seen_rows(planned: Plan, rank: int) -> Array:
    """Which of the rank's query rows see any key, bool `[rows]`."""
    q_runs = planned.q_runs(rank)
    change = np.zeros(sum(run.count for run in q_runs) + 1, np.int64)
    for shard in range(planned.size):
        table = lower(planned.problem.mask, q_runs, planned.kv_runs(shard)).table
        np.add.at(change, table[:, 0], 1)
        np.add.at(change, table[:, 1], -1)
    seen: Array = np.cumsum(change)[:-1] > 0
    return seen


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
