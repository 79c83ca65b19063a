"""The function: arguments checked, and what stands for its gradients.

Outside `jax.jit` the arrays go to the ring by DLPack, on the host or a GPU. Inside, on the CPU, XLA
calls back into Python with NumPy arrays. docs/jax.md says what works under which transformation.
"""

# JAX gives types to few of its functions.
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ringrt.dlpack import take
from ringrt.errors import ConfigError
from ringrt.inputs import Shapes, as_numpy, check_arrays
from ringrt.jax.passes import RingCall, attention_p, backward_p, failures, forget_failed_programs
from ringrt.options import CallOptions
from ringrt.plan import Mask
from ringrt.ring import Ring

#: The operands that have gradients, in their order. Without a sink there are three.
_NAMES = ("q", "k", "v", "sink")


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    ring: Ring,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    documents: Any = None,
    prefix: int = 0,
    sink_tokens: int = 0,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: jax.Array | None = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention of this rank's queries over the keys of all ranks, and its gradients.

    q `[batch, rows, q_heads, head_dim]`, k `[batch, kv_rows, kv_heads, head_dim]`, v
    `[batch, kv_rows, kv_heads, value_dim]`: this rank's shards, of JAX (traced or not) or NumPy.
    Returns out `[batch, rows, q_heads, value_dim]` in their dtype; with `return_lse` (out, lse),
    lse `[batch, q_heads, rows]` in float32 (float64 for float64). Options as for `Ring.attention`;
    all but `sink` are fixed when JAX traces the call, so none of them may be a traced value.

    Reverse mode goes through q, k, v and `sink`, from out and lse. The gradient of `sink` is the
    whole sum over all ranks, on every rank: where gradients of weights are summed over ranks, leave
    it out. The gradients of q, k and v are those of the rank's own shards.

    Raises what `Ring.attention` raises, and tells the other ranks. Wrong arguments are found when
    JAX traces the call; what goes wrong inside `jax.jit` later is a `jax.errors.JaxRuntimeError`
    with the text of the original, which `original_errors` brings back. `Unsupported` inside
    `jax.jit` for anything but the CPU, for second derivatives, for `sink` under `jax.vmap`, and for
    thread ranks that are more than the workers of JAX's CPU client.
    """
    if not isinstance(ring, Ring):
        raise ConfigError("ring", "a ringrt.Ring", repr(ring))
    with _telling(ring):
        operands = _arrays(q=q, k=k, v=v, **({} if sink is None else {"sink": sink}))
        window = tuple(window) if isinstance(window, list) else window
        named = {"causal": causal, "window": window, "documents": _static(documents),
                 "prefix": prefix, "sink_tokens": sink_tokens, "mask": mask, "scale": scale,
                 "softcap": softcap}  # fmt: skip
        _check(check_arrays(*operands[:3]), named, sink)
    out, lse = _attention(RingCall(ring, named), operands)
    return (out, lse) if return_lse else out


@contextlib.contextmanager
def original_errors(ring: Ring) -> Iterator[None]:
    """Around calls of jitted functions: what the ring raised inside of them comes out as it was,
    and not as a `jax.errors.JaxRuntimeError`. Leaving waits for the passes under way, and after
    an error JAX forgets the failed program, on which it would otherwise make all later passes of
    this thread wait, and fail."""
    failures.pop(ring, None)
    try:
        yield
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        forget_failed_programs()
        original = failures.pop(ring, None)
        if original is None:
            raise
        raise original from error


@contextlib.contextmanager
def _telling(ring: Ring) -> Iterator[None]:
    """As `Ring.telling`, but behind the passes of programs under way: one thread at a time."""
    with ring.telling():
        try:
            yield
        except Exception:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.effects_barrier()
            raise


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: RingCall, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """out and lse, given q, k, v and, if there is one, sink."""
    out, lse = attention_p.bind(*operands, call=call, names=_NAMES[: len(operands)])
    return out, lse


def _forward(call: RingCall, operands: tuple[Any, ...]) -> tuple[Any, Any]:
    arrays = tuple(operand.value for operand in operands)
    out, lse = attention_p.bind(*arrays, call=call, names=_NAMES[: len(arrays)])
    return (out, lse), (arrays, out, lse)


def _backward(call: RingCall, kept: tuple[Any, ...], gradients: tuple[Any, Any]) -> tuple[Any]:
    """The gradients of the operands. That of lse is left out where JAX knows that it is 0."""
    (operands, out, lse), (dout, dlse) = kept, gradients
    given = dict(zip(_NAMES, operands, strict=False))
    given |= {"dout": _instantiated(dout), "out": out, "lse": lse}
    if not isinstance(dlse, SymbolicZero):
        given["dlse"] = dlse
    return (tuple(backward_p.bind(*given.values(), call=call, names=tuple(given))),)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


def _instantiated(gradient: Any) -> Any:
    if isinstance(gradient, SymbolicZero):
        return jax.numpy.zeros(gradient.shape, gradient.dtype)
    return gradient


def _arrays(**arrays: Any) -> tuple[Any, ...]:
    """As JAX arrays; what JAX traces counts as one."""
    return tuple(
        x if isinstance(x, jax.Array) else _from_numpy(name, x) for name, x in arrays.items()
    )


def _from_numpy(name: str, x: Any) -> jax.Array:
    if not isinstance(x, np.ndarray):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise ConfigError(name, "an array of JAX or NumPy", f"a {kind}")
    array = jax.numpy.asarray(take(name, x))
    if array.dtype != x.dtype:
        raise ConfigError(name, "no 64-bit array while jax_enable_x64 is off", x.dtype)
    return array


def _static(documents: Any) -> Any:
    """On the host, and the caller's to change no more: a jitted function calls with it later."""
    if isinstance(documents, tuple):
        return tuple(map(_static, documents))
    if isinstance(documents, jax.core.Tracer):
        expected = "a list, a NumPy array, or a JAX array made outside of what JAX traces"
        raise ConfigError("documents", expected, "a traced array")
    on_device = hasattr(documents, "__dlpack__")
    return copy.deepcopy(as_numpy("documents", documents) if on_device else documents)


def _check(shapes: Shapes, named: Mapping[str, Any], sink: Any) -> None:
    """As the ring does when it is called, but on what is known of a traced array."""
    like = {} if sink is None else {"sink": np.empty(sink.shape, sink.dtype)}
    CallOptions.of("ringrt.jax.ring_attention", shapes, {**named, **like})
