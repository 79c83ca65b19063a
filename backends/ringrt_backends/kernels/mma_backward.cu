// Backward on tensor cores, for fp16 and bf16 (FlashAttention-2, Dao 2023, on band tiles), in two
// kernels, so that every sum has one owner, nothing is added atomically, and two runs give the
// same bits:
//
//   backward_q    a block owns rows of dq and walks over their keys
//   backward_kv   a block owns keys of dk and dv and walks over their queries, of all query heads
//                 that share the KV head
//
// Each makes the probabilities anew from the global lse: p = e^(s - lse),
// ds = p * (dout.v - delta) * slope, dq = scale * ds K, dk = scale * ds^T Q, dv = p^T dout. The
// price of not adding dq in backward_kv is 7 products in place of 5.
//
// Compile with -DTYPE=bf16|f16 -DDK=, -DDV= (multiples of 64 that hold head_dim and value_dim). Beyond
// 128 the sums of dk and dv do not fit into the registers together: then backward_kv is compiled
// and launched once with -DSUMS=1 for dk and once with -DSUMS=2 for dv.
#include "mma_tile.cuh"

typedef TYPE T;

#define THREADS 128
#define WIDE (DK > 128 || DV > 128)
#define BLOCK 64  // rows that a block owns, 16 a warp
#define STEP 32  // rows of the other side at a time: what the registers leave room for
#define NT (STEP / 8)
#ifndef SUMS
#define SUMS 3
#endif
#define WANT_DK (SUMS & 1)
#define WANT_DV (SUMS & 2)

// From scores (in powers of two, hidden ones -inf) and dp = dout.v to p and ds, in place. lse is
// in powers of two too, +inf in rows that see nothing, where p is 0.
DEVICE void differentiate(float& s, float& dp, float lse, float delta, const Scores& scores) {
    bool hidden = s == -INF;
    float slope = scores.softcap > 0.f && !hidden ? scores.slope(s) : 1.f;
    s = hidden ? 0.f : ex2(s * scores.factor - lse);
    dp = hidden ? 0.f : s * (dp - delta) * slope;
}

DEVICE float lse_of(float natural) { return natural == -INF ? INF : natural * LOG2E; }

// Add 16 rows of a warp's sums (times `factor`) to a [rows, ..., dim] array in global memory.
template <int D>
DEVICE void add_rows(float* to, i64 stride, const float (&sums)[1][D / 8][4], int row0, int end, int dim, float factor) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int row = row0 + lane / 4 + 8 * (e / 2);
        if (row >= end) continue;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            int d = 8 * n + lane % 4 * 2 + e % 2;
            if (d < dim) to[row * stride + d] += sums[0][n][e] * factor;
        }
    }
}

// q, dout [batch, rows, q_heads, dim], k, v [batch, keys, kv_heads, dim] by their strides; lse,
// delta [batch, q_heads, rows] and dq [batch, rows, q_heads, head_dim] contiguous. Items are
// blocks of query rows; one block for each item and query head.
KERNEL(THREADS)
backward_q(const T* q, const T* dout, const T* k, const T* v, const float* lse, const float* delta, float* dq,
           const int* items, const int* pieces, int rows, int batches, int q_heads, int group, int head_dim,
           int value_dim, i64 q_batch, i64 q_row, i64 q_head, i64 do_batch, i64 do_row, i64 do_head,
           i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, float scale, float softcap,
           int vector) {
    DYN_SMEM(shared);
    T* q_tile = (T*)shared;
    T* do_tile = q_tile + BLOCK * DK;
    T* k_tiles = do_tile + BLOCK * DV;
    T* v_tile = k_tiles + 2 * STEP * DK;
    int heads = batches * q_heads, at = blockIdx.x % heads;
    Item item = load_item(items, blockIdx.x / heads);
    int batch = at / q_heads, head = at % q_heads, kv_head = head / group, lane = threadIdx.x % 32;
    int first = item.first, warp_row = first + threadIdx.x / 32 * 16;
    q += batch * q_batch + first * q_row + head * q_head;
    dout += batch * do_batch + first * do_row + head * do_head;
    k += batch * k_batch + kv_head * k_head;
    v += batch * v_batch + kv_head * v_head;
    Scores scores(scale, softcap);
    float row_lse[2], row_delta[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = warp_row + lane / 4 + 8 * h;
        row_lse[h] = row < item.end ? lse_of(lse[(i64)at * rows + row]) : INF;
        row_delta[h] = row < item.end ? delta[(i64)at * rows + row] : 0.f;
    }

    Walk<true, STEP> here(pieces, item), ahead = here;
    load_tile<T, BLOCK, DK, THREADS>(q_tile, q, q_row, item.end - first, head_dim, vector & 1);
    load_tile<T, BLOCK, DV, THREADS>(do_tile, dout, do_row, item.end - first, value_dim, vector & 2);
    load_tile<T, STEP, DK, THREADS>(k_tiles, k + ahead.at * k_row, k_row, ahead.count(), head_dim, vector & 4);
    copy_async_commit();
    float sums[1][DK / 8][4];
    clear<1, DK / 8>(sums);
    for (int turn = 0; here.more(); turn ^= 1, here.next()) {
        T* k_tile = k_tiles + turn * STEP * DK;
        copy_async_wait<0>();
        __syncthreads();  // this K is there (with Q and dout); nobody reads the last V or K any more
        load_tile<T, STEP, DV, THREADS>(v_tile, v + here.at * v_row, v_row, here.count(), value_dim, vector & 8);
        copy_async_commit();
        ahead.next();
        if (ahead.more())
            load_tile<T, STEP, DK, THREADS>(k_tiles + (turn ^ 1) * STEP * DK, k + ahead.at * k_row, k_row,
                                            ahead.count(), head_dim, vector & 4);
        copy_async_commit();

        float s[1][NT][4], dp[1][NT][4];
        clear<1, NT>(s);
        clear<1, NT>(dp);
        product_of_rows<T, DK, 1, NT>(s, q_tile, warp_row - first, k_tile);
        apply_scores<1, NT>(s, scores);
        hide<false, 1, NT>(s, here.piece(), warp_row, here.at);
        copy_async_wait<1>();
        __syncthreads();  // V is there
        product_of_rows<T, DV, 1, NT>(dp, do_tile, warp_row - first, v_tile);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) differentiate(s[0][n][e], dp[0][n][e], row_lse[e / 2], row_delta[e / 2], scores);
        product_with_tile<T, DK, 1, NT>(sums, dp, k_tile);
    }
    copy_async_wait<0>();
    float* to = dq + ((i64)batch * rows * q_heads + head) * head_dim;
    add_rows<DK>(to, (i64)q_heads * head_dim, sums, warp_row, item.end, head_dim, scale);
}

// The tiles of queries that a block of keys meets, in each query head of the group in turn.
struct QueryWalk {
    const int* pieces;
    Item item;
    int head, heads;
    Walk<false, STEP> walk;

    DEVICE QueryWalk(const int* pieces, const Item& item, int heads)
        : pieces(pieces), item(item), head(0), heads(heads), walk(pieces, item) {}
    DEVICE bool more() const { return head < heads; }
    DEVICE void next() {
        walk.next();
        if (!walk.more()) {
            head++;
            walk = Walk<false, STEP>(pieces, item);
        }
    }
};

// As above; dk and dv [batch, keys, kv_heads, dim] contiguous. Items are blocks of keys, their
// pieces cut at them; one block for each item and KV head. Fragments are transposed: rows are
// keys, columns are queries.
KERNEL(THREADS)
backward_kv(const T* q, const T* dout, const T* k, const T* v, const float* lse, const float* delta, float* dk,
            float* dv, const int* items, const int* pieces, int rows, int keys, int batches, int q_heads,
            int group, int head_dim, int value_dim, i64 q_batch, i64 q_row, i64 q_head, i64 do_batch, i64 do_row,
            i64 do_head, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, float scale,
            float softcap, int vector) {
    DYN_SMEM(shared);
    T* k_tile = (T*)shared;
    T* v_tile = k_tile + BLOCK * DK;
    T* q_tiles = v_tile + BLOCK * DV;
    T* do_tile = q_tiles + 2 * STEP * DK;
    float* lse_tile = (float*)(do_tile + STEP * DV);
    float* delta_tile = lse_tile + STEP;
    int kv_heads = q_heads / group, heads = batches * kv_heads;
    Item item = load_item(items, blockIdx.x / heads);
    int batch = blockIdx.x % heads / kv_heads, kv_head = blockIdx.x % heads % kv_heads, lane = threadIdx.x % 32;
    int first = item.first, warp_row = first + threadIdx.x / 32 * 16;
    q += batch * q_batch + (i64)kv_head * group * q_head;
    dout += batch * do_batch + (i64)kv_head * group * do_head;
    k += batch * k_batch + first * k_row + kv_head * k_head;
    v += batch * v_batch + first * v_row + kv_head * v_head;
    i64 stats = ((i64)batch * q_heads + (i64)kv_head * group) * rows;
    Scores scores(scale, softcap);

    QueryWalk here(pieces, item, group), ahead = here;
    load_tile<T, BLOCK, DK, THREADS>(k_tile, k, k_row, item.end - first, head_dim, vector & 4);
    load_tile<T, BLOCK, DV, THREADS>(v_tile, v, v_row, item.end - first, value_dim, vector & 8);
    load_tile<T, STEP, DK, THREADS>(q_tiles, q + ahead.walk.at * q_row, q_row, ahead.walk.count(), head_dim, vector & 1);
    copy_async_commit();
    float dk_sums[1][DK / 8][4], dv_sums[1][DV / 8][4];
    clear<1, DK / 8>(dk_sums);
    clear<1, DV / 8>(dv_sums);
    for (int turn = 0; here.more(); turn ^= 1, here.next()) {
        T* q_tile = q_tiles + turn * STEP * DK;
        int at = here.walk.at, count = here.walk.count();
        copy_async_wait<0>();
        __syncthreads();  // this Q is there (with K and V); nobody reads the last dout or Q any more
        load_tile<T, STEP, DV, THREADS>(do_tile, dout + here.head * do_head + at * do_row, do_row, count, value_dim, vector & 2);
        for (int i = threadIdx.x; i < STEP; i += THREADS) {
            i64 row = stats + (i64)here.head * rows + at + i;
            lse_tile[i] = i < count ? lse_of(lse[row]) : INF;
            delta_tile[i] = i < count ? delta[row] : 0.f;
        }
        copy_async_commit();
        ahead.next();
        if (ahead.more())
            load_tile<T, STEP, DK, THREADS>(q_tiles + (turn ^ 1) * STEP * DK,
                                            q + ahead.head * q_head + ahead.walk.at * q_row, q_row,
                                            ahead.walk.count(), head_dim, vector & 1);
        copy_async_commit();

        float s[1][NT][4], dp[1][NT][4];
        clear<1, NT>(s);
        clear<1, NT>(dp);
        product_of_rows<T, DK, 1, NT>(s, k_tile, warp_row - first, q_tile);
        apply_scores<1, NT>(s, scores);
        hide<true, 1, NT>(s, here.walk.piece(), warp_row, at);
        copy_async_wait<1>();
        __syncthreads();  // dout, lse and delta are there
        if (WANT_DK) product_of_rows<T, DV, 1, NT>(dp, v_tile, warp_row - first, do_tile);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int column = 8 * n + lane % 4 * 2 + e % 2;
                differentiate(s[0][n][e], dp[0][n][e], lse_tile[column], delta_tile[column], scores);
            }
        if (WANT_DV) product_with_tile<T, DV, 1, NT>(dv_sums, s, do_tile);
        if (WANT_DK) product_with_tile<T, DK, 1, NT>(dk_sums, dp, q_tile);
    }
    copy_async_wait<0>();
    i64 head_row = (i64)batch * keys * kv_heads + kv_head;
    if (WANT_DK) add_rows<DK>(dk + head_row * head_dim, (i64)kv_heads * head_dim, dk_sums, warp_row, item.end, head_dim, scale);
    if (WANT_DV) add_rows<DV>(dv + head_row * value_dim, (i64)kv_heads * value_dim, dv_sums, warp_row, item.end, value_dim, 1.f);
}
