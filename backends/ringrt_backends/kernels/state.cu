// The two ends of a forward pass: the empty state (or that of the sink), and out and lse.
//
// Compile with -DTYPE= (type of out), -DSTATE=float|double (of m, z, y), -DLSE=float|double, and
// -DUNIT=: natural units of m, 1 or ln(2).
#include "prims.cuh"

typedef TYPE T;

#define THREADS 128

// m, z [heads * rows]; y [heads * rows, value_dim]. `sink` holds a logit for each of q_heads, or
// nothing: with it every row has seen one key of that score, whose value is 0.
KERNEL(THREADS)
begin(STATE* m, STATE* z, STATE* y, const double* sink, int has_sink, int rows, int q_heads, i64 heads, int value_dim) {
    i64 total = heads * rows;
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < total; n += (i64)gridDim.x * THREADS) {
        double logit = has_sink ? sink[n / rows % q_heads] : -INF;
        m[n] = STATE(logit / UNIT);
        z[n] = logit == -INF ? STATE(0) : STATE(1);
        for (int d = 0; d < value_dim; d++) y[n * value_dim + d] = STATE(0);
    }
}

// out [batches, rows, q_heads, value_dim], lse [batches, q_heads, rows]: y / z and m + ln z; a
// row that has seen nothing gives 0 and -inf. One thread for each element of out.
KERNEL(THREADS)
finish(const STATE* m, const STATE* z, const STATE* y, T* out, LSE* lse, int rows, int q_heads, i64 heads, int value_dim) {
    i64 total = heads * rows * value_dim;
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < total; n += (i64)gridDim.x * THREADS) {
        i64 at = n / value_dim, head = at / rows, row = at % rows, batch = head / q_heads;
        int d = n % value_dim;
        bool empty = z[at] == STATE(0);
        out[((batch * rows + row) * q_heads + head % q_heads) * value_dim + d] = narrow<T>(empty ? STATE(0) : y[n] / z[at]);
        if (d == 0) lse[at] = empty ? LSE(-INF) : LSE((double)m[at] * UNIT + log((double)z[at]));
    }
}
