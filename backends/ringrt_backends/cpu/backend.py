"""The cpu backend: it chooses between compiled tiles and the plain path, and passes the verbs
on."""

from __future__ import annotations

from functools import cache

from ringrt.backend import Stream
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import TileTable
from ringrt_backends.cpu.compiled import forward_code
from ringrt_backends.cpu.machine import WITHOUT, Machine, asked_for, this_machine
from ringrt_backends.cpu.plain import Plain, PlainGrads, PlainState
from ringrt_backends.cpu.tiled_backward import TiledBackward, TiledGrads
from ringrt_backends.cpu.tiled_forward import TiledForward, TiledState
from ringrt_backends.cpu.warm import compile_drivers
from ringrt_backends.cpu.workers import Workers

#: With this and `layout.ORDINARY` numbers, no score is beyond float32.
_LARGEST_FACTOR = 1e6


class CpuBackend:
    """See `ringrt.backend.Backend`. `threads` workers of its own; one runs in the caller. Tiles
    are compiled for `machine`; None takes the plain path throughout."""

    backward = True
    needs_out = False

    def __init__(self, threads: int, machine: Machine | None) -> None:
        self._workers = Workers(threads)
        self._plain = Plain(self._workers)
        self.machine = machine
        if machine is not None:
            self._forward = TiledForward(machine, self._workers)
            self._backward = TiledBackward(machine, self._workers)

    @property
    def native_bfloat16(self) -> bool:
        """Whether bf16 is multiplied by instructions of its own, and not widened."""
        return self.machine is not None and self.machine.pairs == "native"

    def flop_limit(self, dtype: str) -> float | None:
        """FLOP/s of the multiply-add units of one core, measured; None where there is no compiled
        code for the dtype."""
        from ringrt_backends.cpu.limit import flop_limit

        return None if self.machine is None else flop_limit(self.machine, dtype)

    def supports(self, problem: Problem) -> str | None:
        """Everything a `Problem` can say."""
        return None

    def prepare(self, problem: Problem) -> None:
        """Compile the kernels for the problem's heads and dtype."""
        if self.machine is None or not self._tiled(problem):
            self._plain.prepare(problem)
            return
        compile_drivers(self.machine, problem)
        self._forward.code(problem)
        self._backward.code(problem)

    def begin(
        self, q: Array, problem: Problem, sink: Array | None = None, stream: Stream = None
    ) -> TiledState | PlainState:
        """The empty state, or that of the sink."""
        path = self._forward if self._tiled(problem) else self._plain
        return path.begin(q, problem, sink)

    def accumulate(
        self,
        state: TiledState | PlainState,
        k: Array,
        v: Array,
        tiles: TileTable,
        stream: Stream = None,
    ) -> None:
        """Absorb all tiles, the rows with the most work first."""
        if isinstance(state, TiledState):
            self._forward.accumulate(state, k, v, tiles)
        else:
            self._plain.accumulate(state, k, v, tiles)

    def finish(self, state: TiledState | PlainState, stream: Stream = None) -> tuple[Array, Array]:
        """out in the dtype of q, lse in the problem's state dtype."""
        if isinstance(state, TiledState):
            return self._forward.finish(state)
        return self._plain.finish(state)

    def begin_backward(
        self,
        q: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        problem: Problem,
        stream: Stream = None,
        out: Array | None = None,
    ) -> TiledGrads | PlainGrads:
        """dq is 0 so far."""
        if self._tiled(problem):
            return self._backward.begin(q, dout, lse, delta, problem)
        return self._plain.begin_backward(q, dout, lse, delta, problem)

    def accumulate_backward(
        self,
        grads: TiledGrads | PlainGrads,
        k: Array,
        v: Array,
        dk: Array,
        dv: Array,
        tiles: TileTable,
        stream: Stream = None,
    ) -> None:
        """Add the gradients of all tiles."""
        if isinstance(grads, TiledGrads):
            self._backward.accumulate(grads, k, v, dk, dv, tiles)
        else:
            self._plain.accumulate_backward(grads, k, v, dk, dv, tiles)

    def finish_backward(self, grads: TiledGrads | PlainGrads, stream: Stream = None) -> Array:
        """dq `[batch, rows, q_heads, head_dim]` in the state dtype."""
        if isinstance(grads, TiledGrads):
            return self._backward.finish(grads)
        return self._plain.finish_backward(grads)

    def close(self) -> None:
        """End the workers, also in the midst of their work."""
        self._workers.close()

    def _tiled(self, problem: Problem) -> bool:
        """Whether the compiled tiles are for this problem: not for float64, nor for factors of
        the scores that are 0 or no usual float32."""
        factors = (abs(problem.scale), problem.softcap or 1.0)
        usual = all(1e-30 < factor < _LARGEST_FACTOR for factor in factors)
        return self.machine is not None and problem.dtype != "float64" and usual


@cache
def code_in_use() -> tuple[Machine | None, str]:
    """The machine that code is compiled for, and that in words; None for plain Numba, and why."""
    without = asked_for()
    machine = this_machine(without)
    if machine is None:
        why = f"{WITHOUT}={','.join(without)}" if without else "no vector code for this machine"
        return None, f"plain Numba ({why})"
    try:
        forward_code(machine, 1, 1, "float32", False)
    except RuntimeError as error:  # LLVM's own words
        first = str(error).partition("\n")[0]
        return None, f"plain Numba (LLVM does not compile for {machine.name}: {first})"
    return machine, str(machine)
