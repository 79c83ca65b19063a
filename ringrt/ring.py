"""Ring: what a user holds. One object per rank; its calls are collective."""

from __future__ import annotations

import contextlib
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from ringrt.backend import Backend, BackendContext
from ringrt.engine.agree import Record, agree, agree_ready, gather, tell_failure
from ringrt.engine.forward import OnStep, forward
from ringrt.engine.stats import PassStats
from ringrt.errors import (
    BackendUnavailable,
    ConfigError,
    RankMismatch,
    RingrtError,
    TransportError,
    Unsupported,
)
from ringrt.inputs import Shapes, as_numpy, check_arrays, dtype_name
from ringrt.plan import Mask, Plan, Problem, get_partition, plan
from ringrt.plan.partition import Array, shard, unshard
from ringrt.plan.problem import default_scale
from ringrt.plan.schedule import Step
from ringrt.registry import registry
from ringrt.transport import Transport
from ringrt.version import __version__

#: A first call may compile kernels; ranks wait at least this long for one another there.
_PREPARE_TIMEOUT = 120.0
#: Agreed problems whose plans are kept.
_KEPT_PLANS = 32


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a call needs once all ranks have agreed to it; kept for the next call like it."""

    problem: Problem
    steps: list[Step]
    backend_name: str
    backend: Backend


class Ring:
    """One rank's end of a ring of ranks. Every method but `close` is collective: all ranks
    call it, with the same options, in the same order.

    `partition` is contiguous, striped or zigzag; `schedule` is ring (or auto); `backend` a
    backend's name (or auto: the best that runs here and supports the call); `timeout` the
    deadline of every wait for another rank, in seconds; `threads` the CPU threads of this
    rank (by default its share of the cores). Use it as a context manager: leaving it by an
    exception tells the other ranks, which then raise `PeerLost` instead of waiting.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        partition: str = "striped",
        schedule: str = "auto",
        backend: str = "auto",
        timeout: float = 60.0,
        threads: int | None = None,
    ) -> None:
        if not 0 < timeout < math.inf:
            raise ConfigError("timeout", "a number of seconds > 0", timeout)
        self.partition = get_partition(partition)
        self.schedule, self.backend, self.timeout = schedule, backend, timeout
        self._transport = transport
        self._threads = threads or max(1, _cores() // transport.local_size)
        self._backends: dict[str, Backend] = {}
        self._passes: OrderedDict[bytes, _Pass] = OrderedDict()
        #: What this rank did in the last pass; None before the first.
        self.stats: PassStats | None = None
        #: Called after every ring step with (steps done, steps in all).
        self.on_step: OnStep | None = None

    @classmethod
    def from_mpi(cls, comm: Any = None, **options: Any) -> Ring:
        """The ring of all processes that mpirun started, or of an mpi4py communicator.
        `options` as for `Ring`. Raises `TransportError` without mpi4py."""
        spec = registry().transport("mpi")
        if comm is not None:
            from ringrt.transports.mpi import MpiTransport

            return cls(MpiTransport(comm), **options)
        if spec.connect is None:
            raise TransportError("transport mpi cannot connect processes")
        return cls(spec.connect(), **options)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._transport.size

    @property
    def transport(self) -> Transport:
        """What moves the bytes."""
        return self._transport

    def shard(self, x: Any, axis: int = 1) -> Array:
        """This rank's rows of a whole array (the same on all ranks), cut along `axis`: 1 for
        q, k, v and out, 2 for lse. A view where the shard is one run of rows, else a copy."""
        with self._telling():
            array = _array_with_axis(x, axis)
        length = array.shape[axis]
        self._agree({"operation": "shard", "axis": axis, "length": length})
        return shard(array, self.partition.runs(length, self.size, self.rank), axis)

    def unshard(self, x: Any, axis: int = 1) -> Array:
        """The whole array, on every rank, from every rank's shard."""
        with self._telling():
            array = _array_with_axis(x, axis)
        rest = list(array.shape[:axis] + array.shape[axis + 1 :])
        record = {"operation": "unshard", "axis": axis, "shape without the axis": rest}
        record |= {"dtype": dtype_name(array), "local": [array.shape[axis]]}
        _, records = self._agree(record)
        rows = [each["local"][0] for each in records]
        self._check_shares("rows", rows)
        raw = gather(self._transport, np.ascontiguousarray(array).tobytes(), self.timeout)
        shards = [
            np.frombuffer(data, array.dtype).reshape(*rest[:axis], count, *rest[axis:])
            for data, count in zip(raw, rows, strict=True)
        ]
        return unshard(shards, self.partition, axis)

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        length: int | tuple[int, int] | None = None,
        **others: Any,
    ) -> tuple[Array, Array]:
        """Exact attention of this rank's queries over the keys of all ranks.

        q `[batch, rows, q_heads, head_dim]`, k `[batch, kv_rows, kv_heads, head_dim]`, v
        `[batch, kv_rows, kv_heads, value_dim]`: this rank's shards, one dtype of float16,
        bfloat16, float32, float64, any strides. Returns out `[batch, rows, q_heads,
        value_dim]` in that dtype, and lse `[batch, q_heads, rows]`, natural logarithm, float32
        (float64 for float64). A row that sees no key has out 0 and lse −inf.

        `causal` is bottom-right aligned where the lengths of queries and keys differ. `scale`
        is 1/√head_dim by default. `softcap` > 0 caps scores to softcap·tanh(score/softcap).
        `length`, an int or (q, kv), only checks the whole lengths.

        Raises `ConfigError` for wrong arguments and `Unsupported` for an option that is not
        implemented; on the other ranks that is a `RankMismatch`, as is any disagreement, all
        before data moves. While data moves: `ExchangeTimeout`, `PeerLost`, `KernelError`; the
        ring cannot be used after those.
        """
        with self._telling():
            _refuse(others, "Ring.attention")
            q, k, v = as_numpy("q", q), as_numpy("k", k), as_numpy("v", v)
            shapes = check_arrays(q, k, v)
            record = {"operation": "forward", "causal": bool(causal), "length": length}
            record |= {"scale": _number("scale", scale), "softcap": _number("softcap", softcap)}
            record |= shapes.common() | {"local": [shapes.q_rows, shapes.kv_rows]}
        raw, records = self._agree(record)
        prepared = self._prepared(raw, records)
        self.stats = PassStats(self.rank, prepared.backend_name, tokens=shapes.q_rows)
        with _AbortOnError(self._transport):
            return forward(
                q,
                k,
                v,
                prepared.problem,
                prepared.steps,
                prepared.backend,
                self._transport,
                self.stats,
                self.timeout,
                self.on_step,
            )

    def close(self) -> None:
        """Leave the ring in good order."""
        for backend in self._backends.values():
            backend.close()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, RingrtError):
            self._transport.abort(f"{type(error).__name__}: {error}")
        self.close()

    def _agree(self, record: Mapping[str, Any]) -> tuple[bytes, list[Record]]:
        common = {"version": __version__, "partition": self.partition.name}
        record = common | {"schedule": self.schedule} | dict(record)
        return agree(self._transport, record, self.timeout)

    def _prepared(self, raw: bytes, records: list[Record]) -> _Pass:
        """Plan and backend of an agreed call; kept, so that a call like an earlier one costs
        one round of the control plane and no planning."""
        if raw in self._passes:
            self._passes.move_to_end(raw)
            return self._passes[raw]
        failure, prepared = None, None
        try:
            prepared = self._prepare(records)
        except Exception as error:
            failure = error
        agree_ready(self._transport, failure, max(self.timeout, _PREPARE_TIMEOUT))
        assert prepared is not None
        self._passes[raw] = prepared
        if len(self._passes) > _KEPT_PLANS:
            self._passes.popitem(last=False)
        return prepared

    def _prepare(self, records: list[Record]) -> _Pass:
        problem = self._problem(records)
        planned: Plan = plan(problem, self.partition, self.size, self.schedule)
        name, backend = self._choose_backend(problem)
        backend.prepare(problem)
        return _Pass(problem, planned.steps(self.rank), name, backend)

    def _problem(self, records: list[Record]) -> Problem:
        """The whole problem, from what every rank said of its part."""
        own, q_rows, kv_rows = records[self.rank], [], []
        for each in records:
            q_rows.append(each["local"][0])
            kv_rows.append(each["local"][1])
        self._check_shares("q rows", q_rows)
        self._check_shares("kv rows", kv_rows)
        lengths = (sum(q_rows), sum(kv_rows))
        _check_length(own["length"], lengths)
        scale = own["scale"]
        return Problem(
            **{name: own[name] for name in Shapes.COMMON},
            q_length=lengths[0],
            kv_length=lengths[1],
            mask=Mask.causal(*lengths) if own["causal"] else Mask.full(*lengths),
            scale=default_scale(own["head_dim"]) if scale is None else scale,
            softcap=own["softcap"],
        )

    def _check_shares(self, field: str, rows: list[int]) -> None:
        shares = self.partition.counts(sum(rows), self.size)
        if rows != shares:
            pairs = zip(rows, shares, strict=True)
            raise RankMismatch(
                f"{field} ({self.partition.name} shards of {sum(rows)})",
                {r: f"{n}, its share is {s}" for r, (n, s) in enumerate(pairs)},
            )

    def _choose_backend(self, problem: Problem) -> tuple[str, Backend]:
        if self.backend == "auto":
            names = [spec.name for spec in registry().backend_candidates()]
        else:
            names = [self.backend]
        refusals = []
        for name in names:
            backend = self._load(name)
            refusal = backend.supports(problem)
            if refusal is None:
                return name, backend
            refusals.append(f"backend {name}: {refusal}")
        if not names:
            raise BackendUnavailable("no backend can run here; see `ringrt doctor`")
        raise Unsupported("; ".join(refusals))

    def _load(self, name: str) -> Backend:
        if name not in self._backends:
            spec = registry().backend(name)
            self._backends[name] = spec.load(BackendContext(self._threads))
        return self._backends[name]

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """What goes wrong with this rank's own arguments is raised here as it is, and told to
        the others, which are about to agree on the call."""
        try:
            yield
        except Exception as error:
            tell_failure(self._transport, error, self.timeout)
            raise


class _AbortOnError:
    """While data moves, whatever goes wrong here must reach the other ranks."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._transport.abort(str(error) or type(error).__name__)


def _array_with_axis(x: Any, axis: int) -> Array:
    array = as_numpy("x", x)
    if not 0 <= axis < array.ndim:
        raise ConfigError("axis", f"an axis of an array of {array.ndim} dimensions", axis)
    return array


def _refuse(options: Mapping[str, Any], path: str) -> None:
    if options:
        names = ", ".join(sorted(options))
        raise Unsupported(f"{names}: not implemented in {path}")


def _number(name: str, value: float | None) -> float | None:
    """A plain float, so that ranks which pass 1 and numpy.float32(1) agree."""
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(name, "a number or None", repr(value)) from None


def _check_length(said: Any, found: tuple[int, int]) -> None:
    if said is not None:
        expected = (said, said) if isinstance(said, int) else tuple(said)
        if expected != found:
            raise ConfigError("length", f"{expected} by the argument", f"{found} from the shards")


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
