"""Kernels in the CUDA simulator: what they compute, and that what they must not do is caught."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ringrt import kernels
from ringrt.cudasim import KernelFault, SimulatorError
from ringrt.cudasim.compiler import Buffer, HostModule
from ringrt.kernels import load_source

PRIMS = load_source(Path(kernels.__file__).parent / "prims.cuh")


def kernel(body, parameters="const float* a, float* b", name="k"):
    text = f"{PRIMS}\nKERNEL(64) {name}({parameters}) {{ {body} }}\n"
    return HostModule(text).kernel(name)


def launch(made, *arrays, threads=32, blocks=1, shared=1024, seed=0, values=()):
    arguments = [x.ctypes.data for x in arrays] + [x.tobytes() for x in values]
    pairs = zip(made.parameters, arrays, strict=False)
    buffers = [Buffer(x.ctypes.data, x.nbytes, not p.const, p.name) for p, x in pairs]
    made.run((blocks, 1, 1), (threads, 1, 1), arguments, buffers, shared, seed)


def floats(count=64):
    return np.arange(count, dtype=np.float32)


# What is wrong, by the words it is reported in. `a` is read only, both have 64 elements.
FAULTS = {
    "read of 4 bytes out of bounds at a+256": "b[0] = a[64];",
    "write of 4 bytes out of bounds at b+256": "b[threadIdx.x + 33] = 1;",
    "read of 4 bytes out of bounds at": "b[threadIdx.x] = a[(int)threadIdx.x - 1];",
    "write of a, which the kernel takes as const": "((float*)a)[threadIdx.x] = 1;",
    "read of 4 bytes at an address that is no multiple of 4": "b[threadIdx.x] = *(const float*)((const char*)a + 2);",
    "read of 16 bytes at an address that is no multiple of 16": "b[threadIdx.x] = load16(a + 1).x[0];",
    "write of shared +1024 beyond the 1024 bytes": "DYN_SMEM(s); ((float*)s)[threadIdx.x + 225] = 1;",
    "write of shared +4, which thread 0 has read": "DYN_SMEM(s); float* f = (float*)s; f[threadIdx.x] = 1; b[threadIdx.x] = f[threadIdx.x ^ 1];",
    "write of shared +0, which thread 0 has written": "DYN_SMEM(s); ((float*)s)[0] = threadIdx.x;",
    "write of shared +0, which thread 0 has read": "DYN_SMEM(s); float* f = (float*)s; f[threadIdx.x] = 1; __syncthreads(); b[threadIdx.x] = f[threadIdx.x]; if (threadIdx.x == 1) f[0] = 1;",
    "write of b+0, which thread 0 has written": "b[0] = threadIdx.x;",
    "asynchronous copy of thread": "DYN_SMEM(s); copy_async16(s + 16 * (threadIdx.x % 16) , a, threadIdx.x < 16); copy_async_commit(); __syncthreads(); b[threadIdx.x] = ((float*)s)[threadIdx.x];",
    "no thread can go on: 31 of 32 at __syncthreads": "if (threadIdx.x) { __syncthreads(); } else { __shfl_xor_sync(~0u, 1.f, 1); }",
    "lanes of one warp are at different instructions": "if (threadIdx.x % 2) __syncwarp(); else b[0] = __shfl_xor_sync(~0u, 1.f, 1);",
    "only full warp masks are simulated": "b[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.f, 1);",
    "ldmatrix of an address outside shared memory": "u32 r[4]; ldmatrix_x4(r, a); b[threadIdx.x] = r[0];",
}


@pytest.mark.parametrize("text", FAULTS)
@pytest.mark.parametrize("seed", [0, 5])
def test_a_fault_is_named_on_every_run(text, seed):
    body = FAULTS[text]
    if text == "asynchronous copy of thread":
        body = body.replace("s + 16 * (threadIdx.x % 16) ", "s + 16 * threadIdx.x").replace(
            "threadIdx.x < 16", "true"
        )
    with pytest.raises(KernelFault) as caught:
        launch(kernel(body), floats(), floats(), seed=seed)
    said = str(caught.value)
    if seed == 0:
        assert text in said
    assert said.startswith("kernel k, block (0, 0, 0)")


def test_blocks_that_share_what_they_write_are_found():
    body = "b[threadIdx.x] += a[threadIdx.x];"
    with pytest.raises(KernelFault, match="of b.0, which another block of this launch has written"):
        launch(kernel(body), floats(), floats(), blocks=2)
    body = "if (blockIdx.x == 0) a[threadIdx.x] = b[threadIdx.x]; else b[threadIdx.x] = 1;"
    with pytest.raises(KernelFault, match="which another block of this launch has read"):
        launch(kernel(body, "float* a, float* b"), floats(), floats(), blocks=2)


def test_two_barriers_make_a_reversal_right_in_any_order_of_threads():
    body = """
        DYN_SMEM(s); float* f = (float*)s;
        for (int turn = 0; turn < 3; turn++) {
            f[threadIdx.x] = a[threadIdx.x] + turn;
            __syncthreads();
            b[threadIdx.x] = f[63 - threadIdx.x];
            __syncthreads();
        }"""
    for seed in range(5):
        b = floats()
        launch(kernel(body), floats(), b, threads=64, seed=seed)
        np.testing.assert_array_equal(b, floats()[::-1] + 2)


def test_a_warp_that_is_in_step_needs_no_block_barrier():
    body = "DYN_SMEM(s); float* f = (float*)s; f[threadIdx.x] = a[threadIdx.x]; __syncwarp(); b[threadIdx.x] = f[threadIdx.x ^ 7];"
    b = floats()
    launch(kernel(body), floats(), b, threads=64)
    np.testing.assert_array_equal(b, floats()[np.arange(64) ^ 7])
    across = body.replace("^ 7", "^ 32")
    with pytest.raises(KernelFault, match="no barrier in between"):
        launch(kernel(across), floats(), floats(), threads=64)


def test_shared_memory_and_registers_begin_undefined():
    b = floats()
    launch(kernel("DYN_SMEM(s); b[threadIdx.x] = ((float*)s)[threadIdx.x];"), floats(), b)
    assert np.isnan(b[:32]).all()


def test_threads_that_have_ended_are_not_waited_for():
    body = "if (threadIdx.x >= 32) return; __syncthreads(); b[threadIdx.x] = 7;"
    b = floats()
    launch(kernel(body), floats(), b, threads=64)
    assert (b[:32] == 7).all()


def test_asynchronous_copies_land_when_waited_for_and_fill_with_zeros():
    body = """
        DYN_SMEM(s);
        copy_async16(s + 16 * threadIdx.x, a + 4 * (threadIdx.x % 16), threadIdx.x < 16);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        for (int i = 0; i < 4; i++) b[threadIdx.x * 4 + i] = ((float*)s)[threadIdx.x * 4 + i];"""
    b = floats(128)
    launch(kernel(body), floats(), b)
    np.testing.assert_array_equal(b, [*range(64), *[0] * 64])


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_mma_multiplies_what_ldmatrix_loads(name, dtype):
    """A [16, 16] from rows, B [16, 8] from rows of its transpose, C in the layout of the PTX ISA."""
    body = f"""
        DYN_SMEM(s); {name}* t = ({name}*)s; int l = threadIdx.x;
        for (int i = l; i < 256; i += 32) t[i] = a[i];
        for (int i = l; i < 256; i += 32) t[256 + i] = n[i];
        __syncthreads();
        u32 x[4], y[4];
        ldmatrix_x4(x, t + (l % 16) * 16 + l / 16 * 8);
        ldmatrix_x4(y, t + 256 + (l % 8 + l / 16 * 8) * 16 + l / 8 % 2 * 8);
        float d[4] = {{0, 0, 0, 0}}, e[4] = {{0, 0, 0, 0}};
        mma_16816(d, x, y, {name}());
        mma_16816(e, x, y + 2, {name}());
        for (int i = 0; i < 4; i++) {{
            int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
            c[row * 16 + column] = d[i];
            c[row * 16 + 8 + column] = e[i];
        }}"""
    rng = np.random.default_rng(0)
    a, n = (rng.standard_normal((16, 16)).astype(dtype) for _ in range(2))
    c = np.zeros((16, 16), np.float32)
    parameters = f"const {name}* a, const {name}* n, float* c"
    launch(kernel(body, parameters), a, n, c, shared=2048)
    expected = a.astype(np.float64) @ n.astype(np.float64).T
    np.testing.assert_allclose(c, expected, atol=2e-6)


def test_transposed_ldmatrix():
    body = """
        DYN_SMEM(s); u16* t = (u16*)s; int l = threadIdx.x;
        for (int i = l; i < 256; i += 32) t[i] = i;
        __syncthreads();
        u32 x[4];
        ldmatrix_x4_trans(x, t + (l % 16) * 16 + l / 16 * 8);
        for (int m = 0; m < 4; m++) { b[(l * 4 + m) * 2] = x[m] & 0xffff; b[(l * 4 + m) * 2 + 1] = x[m] >> 16; }"""
    b = np.zeros((32, 4, 2), np.int32)
    launch(kernel(body, "const float* a, int* b"), floats(), b)
    whole = np.arange(256).reshape(16, 16)
    for m, (row, column) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
        block = whole[row : row + 8, column : column + 8].T
        np.testing.assert_array_equal(b[:, m].reshape(8, 4, 2).reshape(8, 8), block)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_rounding_to_16_bits_is_to_nearest_even(name, dtype):
    bits = np.arange(1 << 16, dtype=np.uint16)
    exact = bits.view(dtype).astype(np.float32)
    rng = np.random.default_rng(1)
    with np.errstate(all="ignore"):
        near = exact + rng.choice([-1, 0, 1], exact.size) * np.spacing(abs(exact)) * rng.integers(
            1, 4096, exact.size
        )
        between = (exact[:-1] + exact[1:]) / 2
    with np.errstate(all="ignore"):
        values = np.concatenate([exact, near, between, [np.inf, -np.inf, 1e38, -1e-45]]).astype(
            np.float32
        )
        values = values[: values.size // 32 * 32]
        expected = values.astype(dtype)
    b = np.zeros(values.size, np.uint16)
    body = f"for (int i = threadIdx.x; i < n; i += 32) b[i] = narrow<{name}>(a[i]).bits;"
    made = kernel(body, "const float* a, u16* b, int n")
    launch(made, values, b, values=[np.int32(values.size)])
    nan = np.isnan(values)
    assert np.isnan(b.view(dtype)[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(b[~nan], expected.view(np.uint16)[~nan])


def test_signatures_are_read_from_the_text():
    module = HostModule(
        f"{PRIMS}\nKERNEL(32) one(const bf16* __restrict__ x, i64 n) {{ }}\n// KERNEL(1) not(int n) {{\nKERNEL(32) two(float* y, double d) {{ }}"
    )
    one = module.kernel("one").parameters
    assert [(p.name, p.type, p.pointer, p.const, p.size, p.element) for p in one] == [
        ("x", "bf16", True, True, 8, 2),
        ("n", "i64", False, False, 8, 8),
    ]
    with pytest.raises(SimulatorError, match="no kernel 'three' in this module; there is one, two"):
        module.kernel("three")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("KERNEL(32) k(float* a) { undefined(a); }", "does not compile the kernel: .*undefined"),
        (
            "KERNEL(32) k(float* a) { __shared__ float s[4]; }",
            "no_static_shared_memory_use_DYN_SMEM",
        ),
        ("KERNEL(32) k(Thing t) { }", "values of type Thing cannot be passed"),
        ("void f() { }", "declares no kernel"),
    ],
)
def test_what_cannot_be_compiled_is_one_clear_line(text, said):
    with pytest.raises(SimulatorError, match=said) as caught:
        HostModule(f"{PRIMS}\n{text}\n")
    assert "\n" not in str(caught.value)


def test_without_a_compiler_that_is_what_is_said(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SimulatorError, match=r"needs g\+\+"):
        kernel("b[threadIdx.x] = 42424242;")


def test_a_block_must_be_whole_warps():
    with pytest.raises(SimulatorError, match="not whole warps"):
        launch(kernel("b[0] = 1;"), floats(), floats(), threads=33)
