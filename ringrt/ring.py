"""Ring: what a user holds. One object per rank; its calls are collective."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from ringrt.calls import Caller, Prepared, RingOptions
from ringrt.capture import CapturedPass, check_capturable
from ringrt.dlpack import Give, giver, rewriter, take
from ringrt.engine.agree import gather, tell_failure
from ringrt.engine.backward import Tensors, backward
from ringrt.engine.compute import OnStep, Pass
from ringrt.engine.forward import forward
from ringrt.engine.sinks import sink_part, sum_of_sinks
from ringrt.engine.stats import PassStats
from ringrt.errors import ConfigError, RingrtError
from ringrt.hookspecs import RingStep
from ringrt.inputs import Shapes, as_numpy, check_arrays, check_result, dtype_name, one_place
from ringrt.options import CallOptions, is_number
from ringrt.places import give_back, put_like
from ringrt.plan import Mask
from ringrt.plan.choose import check_names
from ringrt.plan.mask import is_whole
from ringrt.plan.partition import Array, unshard
from ringrt.registry import registry
from ringrt.ring_keys import key_of
from ringrt.transport import Transport


class Ring:
    """One rank's end of a ring of ranks. Every method but `close` is collective: all ranks
    call it, with the same options, in the same order.

    `partition` is contiguous, striped, zigzag or a plugin's; `schedule` ring, direct or auto
    (whichever moves fewer bytes); `backend` a backend's name, or auto for the best that runs here
    and supports the call; `timeout` the deadline of every wait for another rank, in seconds;
    `threads` the CPU threads of this rank, by default its share of the cores; `travel` what
    moves in backward: kv, q or auto (whichever moves fewer bytes). Use it as a context manager:
    leaving it by an exception tells the other ranks, which then raise `PeerLost` instead of
    waiting.
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
        travel: str = "auto",
    ) -> None:
        check_names(schedule, travel)
        if threads is not None and (not is_whole(threads) or threads < 1):
            raise ConfigError("threads", "a whole number of at least 1, or None", repr(threads))
        timeout = _timeout(timeout)
        rule = registry().partition(partition)
        options = RingOptions(rule, schedule, travel, timeout, threads)
        self._caller = Caller(transport, options, backend)
        self._transport = transport
        #: By which `ringrt.ring_keys.ring_of` finds this ring while it lives.
        self.key = key_of(self)
        #: What this rank did in the last pass; None before the first.
        self.stats: PassStats | None = None
        #: Called after every step of a pass.
        self.on_step: OnStep | None = None

    @classmethod
    def from_mpi(cls, comm: Any = None, *, transport: str = "mpi", **options: Any) -> Ring:
        """The ring of all processes that mpirun started, or of an mpi4py communicator.
        `transport` is what moves K,V: mpi, or nccl between GPUs. `options` as for `Ring`. Raises
        `TransportError` without mpi4py. Joining blocks inside MPI until every rank has come."""
        over = _over(transport, "mpi")
        if comm is None:
            end = registry().connect("mpi")
        else:
            from ringrt.transports.mpi import MpiTransport

            end = MpiTransport(comm)
        return cls.join(over(end), **options)

    @classmethod
    def from_process_group(
        cls, pg: Any = None, *, transport: str = "torch", timeout: float = 60.0, **options: Any
    ) -> Ring:
        """The ring of the ranks of a `torch.distributed` process group, of any backend; None is
        the default group, which is made from torchrun's environment if need be, with `timeout`.
        The ring's messages and the group's never meet. `transport` is what moves K,V: torch
        (between hosts, by gloo), or nccl between GPUs. `timeout` and `options` as for `Ring`;
        joining too is given up after `timeout` seconds, and `ExchangeTimeout` names the ranks
        that did not come. Raises `TransportError` without PyTorch."""
        over = _over(transport, "torch")
        from ringrt.transports.process_group import ProcessGroupTransport

        end = ProcessGroupTransport.of(pg, _timeout(timeout))
        return cls.join(over(end), timeout=timeout, **options)

    @classmethod
    def from_jax_distributed(
        cls, *, transport: str = "tcp", timeout: float = 60.0, **options: Any
    ) -> Ring:
        """The ring of all processes of multi-process JAX, after `jax.distributed.initialize()`.
        They find one another by JAX's coordination service. `transport` is what moves K,V: tcp,
        or nccl between GPUs. `timeout` and `options` as for `Ring`; joining too is given up after
        `timeout` seconds, and `ExchangeTimeout` names the ranks that did not come. Raises
        `TransportError` without JAX, or before it is initialised."""
        over, timeout = _over(transport, "tcp"), _timeout(timeout)
        from ringrt.transports.rendezvous_jax import JaxRendezvous
        from ringrt.transports.tcp import TcpTransport

        end = TcpTransport(JaxRendezvous(), timeout)
        return cls.join(over(end), timeout=timeout, **options)

    @classmethod
    def from_environment(cls, *, transport: str = "tcp", **options: Any) -> Ring:
        """The ring of the processes whose environments hold RINGRT_RANK, RINGRT_SIZE and
        RINGRT_RENDEZVOUS=host:port; rank 0 listens there. `transport` is what moves K,V: tcp, or
        nccl between GPUs. `options` as for `Ring`. `TransportUnavailable` names a variable that is
        missing or wrong, `ExchangeTimeout` the ranks that did not come."""
        over = _over(transport, "tcp")
        return cls.join(over(registry().connect("tcp")), **options)

    @classmethod
    def join(cls, transport: Transport, **options: Any) -> Ring:
        """A ring on a connected transport. If this rank's options are wrong the others, who may
        be at their first call already, are told."""
        try:
            return cls(transport, **options)
        except Exception as error:
            tell_failure(transport, error, 60.0)
            transport.close()
            raise

    @property
    def rank(self) -> int:
        """This rank."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._transport.size

    @property
    def timeout(self) -> float:
        """The deadline of every wait, in seconds."""
        return self._caller.options.timeout

    @property
    def transport(self) -> Transport:
        """What moves the bytes."""
        return self._transport

    @property
    def backend(self) -> str:
        """The backend asked for; may be set between calls, on one rank alone too."""
        return self._caller.backend

    @backend.setter
    def backend(self, name: str) -> None:
        self._caller.backend = name

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """What goes wrong inside, before a collective call, is told to the other ranks, which are
        about to make it and raise `RankMismatch`; for adapters."""
        return self._caller.telling()

    def shard(self, x: Any, axis: int = 1) -> Any:
        """This rank's rows of a whole array (the same on all ranks), cut along `axis`: 1 for
        q, k, v and out, 2 for lse. A view where the shard is one run of rows, else a copy; of the
        kind of x."""
        with self._caller.telling():
            array, give = _array_with_axis(x, axis)
            record = {"operation": "shard", "axis": axis, "length": array.shape[axis]}
        self._caller.agree(record)
        return give(self._caller.shard(array, axis))

    def cut(self, x: Any, axis: int = 1) -> Any:
        """As `shard`, without asking the other ranks whether they hold the like: not collective."""
        array, give = _array_with_axis(x, axis)
        return give(self._caller.shard(array, axis))

    def unshard(self, x: Any, axis: int = 1) -> Any:
        """The whole array, on every rank, from every rank's shard."""
        with self._caller.telling():
            array, give = _array_with_axis(x, axis)
            rest = list(array.shape[:axis] + array.shape[axis + 1 :])
            record = {"operation": "unshard", "axis": axis, "shape without the axis": rest}
            if not array.dtype.isnative or array.dtype.hasobject:
                raise ConfigError("x", "elements in this machine's byte order", array.dtype)
            record |= {"dtype": dtype_name(array), "local": [array.shape[axis]]}
        records = self._caller.agree(record)
        rows = [each["local"][0] for each in records]
        self._caller.check_shares("rows", rows)
        host = as_numpy("x", array)
        raw = gather(self._transport, np.ascontiguousarray(host).tobytes(), self.timeout)
        shards = [
            np.frombuffer(data, array.dtype).reshape(*rest[:axis], count, *rest[axis:])
            for data, count in zip(raw, rows, strict=True)
        ]
        return give(put_like(unshard(shards, self._caller.options.partition, axis), array))

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        window: Sequence[int | None] | None = None,
        documents: Any = None,
        prefix: int = 0,
        sink_tokens: int = 0,
        mask: Mask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Any = None,
        length: int | tuple[int, int] | None = None,
        **others: Any,
    ) -> tuple[Any, Any]:
        """Exact attention of this rank's queries over the keys of all ranks.

        q `[batch, rows, q_heads, head_dim]`, k `[batch, kv_rows, kv_heads, head_dim]`, v
        `[batch, kv_rows, kv_heads, value_dim]`: this rank's shards, one dtype of float16,
        bfloat16, float32, float64, any strides, on the host or one GPU: arrays of NumPy, CuPy,
        PyTorch, JAX, or any that are handed over by DLPack. They are read where they lie, and never
        written; the results are of the kind of q, on its device. A CUDA backend copies arrays of
        the host to its GPU and back; one of the host refuses those of a GPU. Returns out
        `[batch, rows, q_heads, value_dim]` in that dtype, and lse `[batch, q_heads, rows]`, natural
        logarithm, float32 (float64 for float64). A row that sees no key has out 0 and lse −inf.

        Who sees whom (docs/masks.md): `causal`; `window` (left, right), tokens visible on each
        side, None or −1 for all; `documents` as cu_seqlens `[n + 1]` or ranges `[n, 2]`, or a
        tuple (queries, keys) of these; the first `prefix` tokens are visible to all, the first
        `sink_tokens` also from beyond the left of a window, each per document; or a
        `ringrt.Mask` of your own in place of all these. Alignment is bottom-right, per document.

        `scale` is 1/√head_dim by default. `softcap` > 0 caps scores to
        softcap·tanh(score/softcap). `sink`: logits `[q_heads]`, the same on all ranks, that take
        part in every row's softmax with no value; a row without keys then has lse = its sink.
        `length`, an int or (q, kv), only checks the whole lengths.

        Raises `ConfigError` for wrong arguments and `Unsupported` for an option that is not
        implemented; on the other ranks that is a `RankMismatch`, as is any disagreement, all
        before data moves. While data moves: `ExchangeTimeout`, `PeerLost`, `KernelError`; the
        ring cannot be used after those.
        """
        with self._caller.telling():
            give = giver("q", q)
            q, k, v = take("q", q), take("k", k), take("v", v)
            shapes, place = check_arrays(q, k, v), one_place(q=q, k=k, v=v)
            named = {"causal": causal, "window": window, "documents": documents, "prefix": prefix,
                     "sink_tokens": sink_tokens, "mask": mask, "scale": scale, "softcap": softcap,
                     "sink": sink, "length": length}  # fmt: skip
            options = CallOptions.of("Ring.attention", shapes, named | others)
        call = self._caller.prepare("forward", shapes, place, options)
        with self._running(call, shapes) as run:
            q_here, k_here, v_here = (call.device.place(x) for x in (q, k, v))
            out, lse = forward(
                q_here, k_here, v_here, options.sink, call.problem, call.steps, call.backend, run
            )
            results = give_back(call.device, out, q), give_back(call.device, lse, q)
        return give(results[0]), give(results[1])

    def capture(self, q: Any, k: Any, v: Any, **options: Any) -> CapturedPass:
        """`attention` of arrays of a GPU as a CUDA graph: the pass is run once, then captured, and
        `replay()` on the result runs it again on what q, k and v then hold, with next to no work
        for the host. Collective, and so is each replay. Arguments as for `attention`; a call on
        the host, or with a transport other than nccl, is `Unsupported`."""
        with self._caller.telling():
            give = rewriter("q", q)
            q, k, v = take("q", q), take("k", k), take("v", v)
            shapes, place = check_arrays(q, k, v), one_place(q=q, k=k, v=v)
            given = CallOptions.of("Ring.capture", shapes, options)
        call = self._caller.prepare("forward", shapes, place, given)
        check_capturable(call, q=q, k=k, v=v)
        arrays = call.device.place(q), call.device.place(k), call.device.place(v)
        try:
            return CapturedPass(call, arrays, given.sink, self.timeout, q, give)
        except BaseException as error:
            self._transport.abort(str(error) or type(error).__name__)
            raise

    def attention_backward(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        dlse: Any = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """The gradients (dq, dk, dv) of this rank's shards, in the dtype of q, k and v, given
        dout, the gradient of out; with `sink` (dq, dk, dv, dsink), dsink `[q_heads]` in the
        dtype of sink, summed over all ranks. `dlse` is the gradient of lse; None is 0.

        out and lse are what `attention` returned on this rank, and `options` those of that call.
        Errors as for `attention`.
        """
        with self._caller.telling():
            give = giver("q", q)
            q, k, v = take("q", q), take("k", k), take("v", v)
            shapes = check_arrays(q, k, v)
            dout, out, lse = take("dout", dout), take("out", out), take("lse", lse)
            more = {} if dlse is None else {"dlse": take("dlse", dlse)}
            check_result(shapes, dout, out, lse, **more)
            place = one_place(q=q, k=k, v=v, dout=dout, out=out, lse=lse, **more)
            given = CallOptions.of("Ring.attention_backward", shapes, options)
        call = self._caller.prepare("backward", shapes, place, given, dlse=bool(more))
        device = call.device
        with self._running(call, shapes) as run:
            arrays = q, k, v, dout, out, lse
            needs_out = call.backend.needs_out
            tensors = Tensors.placed(device, arrays, more.get("dlse"), call.problem, needs_out)
            sums = backward(tensors, call.problem, call.steps, call.travel, call.backend, run)
            gradients: tuple[Array, ...] = tuple(give_back(device, x, q) for x in sums)
            if given.sink is not None and call.seen is not None:
                part = sink_part(device, given.sink, tensors, call.seen)
                dsink = sum_of_sinks(self._transport, part, given.sink.dtype, self.timeout)
                gradients += (put_like(dsink, q),)
        return tuple(map(give, gradients))

    def close(self) -> None:
        """Leave the ring in good order."""
        self._caller.close()
        self._transport.close()

    def stop_computing(self) -> None:
        """From another thread: break off what this rank computes."""
        self._caller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, RingrtError):
            self._transport.abort(f"{type(error).__name__}: {error}")
        self.close()

    @contextlib.contextmanager
    def _running(self, call: Prepared, shapes: Shapes) -> Iterator[Pass]:
        """A pass while data moves: whatever goes wrong here must reach the other ranks."""
        names = call.backend_name, call.operation, call.travel
        self.stats = PassStats(self.rank, *names, tokens=shapes.q_rows)
        observe = self._observe if self.on_step or registry().plugins.observed else None
        try:
            with call.device.running():
                yield Pass(
                    call.device, call.transport, self.stats, self.timeout, observe, call.shelf
                )
        except BaseException as error:
            self._transport.abort(str(error) or type(error).__name__)
            call.device.drain(self.timeout)
            raise

    def _observe(self, step: RingStep) -> None:
        if self.on_step is not None:
            self.on_step(step)
        registry().plugins.ring_step(step)


def _over(transport: str, control: str) -> Callable[[Transport], Transport]:
    """What makes an end of `transport` from one of `control`, which may be the same."""
    over = registry().transport(transport).over
    if transport != control and over is None:
        raise ConfigError("transport", f"{control}, or one that works over it", repr(transport))
    registry().transport(control)
    return over or (lambda end: end)


def _array_with_axis(x: Any, axis: int) -> tuple[Array, Give]:
    give, array = giver("x", x), take("x", x)
    if not isinstance(axis, int) or not 0 <= axis < array.ndim:
        raise ConfigError("axis", f"an axis of an array of {array.ndim} dimensions", axis)
    return array, give


def _timeout(value: Any) -> float:
    if is_number(value) and 0 < value < math.inf:
        return min(float(value), threading.TIMEOUT_MAX)
    raise ConfigError("timeout", "a number of seconds > 0", repr(value))
