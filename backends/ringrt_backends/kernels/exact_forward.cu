// Forward for fp32 and fp64; see exact_tile.cuh. The state (m, z, y) is fp64, m in natural units.
#include "exact_tile.cuh"

#define TILE (sizeof(T) * WIDEST > 512 ? 16 : 32)
#define LANES (THREADS / TILE)
#define PITCH_K (DK + 1)
#define PITCH_P (TILE + 1)

// Arguments as in mma_forward.cu.
KERNEL(THREADS)
forward(const T* q, const T* k, const T* v, double* m_all, double* z_all, double* y_all, const int* items,
        const int* pieces, int rows, int batches, int q_heads, int group, int head_dim, int value_dim,
        i64 q_batch, i64 q_row, i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row,
        i64 v_head, double scale, double softcap) {
    DYN_SMEM(shared);
    T* q_tile = (T*)shared;
    T* k_tile = q_tile + TILE * PITCH_K;
    T* v_tile = k_tile + TILE * PITCH_K;
    T* p_tile = v_tile + TILE * DV;
    int heads = batches * q_heads, at = blockIdx.x % heads;
    Item item = load_item(items, blockIdx.x / heads);
    int batch = at / q_heads, head = at % q_heads, kv_head = head / group;
    int first = item.first, own = threadIdx.x / LANES, lane = threadIdx.x % LANES, row = first + own;
    q += batch * q_batch + first * q_row + head * q_head;
    k += batch * k_batch + kv_head * k_head;
    v += batch * v_batch + kv_head * v_head;
    T* p_row = p_tile + own * PITCH_P;
    i64 state = (i64)at * rows + row;
    bool mine = row < item.end;

    double m = -INF, z = 0, y[DV / LANES];
#pragma unroll
    for (int n = 0; n < DV / LANES; n++) y[n] = 0;
    load_rows<TILE, DK, PITCH_K>(q_tile, q, q_row, item.end - first, head_dim);
    for (Walk<true, TILE> here(pieces, item); here.more(); here.next()) {
        __syncthreads();  // nobody reads the last K and V any more
        load_rows<TILE, DK, PITCH_K>(k_tile, k + here.at * k_row, k_row, here.count(), head_dim);
        load_rows<TILE, DV, DV>(v_tile, v + here.at * v_row, v_row, here.count(), value_dim);
        __syncthreads();
        Range seen = keys_of(here.piece(), row);
        double s[TILE / LANES], top = m, slope;
#pragma unroll
        for (int n = 0; n < TILE / LANES; n++) {
            int key = lane + n * LANES;
            bool sees = here.at + key >= seen.begin && here.at + key < seen.end;
            s[n] = sees ? score_of(dot<DK>(q_tile + own * PITCH_K, k_tile + key * PITCH_K), scale, softcap, &slope) : -INF;
            top = s[n] > top ? s[n] : top;
        }
        top = max_of_lanes<LANES>(top);
        double shift = top == -INF ? 0 : top;  // a row that has seen nothing stays empty
        double keep = exp(m - shift), sum = 0;
#pragma unroll
        for (int n = 0; n < TILE / LANES; n++) {
            int key = lane + n * LANES;
            bool sees = here.at + key >= seen.begin && here.at + key < seen.end;
            T p = sees ? exp_of(s[n] - shift, T()) : T(-1);
            p_row[key] = p;
            if (sees) sum += p;
        }
        m = top;
        z = z * keep + sum_of_lanes<LANES>(sum);
#pragma unroll
        for (int n = 0; n < DV / LANES; n++) y[n] *= keep;
        __syncwarp();  // the row's probabilities are there
        add_weighted<TILE, LANES, DV / LANES, DV>(y, p_row, p_row, v_tile, lane);
    }
    double old = mine ? m_all[state] : -INF, old_z = mine ? z_all[state] : 0;
    __syncwarp();  // all lanes of the row have read what one of them writes
    if (!mine || (m == -INF && z == 0)) return;
    double now = old > m ? old : m, shift = now == -INF ? 0 : now, keep = exp(old - shift), add = exp(m - shift);
    if (lane == 0) {
        m_all[state] = now;
        z_all[state] = old_z * keep + z * add;
    }
#pragma unroll
    for (int n = 0; n < DV / LANES; n++) {
        int d = lane + n * LANES;
        if (d < value_dim) y_all[state * value_dim + d] = y_all[state * value_dim + d] * keep + y[n] * add;
    }
}
