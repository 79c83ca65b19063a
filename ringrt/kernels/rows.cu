// What the runtime does with arrays between ring steps: rows picked out, sums added, sums rounded,
// delta and the gradient of sinks.
//
// Compile with -DTYPE= (of q, k, v, out), -DSUM=float|double (of sums, lse and delta) and
// -DWORD=u16|u32|u64 (an element that is only moved).
#include "prims.cuh"

#define THREADS 128
#define EACH(n, total) \
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < (total); n += (i64)gridDim.x * THREADS)

// to [n0, n1, n2, n3], contiguous, from elements s0 .. s3 apart, where index i along `axis` means
// start + i, or index[i].
KERNEL(THREADS)
take(const WORD* from, WORD* to, const int* index, int has_index, i64 start, int axis, i64 n0, i64 n1, i64 n2,
     i64 n3, i64 s0, i64 s1, i64 s2, i64 s3) {
    i64 strides[4] = {s0, s1, s2, s3};
    EACH(n, n0 * n1 * n2 * n3) {
        i64 at[4] = {n / (n1 * n2 * n3), n / (n2 * n3) % n1, n / n3 % n2, n % n3};
        i64 source = 0;
        for (int d = 0; d < 4; d++) {
            i64 i = at[d];
            if (d == axis) i = has_index ? index[i] : start + i;
            source += i * strides[d];
        }
        to[n] = from[source];
    }
}

// total [batch, total_rows, width] += part [batch, part_rows, width]: row to[i] or to_start + i of
// the one, row from[i] or from_start + i of the other, for `count` rows i. No row is named twice.
KERNEL(THREADS)
add_rows(SUM* total, const SUM* part, const int* to, int has_to, i64 to_start, const int* from, int has_from,
         i64 from_start, i64 batch, i64 count, i64 width, i64 total_rows, i64 part_rows) {
    EACH(n, batch * count * width) {
        i64 b = n / (count * width), i = n / width % count, w = n % width;
        i64 at = has_to ? to[i] : to_start + i, source = has_from ? from[i] : from_start + i;
        total[(b * total_rows + at) * width + w] += part[(b * part_rows + source) * width + w];
    }
}

// Sums rounded to TYPE.
KERNEL(THREADS)
rounded(const SUM* from, TYPE* to, i64 count) {
    EACH(n, count) to[n] = narrow<TYPE>(from[n]);
}

// delta [batch, heads, rows] = sum over dim of dout * out, less what lies in `less` if it counts, in
// fp64; dout and out [batch, rows, heads, dim] by their strides. One warp a row.
KERNEL(THREADS)
row_delta(const TYPE* dout, const TYPE* out, SUM* delta, const SUM* less, int has_less, i64 batch, i64 rows,
          i64 heads, int dim, i64 d0, i64 d1, i64 d2, i64 d3, i64 o0, i64 o1, i64 o2, i64 o3) {
    int lane = threadIdx.x % 32;
    for (i64 n = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; n < batch * heads * rows;
         n += (i64)gridDim.x * (THREADS / 32)) {
        i64 row = n % rows, head = n / rows % heads, b = n / (rows * heads);
        const TYPE* a = dout + b * d0 + row * d1 + head * d2;
        const TYPE* c = out + b * o0 + row * o1 + head * o2;
        double sum = 0;
        for (int d = lane; d < dim; d += 32) sum += (double)widen(a[d * d3]) * (double)widen(c[d * o3]);
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) delta[n] = SUM(has_less ? sum - (double)less[n] : sum);
    }
}

// part [batch * heads]: minus the sum over rows that see a key of e^(sink - lse) * delta, see
// engine/backward.py. One warp for each batch and head, always in the same order.
KERNEL(32)
sink_gradient(const double* sink, const SUM* lse, const SUM* delta, const unsigned char* seen, double* part,
              i64 rows, int heads) {
    i64 at = blockIdx.x;
    double logit = sink[at % heads], sum = 0;
    for (i64 row = threadIdx.x; row < rows; row += 32)
        if (seen[row]) sum -= exp(logit - (double)lse[at * rows + row]) * (double)delta[at * rows + row];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x == 0) part[at] = logit == -INF ? 0 : sum;
}
