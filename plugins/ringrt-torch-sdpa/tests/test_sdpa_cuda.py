"""`torch-sdpa-cuda` on stand-ins for its operators: which is called, with what, and what is made
of what they return."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ringrt_torch_sdpa.choose import Machine
from ringrt_torch_sdpa.cuda import VARIABLE, CudaSdpa, machine_of
from ringrt_torch_sdpa.kernels import Cudnn, Flash, deterministic
from ringrt_torch_sdpa.schemas import CUDNN, EFFICIENT, FLASH
from sdpa_stand_ins import STAND_INS, real
from sdpa_support import HOPPER, INF, backward, close, exact, forward, inputs, problem_of, tile_of

import ringrt
from ringrt.device.cuda import CudaDevice
from ringrt.device.host import HOST
from ringrt.errors import Unsupported
from ringrt.plan.mask import UNBOUNDED

AMPERE = Machine(capability=80, cudnn=91700, flash=True, efficient=True)
NARROW = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 5e-6}


def both(arrays, machine=HOPPER, scale=0.25, **bounds):
    """out, lse, dq, dk and dv."""
    problem, tile = problem_of(arrays[0], arrays[2], scale), tile_of(*arrays[:2], **bounds)
    backend = CudaSdpa(HOST, machine, STAND_INS)
    assert backend.supports(problem) is None
    result = forward(backend, *arrays[:3], problem, [tile])
    return *result, *backward(backend, arrays, result, problem, [tile])


def names(calls):
    return [name for name, *_ in calls]


@pytest.mark.parametrize(
    ("dtype", "machine", "expected"),
    [
        ("bfloat16", HOPPER, [CUDNN, f"{FLASH}_backward"]),
        ("float16", AMPERE, [FLASH, f"{FLASH}_backward"]),
        ("float32", HOPPER, [EFFICIENT, f"{EFFICIENT}_backward"]),
    ],
)
def test_each_pass_by_the_kernel_that_is_chosen(calls, dtype, machine, expected):
    arrays = inputs(40, dtype=dtype)
    got = both(arrays, machine, lower=0)
    assert names(calls) == expected
    close(got, exact(arrays, tile_of(*arrays[:2], lower=0)), 3 * NARROW[dtype])


@pytest.mark.parametrize("only", ["cudnn", "flash", "efficient"])
def test_a_kernel_that_is_asked_for_does_both(calls, monkeypatch, only):
    monkeypatch.setenv(VARIABLE, only)
    arrays = inputs(40, dtype="float16")
    got = both(arrays)
    name = {"cudnn": CUDNN, "flash": FLASH, "efficient": EFFICIENT}[only]
    assert names(calls) == [name, f"{name}_backward"]
    close(got, exact(arrays, tile_of(*arrays[:2])), 3 * NARROW["float16"])


def test_what_such_a_kernel_refuses_names_the_variable(monkeypatch):
    monkeypatch.setenv(VARIABLE, "flash")
    q, _, v, _ = inputs(4)
    answer = CudaSdpa(HOST, HOPPER, STAND_INS).supports(problem_of(q, v))
    assert answer == "RINGRT_TORCH_SDPA=flash: flash: float32: it takes float16 and bfloat16"


def test_a_part_of_one_key_does_not_go_to_cudnn(calls):
    arrays = inputs(40, 1, dtype="float16")
    got = both(arrays)
    assert names(calls) == [FLASH, f"{FLASH}_backward"]
    close(got, exact(arrays, tile_of(*arrays[:2])), 3 * NARROW["float16"])


@pytest.mark.parametrize("bounds", [{"upper": 0}, {"upper": 9}, {"lower": -3, "upper": 6}])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bands_are_squares_turned_around_where_need_be(calls, dtype, bounds):
    arrays = inputs(40, 43, dtype=dtype)
    got = both(arrays, **bounds)
    close(got, exact(arrays, tile_of(*arrays[:2], **bounds)), 4 * NARROW[dtype])
    for name, args, _ in calls:
        q, k = args[1:3] if name.endswith("backward") else args[:2]
        causal = next(x for x in args[::-1] if isinstance(x, bool))
        if name.startswith(CUDNN) and not name.endswith("backward"):
            causal = args[6]
        assert not causal or q.shape[2] == k.shape[2]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("dims", [(12, 20), (20, 12), (5, 3), (40, 16)])
def test_dims_are_padded_to_what_kernels_take(calls, dtype, dims):
    arrays = inputs(24, dtype=dtype, dims=dims)
    got = both(arrays, lower=0)
    assert (got[0].shape[3], got[2].shape[3], got[4].shape[3]) == (dims[1], dims[0], dims[1])
    close(got, exact(arrays, tile_of(*arrays[:2], lower=0)), 3 * NARROW[dtype])


@pytest.mark.parametrize("machine", [HOPPER, AMPERE])
def test_what_is_aligned_is_not_copied(calls, machine):
    q, k, v, dout = inputs(24, dtype="float16")
    both((q, k, v, dout), machine)
    _, args, _ = calls[0]
    assert [x.data_ptr() for x in args[:3]] == [x.ctypes.data for x in (q, k, v)]


def test_what_is_not_aligned_is_copied():
    for width, first in ((17, 1), (17, 0), (24, 4)):
        wide = inputs(24, dtype="float16", dims=(width, width))
        arrays = [x[..., first : first + 16] for x in wide]
        got = both(arrays, lower=0)
        close(got, exact(arrays, tile_of(*arrays[:2], lower=0)), 3 * NARROW["float16"])


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_is_never_below_0_for_a_kernel(calls, scale):
    arrays = inputs(24, dtype="float32")
    got = both(arrays, scale=scale, lower=0)
    assert all(options["scale"] > 0 for _, _, options in calls)
    close(got, exact(arrays, tile_of(*arrays[:2], lower=0), scale), 2e-5)


@pytest.mark.parametrize(("dtype", "machine"), [("float16", AMPERE), ("float32", HOPPER)])
def test_rows_of_endless_scores_are_empty(dtype, machine):
    """Flash says +inf of them, the memory-efficient kernel 0."""
    q, k, v, dout = inputs(8, 6, dtype=dtype)
    q[:, :4], k[:] = 1, -INF
    # Row 4 sees a score of 0 for every key, and has to be told from the others.
    q[:, 4:], k[..., 1:], q[:, 4:, :, 0] = 1, 0, 0
    problem, tile = problem_of(q, v), tile_of(q, k)
    backend = CudaSdpa(HOST, machine, STAND_INS)
    out, lse = forward(backend, q, k, v, problem, [tile._replace(q1=4)])
    assert np.isneginf(lse[..., :4]).all()
    assert (out[:, :4] == 0).all()
    dq, dk, dv = backward(backend, (q, k, v, dout), (out, lse), problem, [tile._replace(q1=4)])
    assert (dq[:, :4] == 0).all()
    assert (dv == 0).all()
    assert (dk == 0).all()


def test_scores_of_0_are_not_taken_for_endless_ones():
    q, k, v, _ = inputs(8, 1)
    q[:], v[:] = 0, 0
    out, lse = forward(
        CudaSdpa(HOST, HOPPER, STAND_INS), q, k, v, problem_of(q, v), [tile_of(q, k)]
    )
    assert (lse == 0).all()
    assert (out == 0).all()


def test_nan_stays_nan_where_flash_says_infinity():
    q, k, v, _ = inputs(8, 6, dtype="float16")
    q[:, 3] = np.nan
    backend = CudaSdpa(HOST, AMPERE, STAND_INS)
    out, lse = forward(backend, q, k, v, problem_of(q, v), [tile_of(q, k)])
    assert np.isnan(lse[..., 3]).all()
    assert np.isnan(out[:, 3]).all()
    assert np.isfinite(np.delete(lse, 3, axis=2)).all()


@pytest.mark.parametrize("axes", [3, 4])
def test_lse_of_cudnn_has_three_axes_or_four(axes):
    """By version; backward gets what forward gives."""
    handed = []

    def old_forward(*args, **options):
        out, lse, *more = STAND_INS[CUDNN](*args, **options)
        return out, lse.reshape(lse.shape[:axes]), *more

    def old_backward(*args, **options):
        handed.append(args[5])
        fourth = args[5].reshape(*args[5].shape[:3], 1)
        return STAND_INS[f"{CUDNN}_backward"](*args[:5], fourth, *args[6:], **options)

    kernel = Cudnn({CUDNN: old_forward, f"{CUDNN}_backward": old_backward})
    q, k, v, dout = (torch.from_numpy(x).transpose(1, 2) for x in inputs(24, dtype="float16"))
    out, lse = kernel.forward([q, k, v], True, 0.25)
    assert lse.shape == (1, 4, 24)
    kernel.backward(dout, [q, k, v], out, lse, True, 0.25)
    assert handed[0].dim() == axes


def test_the_operators_take_every_call_that_is_made(calls, monkeypatch):
    """All of them once more, on tensors without content: PyTorch itself checks the arguments."""
    for only in ("", "cudnn", "flash", "efficient"):
        monkeypatch.setenv(VARIABLE, only)
        both(inputs(40, 33, dtype="bfloat16"), lower=-2)
    monkeypatch.setenv(VARIABLE, "")
    both(inputs(40, 33), lower=-2)
    assert set(names(calls)) == set(STAND_INS)

    def empty(x):
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    for name, args, options in calls:
        here = STAND_INS[name]
        there = real(name)(*map(empty, args), **options)
        assert callable(here)
        assert isinstance(there, tuple)


def test_the_switch_is_put_back_whatever_happens():
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(), deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), deterministic():
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch._C._set_deterministic_algorithms(False)


def test_the_switch_stays_on_while_any_thread_is_inside():
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with deterministic():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    with deterministic():
        thread.start()
        assert inside.wait(10)
    assert torch.are_deterministic_algorithms_enabled()
    leave.set()
    thread.join()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_failed_call_leaves_the_switch_as_it_was():
    def fail(*args, **options):
        raise RuntimeError

    kernel = Flash({FLASH: fail, f"{FLASH}_backward": fail})
    x = torch.zeros(1, 1, 8, 8)
    with pytest.raises(RuntimeError):
        kernel.backward(x, [x, x, x], x, x[..., 0], False, 1.0)
    assert not torch.are_deterministic_algorithms_enabled()


class Gpu(CudaDevice):
    capability = 89

    def __init__(self):
        self.index = 0


def test_a_machine_is_what_pytorch_may_use(monkeypatch):
    cuda = torch.backends.cuda
    names = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled")
    flags = dict.fromkeys((*names, "is_flash_attention_available"), True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91800)

    def machine(**changes):
        for name, value in (flags | changes).items():
            monkeypatch.setattr(cuda, name, lambda value=value: value)
        return machine_of(Gpu())

    assert machine() == Machine(89, 91800, flash=True, efficient=True)
    assert machine(cudnn_sdp_enabled=False).cudnn == 0
    assert not machine(flash_sdp_enabled=False).flash
    assert not machine(is_flash_attention_available=False).flash
    assert not machine(mem_efficient_sdp_enabled=False).efficient
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert machine().cudnn == 0


def test_a_window_that_would_be_thousands_of_calls_is_refused_by_name():
    q, k, v, _ = inputs(1, dtype="float16")
    tile = tile_of(q, k)._replace(q1=100_000, k1=100_000, lower=0, upper=3)
    with pytest.raises(Unsupported, match="a window of 4 keys over 100000 rows"):
        CudaSdpa(HOST, HOPPER, STAND_INS).parts(tile, problem_of(q, v))


def test_refusals():
    backend = CudaSdpa(HOST, HOPPER, STAND_INS)
    for words, arrays, options in (
        ("softcap is not implemented", inputs(4), {"softcap": 2.0}),
        ("float64 is not implemented", inputs(4, dtype="float64"), {}),
        ("head_dim 264: it goes to 256", inputs(4, dims=(264, 8)), {}),
        ("value_dim 264: it goes to 256", inputs(4, dims=(8, 264)), {}),
    ):
        assert words in backend.supports(problem_of(arrays[0], arrays[2], **options))
    assert backend.supports(problem_of(*inputs(4)[::2], sink=True)) is None


def test_16_bits_are_rounded_once_more_for_each_block(stand_in):
    """Each block's result is rounded before it is merged, so the error of 8 ranks is that of one
    and a bit: a mean of rounded values has an error of at most half a unit."""
    name = stand_in()
    q, k, v, dout = inputs(256, dtype="bfloat16")
    whole, *_ = exact((q, k, v, dout), tile_of(q, k, 0, UNBOUNDED))
    for ranks in (1, 8):
        out, _ = ringrt.attention(
            q, k, v, ranks=ranks, causal=True, backend=name, scale=0.25, partition="striped"
        )
        error = abs(out.astype(np.float64) - whole)
        size = np.abs(v.astype(np.float64)).max()
        assert (error <= 2.0**-8 * abs(whole) + 2.0**-9 * size).all()


def test_a_device_of_the_host_has_no_stream():
    backend = CudaSdpa(HOST, HOPPER, STAND_INS)
    with backend.arrays.running(SimpleNamespace(ptr=1)):
        assert not torch.is_grad_enabled()
