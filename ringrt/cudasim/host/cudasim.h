// What a CUDA kernel sees when g++ compiles it for the simulator: CUDA's own words and those of
// prims.cuh. The work is done in runtime.cpp, which is compiled without instrumentation.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define DEVICE inline
#define KERNEL(threads) extern "C" void
#define DYN_SMEM(name) unsigned char* name = cudasim::shared_memory()
#define INF __builtin_inff()
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
// Static shared memory is not modelled: it would be shared by all blocks of the process.
#define __shared__ CUDASIM_has_no_static_shared_memory_use_DYN_SMEM

struct dim3 { unsigned x, y, z; };
#define threadIdx (cudasim::thread_index())
#define blockIdx (cudasim::block_index())
#define blockDim (cudasim::block_dim())
#define gridDim (cudasim::grid_dim())

namespace cudasim {
struct F4 { float x[4]; };
struct U4 { u32 x[4]; };
dim3 thread_index();
dim3 block_index();
dim3 block_dim();
dim3 grid_dim();
unsigned char* shared_memory();
void barrier();
void warp_barrier(u32 mask);
uint64_t shuffle_xor(u32 mask, uint64_t value, int lanes);
U4 ldmatrix(const void* p, bool trans);
F4 mma(F4 c, U4 a, u32 b0, u32 b1, bool brain);
void copy_async(void* to, const void* from, bool ok);
void copy_commit();
void copy_wait(int left);
void check(const void* p, unsigned bytes, bool write);
u16 to_half(float x);
float from_half(u16 bits);
u16 to_brain(float x);
inline float from_brain(u16 bits) {
    u32 wide = (u32)bits << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
}
}  // namespace cudasim

inline void __syncthreads() { cudasim::barrier(); }
inline void __syncwarp(u32 mask = ~0u) { cudasim::warp_barrier(mask); }
template <class T> inline T __shfl_xor_sync(u32 mask, T value, int lanes) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = cudasim::shuffle_xor(mask, bits, lanes);
    memcpy(&value, &bits, sizeof(T));
    return value;
}

// Values, not pointers, cross into the runtime: arrays of registers stay registers.
inline void ldmatrix_x4(u32* r, const void* p) {
    cudasim::U4 m = cudasim::ldmatrix(p, false);
    for (int i = 0; i < 4; i++) r[i] = m.x[i];
}
inline void ldmatrix_x4_trans(u32* r, const void* p) {
    cudasim::U4 m = cudasim::ldmatrix(p, true);
    for (int i = 0; i < 4; i++) r[i] = m.x[i];
}
inline void cudasim_mma(float* c, const u32* a, const u32* b, bool brain) {
    cudasim::F4 d = cudasim::mma({{c[0], c[1], c[2], c[3]}}, {{a[0], a[1], a[2], a[3]}}, b[0], b[1], brain);
    for (int i = 0; i < 4; i++) c[i] = d.x[i];
}
inline void mma_16816(float* c, const u32* a, const u32* b, bf16) { cudasim_mma(c, a, b, true); }
inline void mma_16816(float* c, const u32* a, const u32* b, f16) { cudasim_mma(c, a, b, false); }
inline u32 pack2(float low, float high, bf16) {
    return cudasim::to_brain(low) | (u32)cudasim::to_brain(high) << 16;
}
inline u32 pack2(float low, float high, f16) {
    return cudasim::to_half(low) | (u32)cudasim::to_half(high) << 16;
}
inline float widen(bf16 x) { return cudasim::from_brain(x.bits); }
inline float widen(f16 x) { return cudasim::from_half(x.bits); }
inline void copy_async16(void* to, const void* from, bool ok) { cudasim::copy_async(to, from, ok); }
inline void copy_async_commit() { cudasim::copy_commit(); }
template <int N> inline void copy_async_wait() { cudasim::copy_wait(N); }
inline float ex2(float x) { return exp2f(x); }
inline Vec16 load16(const void* p) {
    cudasim::check(p, 16, false);
    Vec16 v;
    __builtin_memcpy(&v, __builtin_assume_aligned(p, 16), 16);
    return v;
}
inline void store16(void* p, Vec16 v) {
    cudasim::check(p, 16, true);
    __builtin_memcpy(__builtin_assume_aligned(p, 16), &v, 16);
}
