// Forward on tensor cores, for fp16 and bf16: FlashAttention-2 (Dao 2023) on band tiles, with a
// state (m, z, y) that is carried from one ring step to the next.
//
// A block has 4 warps and BR rows of one query head, MT times 16 rows a warp, and walks over the
// keys of its pieces, BC at a time. K is double-buffered, V not: V of a tile and K of the next are
// on their way while the scores are computed. Scores and probabilities stay in registers.
// m is in powers of two: m = max(score) * log2(e).
//
// Compile with -DTYPE=bf16|f16 -DDK=, -DDV= (multiples of 64 that hold head_dim and value_dim).
#include "mma_tile.cuh"

typedef TYPE T;

#define THREADS 128
#define WIDE (DK > 128 || DV > 128)
#define MT (WIDE ? 1 : 2)
#define BR (64 * MT)
// Keys of a step: what the registers of 128 dimensions leave room for.
#define BC (DK > 64 || DV > 64 ? 32 : 64)

struct Rows { float m[MT][2], z[MT][2]; };

// One tile's scores become probabilities; what was summed up so far is rescaled.
DEVICE void soften(float (&s)[MT][BC / 8][4], float (&o)[MT][DV / 8][4], Rows& rows, float factor) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = -INF;
#pragma unroll
            for (int n = 0; n < BC / 8; n++) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            float old = rows.m[m][h];
            float now = fmaxf(old, top * factor);
            float shift = now == -INF ? 0.f : now;  // a row that has seen nothing stays empty
            float keep = ex2(old - shift);
            rows.m[m][h] = now;
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < BC / 8; n++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    s[m][n][e] = ex2(s[m][n][e] * factor - shift);
                    sum += s[m][n][e];
                }
            rows.z[m][h] = rows.z[m][h] * keep + sum;
#pragma unroll
            for (int n = 0; n < DV / 8; n++) {
                o[m][n][2 * h] *= keep;
                o[m][n][2 * h + 1] *= keep;
            }
        }
}

// Merge what the block has summed up into the carried state.
DEVICE void merge(float (&o)[MT][DV / 8][4], Rows& rows, float* m_all, float* z_all, float* y_all, int row0,
                  int end, int value_dim) {
    int lane = threadIdx.x % 32;
    float keep[MT][2], add[MT][2];
    Rows now;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = row0 + 16 * m + lane / 4 + 8 * h;
            float old = row < end ? m_all[row] : -INF, top = rows.m[m][h], z = rows.z[m][h];
            z += __shfl_xor_sync(~0u, z, 1);
            z += __shfl_xor_sync(~0u, z, 2);
            rows.z[m][h] = z;
            now.m[m][h] = fmaxf(old, top);
            float shift = now.m[m][h] == -INF ? 0.f : now.m[m][h];
            keep[m][h] = ex2(old - shift);
            add[m][h] = ex2(top - shift);
            now.z[m][h] = row < end ? z_all[row] * keep[m][h] + z * add[m][h] : 0.f;
        }
    __syncwarp();  // four lanes have read what one of them writes
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = row0 + 16 * m + lane / 4 + 8 * h;
            bool nothing = rows.m[m][h] == -INF && rows.z[m][h] == 0.f;
            if (row >= end || nothing) continue;
            if (lane % 4 == 0) {
                m_all[row] = now.m[m][h];
                z_all[row] = now.z[m][h];
            }
            float* y = y_all + (i64)row * value_dim;
#pragma unroll
            for (int n = 0; n < DV / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int d = 8 * n + lane % 4 * 2 + e;
                    if (d < value_dim) y[d] = y[d] * keep[m][h] + o[m][n][2 * h + e] * add[m][h];
                }
        }
}

// q [batch, rows, q_heads, head_dim], k and v [batch, keys, kv_heads, dim] by their strides;
// m, z [batch, q_heads, rows] and y [batch, q_heads, rows, value_dim] contiguous. One block for
// each item and each of `heads` = batch * q_heads; `group` query heads share a KV head.
KERNEL(THREADS)
forward(const T* q, const T* k, const T* v, float* m_all, float* z_all, float* y_all, const int* items,
        const int* pieces, int rows, int batches, int q_heads, int group, int head_dim, int value_dim,
        i64 q_batch, i64 q_row, i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row,
        i64 v_head, float scale, float softcap, int vector) {
    DYN_SMEM(shared);
    T* q_tile = (T*)shared;
    T* k_tiles = q_tile + BR * DK;
    T* v_tile = k_tiles + 2 * BC * DK;
    int heads = batches * q_heads, at = blockIdx.x % heads;
    Item item = load_item(items, blockIdx.x / heads);
    int batch = at / q_heads, head = at % q_heads, kv_head = head / group;
    int first = item.first, warp_row = first + threadIdx.x / 32 * 16 * MT;
    q += batch * q_batch + first * q_row + head * q_head;
    k += batch * k_batch + kv_head * k_head;
    v += batch * v_batch + kv_head * v_head;
    Scores scores(scale, softcap);

    Walk<true, BC> here(pieces, item), ahead = here;
    load_tile<T, BR, DK, THREADS>(q_tile, q, q_row, item.end - first, head_dim, vector & 1);
    load_tile<T, BC, DK, THREADS>(k_tiles, k + ahead.at * k_row, k_row, ahead.count(), head_dim, vector & 2);
    copy_async_commit();

    float o[MT][DV / 8][4];
    Rows sums;
    clear<MT, DV / 8>(o);
#pragma unroll
    for (int m = 0; m < MT; m++) sums.m[m][0] = sums.m[m][1] = -INF, sums.z[m][0] = sums.z[m][1] = 0.f;
    for (int turn = 0; here.more(); turn ^= 1, here.next()) {
        copy_async_wait<0>();
        __syncthreads();  // this K is there (and Q); nobody reads the last V or K any more
        load_tile<T, BC, DV, THREADS>(v_tile, v + here.at * v_row, v_row, here.count(), value_dim, vector & 4);
        copy_async_commit();
        ahead.next();
        if (ahead.more())
            load_tile<T, BC, DK, THREADS>(k_tiles + (turn ^ 1) * BC * DK, k + ahead.at * k_row, k_row,
                                          ahead.count(), head_dim, vector & 2);
        copy_async_commit();

        float s[MT][BC / 8][4];
        clear<MT, BC / 8>(s);
        product_of_rows<T, DK, MT, BC / 8>(s, q_tile, warp_row - first, k_tiles + turn * BC * DK);
        apply_scores<MT, BC / 8>(s, scores);
        hide<false, MT, BC / 8>(s, here.piece(), warp_row, here.at);
        soften(s, o, sums, scores.factor);

        copy_async_wait<1>();
        __syncthreads();  // V is there
        product_with_tile<T, DV, MT, BC / 8>(o, s, v_tile);
    }
    copy_async_wait<0>();
    i64 base = (i64)at * rows;
    merge(o, sums, m_all + base, z_all + base, y_all + base * value_dim, warp_row, item.end, value_dim);
}
