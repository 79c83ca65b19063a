// Backward for fp32 and fp64: the two kernels of mma_backward.cu, without tensor cores; see
// exact_tile.cuh. lse and delta are of type T, and so are the sums that are added to.
#include "exact_tile.cuh"

#define TILE 16
#define LANES (THREADS / TILE)
#define PITCH_K (DK + 1)
#define PITCH_V (DV + 1)
#define PITCH_P (TILE + 1)

// p and ds of one pair of a query row (q, dout) and a key (k, v), where the row sees the key.
DEVICE void differentiate(const T* q, const T* k, const T* dout, const T* v, double lse, double delta, double scale,
                          double softcap, T* p, T* ds) {
    double slope, s = score_of(dot<DK>(q, k), scale, softcap, &slope);
    // A row whose scores are all -inf is empty, and changes nothing.
    *p = lse == -INF ? T(0) : exp_of(s - lse, T());
    *ds = lse == -INF ? T(0) : T(*p * (dot<DV>(dout, v) - delta) * slope);
}

template <int N> DEVICE void add_to(T* to, const double (&sums)[N], int lane, int dim, double factor) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        int d = lane + n * LANES;
        if (d < dim) to[d] += T(sums[n] * factor);
    }
}

// Arguments as in mma_backward.cu.
KERNEL(THREADS)
backward_q(const T* q, const T* dout, const T* k, const T* v, const T* lse, const T* delta, T* dq,
           const int* items, const int* pieces, int rows, int batches, int q_heads, int group, int head_dim,
           int value_dim, i64 q_batch, i64 q_row, i64 q_head, i64 do_batch, i64 do_row, i64 do_head,
           i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, double scale, double softcap) {
    DYN_SMEM(shared);
    T* q_tile = (T*)shared;
    T* do_tile = q_tile + TILE * PITCH_K;
    T* k_tile = do_tile + TILE * PITCH_V;
    T* v_tile = k_tile + TILE * PITCH_K;
    T* p_tile = v_tile + TILE * PITCH_V;
    T* ds_tile = p_tile + TILE * PITCH_P;
    int heads = batches * q_heads, at = blockIdx.x % heads;
    Item item = load_item(items, blockIdx.x / heads);
    int batch = at / q_heads, head = at % q_heads, kv_head = head / group;
    int first = item.first, own = threadIdx.x / LANES, lane = threadIdx.x % LANES, row = first + own;
    q += batch * q_batch + first * q_row + head * q_head;
    dout += batch * do_batch + first * do_row + head * do_head;
    k += batch * k_batch + kv_head * k_head;
    v += batch * v_batch + kv_head * v_head;
    bool mine = row < item.end;
    double row_lse = mine ? lse[(i64)at * rows + row] : -INF, row_delta = mine ? delta[(i64)at * rows + row] : 0;
    double sums[DK / LANES];
#pragma unroll
    for (int n = 0; n < DK / LANES; n++) sums[n] = 0;
    load_rows<TILE, DK, PITCH_K>(q_tile, q, q_row, item.end - first, head_dim);
    load_rows<TILE, DV, PITCH_V>(do_tile, dout, do_row, item.end - first, value_dim);
    for (Walk<true, TILE> here(pieces, item); here.more(); here.next()) {
        __syncthreads();  // nobody reads the last K and V any more
        load_rows<TILE, DK, PITCH_K>(k_tile, k + here.at * k_row, k_row, here.count(), head_dim);
        load_rows<TILE, DV, PITCH_V>(v_tile, v + here.at * v_row, v_row, here.count(), value_dim);
        __syncthreads();
        Range seen = keys_of(here.piece(), row);
        for (int key = lane; key < TILE; key += LANES) {
            T p = -1, ds = 0;
            if (here.at + key >= seen.begin && here.at + key < seen.end)
                differentiate(q_tile + own * PITCH_K, k_tile + key * PITCH_K, do_tile + own * PITCH_V,
                              v_tile + key * PITCH_V, row_lse, row_delta, scale, softcap, &p, &ds);
            p_tile[own * PITCH_P + key] = p;
            ds_tile[own * PITCH_P + key] = ds;
        }
        __syncwarp();  // the row's p and ds are there
        add_weighted<TILE, LANES, DK / LANES, PITCH_K>(sums, ds_tile + own * PITCH_P, p_tile + own * PITCH_P, k_tile, lane);
        __syncwarp();  // and have been read
    }
    if (mine) add_to(dq + (((i64)batch * rows + row) * q_heads + head) * head_dim, sums, lane, head_dim, scale);
}

KERNEL(THREADS)
backward_kv(const T* q, const T* dout, const T* k, const T* v, const T* lse, const T* delta, T* dk, T* dv,
            const int* items, const int* pieces, int rows, int keys, int batches, int q_heads, int group,
            int head_dim, int value_dim, i64 q_batch, i64 q_row, i64 q_head, i64 do_batch, i64 do_row, i64 do_head,
            i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, double scale, double softcap) {
    DYN_SMEM(shared);
    T* q_tile = (T*)shared;
    T* do_tile = q_tile + TILE * PITCH_K;
    T* k_tile = do_tile + TILE * PITCH_V;
    T* v_tile = k_tile + TILE * PITCH_K;
    T* p_tile = v_tile + TILE * PITCH_V;
    T* ds_tile = p_tile + TILE * PITCH_P;
    int kv_heads = q_heads / group, heads = batches * kv_heads;
    Item item = load_item(items, blockIdx.x / heads);
    int batch = blockIdx.x % heads / kv_heads, kv_head = blockIdx.x % heads % kv_heads;
    int first = item.first, own = threadIdx.x / LANES, lane = threadIdx.x % LANES, key = first + own;
    k += batch * k_batch + first * k_row + kv_head * k_head;
    v += batch * v_batch + first * v_row + kv_head * v_head;
    double dk_sums[DK / LANES], dv_sums[DV / LANES];
#pragma unroll
    for (int n = 0; n < DK / LANES; n++) dk_sums[n] = 0;
#pragma unroll
    for (int n = 0; n < DV / LANES; n++) dv_sums[n] = 0;
    load_rows<TILE, DK, PITCH_K>(k_tile, k, k_row, item.end - first, head_dim);
    load_rows<TILE, DV, PITCH_V>(v_tile, v, v_row, item.end - first, value_dim);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const T* q_of_head = q + batch * q_batch + head * q_head;
        const T* do_of_head = dout + batch * do_batch + head * do_head;
        i64 stats = ((i64)batch * q_heads + head) * rows;
        for (Walk<false, TILE> here(pieces, item); here.more(); here.next()) {
            __syncthreads();  // nobody reads the last Q and dout any more
            load_rows<TILE, DK, PITCH_K>(q_tile, q_of_head + here.at * q_row, q_row, here.count(), head_dim);
            load_rows<TILE, DV, PITCH_V>(do_tile, do_of_head + here.at * do_row, do_row, here.count(), value_dim);
            __syncthreads();
            Range seen = queries_of(here.piece(), key);
            for (int r = lane; r < TILE; r += LANES) {
                T p = -1, ds = 0;
                i64 row = stats + here.at + r;
                if (here.at + r >= seen.begin && here.at + r < seen.end)
                    differentiate(q_tile + r * PITCH_K, k_tile + own * PITCH_K, do_tile + r * PITCH_V,
                                  v_tile + own * PITCH_V, lse[row], delta[row], scale, softcap, &p, &ds);
                p_tile[own * PITCH_P + r] = p;
                ds_tile[own * PITCH_P + r] = ds;
            }
            __syncwarp();  // the key's p and ds are there
            const T* p_row = p_tile + own * PITCH_P;
            add_weighted<TILE, LANES, DK / LANES, PITCH_K>(dk_sums, ds_tile + own * PITCH_P, p_row, q_tile, lane);
            add_weighted<TILE, LANES, DV / LANES, PITCH_V>(dv_sums, p_row, p_row, do_tile, lane);
            __syncwarp();  // and have been read
        }
    }
    if (key >= item.end) return;
    i64 at = ((i64)batch * keys + key) * kv_heads + kv_head;
    add_to(dk + at * head_dim, dk_sums, lane, head_dim, scale);
    add_to(dv + at * value_dim, dv_sums, lane, value_dim, 1);
}
