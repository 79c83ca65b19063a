"""The passes of a ring as primitives of JAX: called directly, or back from a compiled program.

Ranks must make the same passes in the same order. XLA drops a call without side effects whose
results are empty or unused, and nothing orders two that do not depend on one another. So both
primitives carry an *ordered effect*: JAX passes a token through all of them in a program, and from
one program of a thread to the next, and the call that XLA makes is one with a side effect.
`jax.experimental.io_callback(ordered=True)` does the same, but is refused by `jax.checkpoint`;
this effect is one that it lets through, and never repeats: what such a call returned is kept.

That effects may be of a kind of one's own has no public name: what is used here is that of JAX
0.10.2.
"""

# JAX gives types to few of its functions.
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringrt.calls import available_cores
from ringrt.errors import BackendUnavailable, Unsupported
from ringrt.inputs import check_arrays
from ringrt.plan.problem import state_dtype
from ringrt.ring import Ring
from ringrt.transports.threads import ThreadTransport

_TESTED = "0.10.2"

try:
    from jax._src.dispatch import runtime_tokens
    from jax._src.effects import (
        Effect,
        control_flow_allowed_effects,
        custom_derivatives_allowed_effects,
        lowerable_effects,
        ordered_effects,
        remat_allowed_effects,
    )
except ImportError as error:
    raise BackendUnavailable(
        f"JAX {jax.__version__} is not one that ringrt.jax works with, as {_TESTED} is: {error}"
    ) from error


class _RingPass(Effect):
    """The effect of a pass. JAX names it where a program has several devices."""

    def __repr__(self) -> str:
        return "ringrt.jax.ring_attention, of which each device would be a rank of its own"


_PASS = _RingPass()
for _allowed in (
    ordered_effects,
    lowerable_effects,
    control_flow_allowed_effects,
    custom_derivatives_allowed_effects,
    remat_allowed_effects,
):
    _allowed.add_type(_RingPass)

#: What a ring raised last inside a compiled program, where JAX keeps no more than its text.
failures: weakref.WeakKeyDictionary[Ring, BaseException] = weakref.WeakKeyDictionary()


def forget_failed_programs() -> None:
    """Make the next program of this thread wait for none before it."""
    runtime_tokens.clear()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RingCall:
    """One call of `ring_attention`; `options` are all but the sink. Arrays go by the names that
    the methods of `Ring` give them."""

    ring: Ring
    options: Mapping[str, Any] = field(repr=False)

    def __call__(self, names: Sequence[str], *arrays: Any) -> tuple[Any, ...]:
        """out and lse of q, k, v; with dout among the names the gradients. Of the kind of q."""
        ring = self.ring
        run = ring.attention_backward if "dout" in names else ring.attention
        return run(**dict(zip(names, arrays, strict=True)), **self.options)

    def from_program(self, names: Sequence[str], *arrays: Any) -> tuple[Any, ...]:
        """The same, with NumPy arrays that are XLA's; an error is kept for `failures`."""
        try:
            return self(names, *arrays)
        except BaseException as error:
            failures[self.ring] = error
            raise


#: Operands are arrays by the names in the parameter `names`, results as those of `RingCall`.
attention_p = Primitive("ring_attention")
backward_p = Primitive("ring_attention_backward")


def _run(*arrays: Any, call: RingCall, names: tuple[str, ...]) -> list[Any]:
    """Outside of any program: behind the passes of programs that are still under way."""
    jax.effects_barrier()
    return list(call(names, *arrays))


def _forward_results(*avals: Any, call: RingCall, names: tuple[str, ...]) -> tuple[Any, Any]:
    shapes = check_arrays(*avals[:3])
    out = shapes.batch, shapes.q_rows, shapes.q_heads, shapes.value_dim
    lse = shapes.batch, shapes.q_heads, shapes.q_rows
    state = np.dtype(state_dtype(shapes.dtype))
    return [ShapedArray(out, avals[0].dtype), ShapedArray(lse, state)], {_PASS}


def _backward_results(*avals: Any, call: RingCall, names: tuple[str, ...]) -> tuple[Any, Any]:
    like = [x for name, x in zip(names, avals, strict=True) if name in ("q", "k", "v", "sink")]
    return [ShapedArray(x.shape, x.dtype) for x in like], {_PASS}


def _lower_for_cpu(ctx: Any, *operands: Any, call: RingCall, names: tuple[str, ...]) -> Any:
    """A call back into Python, which takes JAX's token and gives it on."""
    _check_workers(call.ring)
    results, token, _ = mlir.emit_python_callback(
        ctx,
        functools.partial(call.from_program, names),
        ctx.tokens_in.get(_PASS),
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=True,
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_PASS: token})))
    return results


def _refuse_to_lower(ctx: Any, *operands: Any, call: RingCall, names: tuple[str, ...]) -> Any:
    where = " and ".join(ctx.module_context.platforms)
    raise Unsupported(
        f"ring_attention inside jax.jit on {where}: it would be a call back into Python by way of "
        f"the host; call it outside of jax.jit, where the arrays are handed over on the GPU"
    )


def _check_workers(ring: Ring) -> None:
    """Each thread rank may hold a worker of JAX's CPU client while it waits for those that still
    compute, for which they need one."""
    if not isinstance(ring.transport, ThreadTransport):
        return
    if ring.size > workers():
        raise Unsupported(
            f"ring_attention inside jax.jit on {ring.size} thread ranks: JAX's CPU client has "
            f"{workers()} workers, of which each rank may hold one while it waits for the others; "
            f'call jax.config.update("jax_num_cpu_devices", {ring.size}) before JAX is first '
            f"used, or start a process for each rank"
        )


def workers() -> int:
    """The worker threads of JAX's CPU client: one a core, or one a device where these are more. XLA
    takes NPROC, where it is set, for the number of cores."""
    given = os.environ.get("NPROC", "")
    cores = int(given) if given.isdigit() else available_cores()
    return max(cores, jax.local_device_count("cpu"))


def _fold_into_batch(
    primitive: Primitive, arrays: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[int]]:
    """Under `jax.vmap`: the mapped axis becomes a part of the batch."""
    if "sink" in params["names"]:
        _refuse(params["call"], "sink under jax.vmap")
    [count] = {x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None}
    apart = [
        jnp.broadcast_to(x, (count, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    batch = apart[0].shape[1]
    folded = [x.reshape(count * batch, *x.shape[2:]) for x in apart]
    results = primitive.bind(*folded, **params)
    return [x.reshape(count, batch, *x.shape[1:]) for x in results], [0] * len(results)


def _refuse_to_differentiate(*_: Any, call: RingCall, **__: Any) -> Any:
    _refuse(call, "second derivatives")


def _refuse(call: RingCall, what: str) -> NoReturn:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
    with call.ring.telling():
        raise Unsupported(f"{what}: not implemented in ringrt.jax.ring_attention")


def _define(primitive: Primitive, results: Callable[..., Any]) -> None:
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_effectful_abstract_eval(results)
    # Not cacheable, as JAX's own calls back into Python are not.
    mlir.register_lowering(primitive, _lower_for_cpu, platform="cpu", cacheable=False)
    mlir.register_lowering(primitive, _refuse_to_lower, cacheable=False)
    batching.primitive_batchers[primitive] = functools.partial(_fold_into_batch, primitive)
    ad.primitive_jvps[primitive] = _refuse_to_differentiate


_define(attention_p, _forward_results)
_define(backward_p, _backward_results)
