"""Thread ranks: a ring inside one process, and attention over whole arrays on top of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ringrt.dlpack import giver, take
from ringrt.errors import ConfigError, PeerLost, RankMismatch
from ringrt.inputs import check_arrays, check_result, one_place
from ringrt.places import unshard_like, wait_for_caller
from ringrt.plan.mask import is_whole
from ringrt.plan.partition import Array
from ringrt.registry import registry
from ringrt.ring import Ring
from ringrt.transport import Transport

Result = TypeVar("Result")


def run_threads(
    fn: Callable[[Ring], Result],
    ranks: int,
    *,
    transport: str = "threads",
    timeout: float = 60.0,
    **options: Any,
) -> list[Result]:
    """Call `fn(ring)` on `ranks` thread ranks; their results, in rank order.

    `options` as for `Ring`. If ranks fail, the exception of the one that failed first on its
    own account is raised, with the rank in its notes. A rank that neither returns nor fails
    within `timeout` seconds of that is left behind (its thread is a daemon).
    """
    if not is_whole(ranks) or ranks < 1:
        raise ConfigError("ranks", "a whole number of at least 1", repr(ranks))
    job = _Job(fn, {"timeout": timeout, **options})
    ends = registry().group(transport, int(ranks))
    threads = [
        threading.Thread(target=job.run, args=(end,), name=f"ringrt-{end.rank}", daemon=True)
        for end in ends
    ]
    for thread in threads:
        thread.start()
    try:
        _join(threads, job, timeout)
    except BaseException:
        ends[0].abort("interrupted")
        for ring in list(job.rings):
            ring.stop_computing()
        raise
    if job.failures:
        rank, error = job.first_failure()
        error.add_note(f"on rank {rank}")
        raise error
    return [job.results[rank] for rank in range(ranks)]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    ranks: int,
    partition: str = "striped",
    schedule: str = "auto",
    backend: str = "auto",
    transport: str = "threads",
    timeout: float = 60.0,
    **options: Any,
) -> tuple[Any, Any]:
    """Attention over whole arrays, on `ranks` thread ranks. Shapes, kinds and `options` as for
    `Ring.attention`; returns the whole out and lse."""
    give = giver("q", q)
    arrays = [take(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    check_arrays(*arrays)
    wait_for_caller(one_place(q=arrays[0], k=arrays[1], v=arrays[2]))
    rule = registry().partition(partition)

    def on_rank(ring: Ring) -> tuple[Array, Array]:
        return ring.attention(*map(ring.cut, arrays), **options)

    results = run_threads(
        on_rank,
        ranks,
        partition=partition,
        schedule=schedule,
        backend=backend,
        transport=transport,
        timeout=timeout,
    )
    outs, lses = zip(*results, strict=True)
    return give(unshard_like(outs, rule)), give(unshard_like(lses, rule, axis=2))


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    ranks: int,
    partition: str = "striped",
    schedule: str = "auto",
    travel: str = "auto",
    backend: str = "auto",
    transport: str = "threads",
    timeout: float = 60.0,
    **options: Any,
) -> tuple[Any, ...]:
    """The gradients over whole arrays, on `ranks` thread ranks: (dq, dk, dv), or with `sink`
    (dq, dk, dv, dsink). Shapes and `options` as for `Ring.attention_backward`."""
    names = ("dout", "q", "k", "v", "out", "lse")
    give = giver("q", q)
    arrays = [take(n, x) for n, x in zip(names, (dout, q, k, v, out, lse), strict=True)]
    more = {} if dlse is None else {"dlse": take("dlse", dlse)}
    check_result(check_arrays(*arrays[1:4]), arrays[0], *arrays[4:], **more)
    wait_for_caller(one_place(**dict(zip(names, arrays, strict=True)), **more))
    rule = registry().partition(partition)

    def on_rank(ring: Ring) -> tuple[Array, ...]:
        shards = [*map(ring.cut, arrays[:5]), ring.cut(arrays[5], axis=2)]
        own = None if dlse is None else ring.cut(more["dlse"], axis=2)
        return ring.attention_backward(*shards, dlse=own, **options)

    results = run_threads(
        on_rank,
        ranks,
        partition=partition,
        schedule=schedule,
        travel=travel,
        backend=backend,
        transport=transport,
        timeout=timeout,
    )
    gradients = list(zip(*results, strict=True))
    wholes = [unshard_like(shards, rule) for shards in gradients[:3]]
    return tuple(map(give, (*wholes, *(x[0] for x in gradients[3:]))))


@dataclass(slots=True)
class _Job:
    """What the thread ranks of one `run_threads` leave behind."""

    fn: Callable[[Ring], Any]
    options: dict[str, Any]
    results: dict[int, Any] = field(default_factory=dict)
    rings: list[Ring] = field(default_factory=list)
    #: In the order in which they happened.
    failures: list[tuple[int, BaseException]] = field(default_factory=list)

    def run(self, end: Transport) -> None:
        try:
            with Ring(end, **self.options) as ring:
                self.rings.append(ring)
                self.results[end.rank] = self.fn(ring)
        except BaseException as error:
            self.failures.append((end.rank, error))
            end.abort(str(error) or type(error).__name__)

    def first_failure(self) -> tuple[int, BaseException]:
        """The first that is not the echo of another rank's."""
        for echoes in ((PeerLost, RankMismatch), (PeerLost,), ()):
            own = [item for item in self.failures if not isinstance(item[1], echoes)]
            if own:
                return own[0]
        return self.failures[0]


def _join(threads: list[threading.Thread], job: _Job, timeout: float) -> None:
    """Wait for all threads, or for `timeout` seconds after a failure."""
    failed_at: float | None = None
    while alive := [thread for thread in threads if thread.is_alive()]:
        alive[0].join(0.05)
        if job.failures and failed_at is None:
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > timeout:
            return
