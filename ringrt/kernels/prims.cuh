// The vocabulary that every CUDA source of ringrt is written in: one text, two compilers. NVRTC
// makes PTX of it; in the CUDA simulator g++ takes the same names from cudasim.h. No CUDA headers:
// the wheels that NVRTC comes in have none.
//
// Rules for a kernel: shared memory is DYN_SMEM; warp collectives, asynchronous copies and
// 16-byte accesses go through the functions below; __syncthreads, __syncwarp and
// __shfl_xor_sync (full masks) are as in CUDA.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// 16-bit floats as they lie in memory. Arithmetic is done in fp32.
struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct alignas(16) Vec16 { u32 x[4]; };

#if defined(__CUDACC__)

#define DEVICE __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define DYN_SMEM(name) \
    extern __shared__ __align__(128) unsigned char ringrt_shared[]; \
    unsigned char* name = ringrt_shared
#define INF __int_as_float(0x7f800000)

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void ldmatrix_x4(u32* r, const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}
DEVICE void ldmatrix_x4_trans(u32* r, const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}

// c (16 x 8, fp32) += a (16 x 16) * b (16 x 8); the last argument only chooses the type of a and b.
DEVICE void mma_16816(float* c, const u32* a, const u32* b, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_16816(float* c, const u32* a, const u32* b, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two fp32 rounded to nearest and packed, the first in the lower half.
DEVICE u32 pack2(float low, float high, bf16) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE u32 pack2(float low, float high, f16) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

DEVICE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// 16 bytes from global to shared memory, or zeros where not `ok`. They are there when the thread
// has waited for the group, and for other threads after a barrier.
DEVICE void copy_async16(void* to, const void* from, bool ok) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(shared_address(to)), "l"(from), "r"(ok ? 16 : 0) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when at most N of this thread's groups are under way.
template <int N> DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

DEVICE float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE Vec16 load16(const void* p) { return *(const Vec16*)p; }
DEVICE void store16(void* p, Vec16 v) { *(Vec16*)p = v; }

#else
#include "cudasim.h"
#endif

DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }

template <class T> struct Narrow;
template <> struct Narrow<float> { static DEVICE float of(float x) { return x; } };
template <> struct Narrow<double> { static DEVICE double of(double x) { return x; } };
template <> struct Narrow<bf16> {
    static DEVICE bf16 of(float x) { return bf16{(u16)pack2(x, 0.f, bf16())}; }
};
template <> struct Narrow<f16> {
    static DEVICE f16 of(float x) { return f16{(u16)pack2(x, 0.f, f16())}; }
};
// x rounded to T.
template <class T> DEVICE T narrow(double x) { return Narrow<T>::of(x); }

DEVICE int min_of(int a, int b) { return a < b ? a : b; }
DEVICE int max_of(int a, int b) { return a > b ? a : b; }
