"""A pass as a CUDA graph: queued once, launched as often as one likes.

For short steps the host's queueing takes longer than the GPU's work; a graph takes it away. It
reads q, k and v where they lay when it was captured, and writes out and lse where they lie: what
is to be computed next is copied into the one, and taken from the other before the next launch.
"""

from __future__ import annotations

import time
from typing import Any

from ringrt.calls import Prepared
from ringrt.device.cuda import Arena, CudaDevice
from ringrt.dlpack import Give
from ringrt.engine.compute import Pass
from ringrt.engine.forward import forward
from ringrt.engine.stats import PassStats
from ringrt.errors import ExchangeTimeout, RingrtError, TransportError, Unsupported
from ringrt.places import give_back
from ringrt.plan.partition import Array


class CapturedPass:
    """A forward pass of one rank. `replay` is collective. `arrays` are q, k and v on the GPU, and
    results are of the dtype of `like`, the caller's q, and what `give` makes of them."""

    def __init__(
        self,
        call: Prepared,
        arrays: tuple[Array, Array, Array],
        sink: Array | None,
        timeout: float,
        like: Array,
        give: Give,
    ) -> None:
        assert isinstance(call.device, CudaDevice)
        self._call, self._arrays, self._timeout = call, arrays, timeout
        self._device, self._arena = call.device, Arena()
        # A pass as usual makes the arrays, compiles, and uploads what the kernels need.
        with self._device.running():
            self._pass(sink)
            with self._device.capture() as graphs:
                out, lse = self._pass(sink)
        self.out, self.lse = (give(give_back(self._device, x, like)) for x in (out, lse))
        self._graph: Any = graphs[0]
        # NCCL's communicator cannot be left while a graph holds it.
        call.transport.keep_graph(self)
        self._uploads = self._device.uploaded()

    def replay(self) -> tuple[Any, Any]:
        """Run it again on what q, k and v now hold; out and lse, always the same two arrays."""
        transport = self._call.transport
        try:
            if self._graph is None:
                raise TransportError("this captured pass ended with its ring")
            with self._device.running():
                self._graph.launch(self._device.stream)
                deadline = time.monotonic() + self._timeout * max(1, len(self._call.steps))
                self._device.wait(lambda: self._check(deadline))
        except RingrtError as error:
            self.release()
            transport.abort(str(error))
            self._device.drain(self._timeout)
            raise
        return self.out, self.lse

    def release(self) -> None:
        """Give up the graph; it cannot be replayed any more."""
        self._graph = None

    def _pass(self, sink: Array | None) -> tuple[Array, Array]:
        call, stats = self._call, PassStats(self._call.transport.rank, self._call.backend_name)
        run = Pass(self._device, call.transport, stats, self._timeout)
        with self._device.keeping(self._arena):
            return forward(*self._arrays, sink, call.problem, call.steps, call.backend, run)

    def _check(self, deadline: float) -> None:
        self._call.transport.poll()
        if time.monotonic() > deadline:
            raise ExchangeTimeout(
                f"rank {self._call.transport.rank} waited {self._timeout:g} s for each of the "
                f"{len(self._call.steps)} ring steps of a captured pass"
            )


def check_capturable(call: Prepared, **arrays: Any) -> None:
    """`Unsupported` unless the host takes no part in the pass."""
    if call.device.kind != "cuda":
        raise Unsupported(f"capture: not implemented on backend {call.backend_name}, of the host")
    if any(not hasattr(x, "device") or not hasattr(x.data, "ptr") for x in arrays.values()):
        raise Unsupported("capture: not implemented for arrays of the host; pass CuPy arrays")
    if call.transport.size > 1 and not call.transport.captures:
        raise Unsupported(
            "capture: not implemented with this transport, in which the host takes part; use nccl"
        )
