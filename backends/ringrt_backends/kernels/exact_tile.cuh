// Tiles for fp32 and fp64: no tensor cores, sums in fp64. Products of fp32 are added four at a time
// in fp32 and go on in fp64, since a plain fp32 sum over a long row loses more than fp32's last bit.
//
// A block owns TILE rows, each served by LANES neighbouring threads of a warp, and meets TILE rows
// of the other side at a time. Where a row does not see a row of the other side it neither adds
// nor multiplies, so NaN and inf there stay there.
//
// Compile with -DTYPE=float|double -DDK=, -DDV= (multiples of 32 that hold head_dim and value_dim).
#pragma once
#include "work.cuh"

typedef TYPE T;

#define THREADS 128
#define WIDEST (DK > DV ? DK : DV)

// The number of lanes of a row is a power of two below 32.
template <int LANES> DEVICE double sum_of_lanes(double x) {
    for (int step = 1; step < LANES; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
template <int LANES> DEVICE double max_of_lanes(double x) {
    for (int step = 1; step < LANES; step *= 2) {
        double other = __shfl_xor_sync(~0u, x, step);
        x = other > x ? other : x;
    }
    return x;
}

// `rows` rows of `dim` elements to a tile whose rows are PITCH apart; zeros beyond.
template <int ROWS, int D, int PITCH> DEVICE void load_rows(T* tile, const T* from, i64 stride, int rows, int dim) {
    for (int n = threadIdx.x; n < ROWS * D; n += THREADS) {
        int row = n / D, d = n % D;
        tile[row * PITCH + d] = row < rows && d < dim ? from[row * stride + d] : T(0);
    }
}

template <int D> DEVICE double dot(const T* a, const T* b) {
    double sum = 0;
    for (int d = 0; d < D; d += 4) {
        T four = a[d] * b[d];
        for (int i = 1; i < 4; i++) four += a[d + i] * b[d + i];
        sum += four;
    }
    return sum;
}

// sums[n] += sum over the tile's rows of weight * element d0 + n * LANES; rows of negative weight
// are left out. Weights of a row lie side by side.
template <int TILE, int LANES, int N, int PITCH>
DEVICE void add_weighted(double (&sums)[N], const T* weights, const T* sees, const T* tile, int d0) {
    for (int r = 0; r < TILE; r += 4) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            T four = 0;
            for (int i = 0; i < 4; i++)
                if (!(sees[r + i] < T(0))) four += weights[r + i] * tile[(r + i) * PITCH + d0 + n * LANES];
            sums[n] += four;
        }
    }
}

DEVICE float exp_of(double x, float) { return expf((float)x); }
DEVICE double exp_of(double x, double) { return exp(x); }

// A score: scale * q.k, capped. `slope` is its derivative by scale * q.k.
DEVICE double score_of(double product, double scale, double softcap, double* slope) {
    double s = product * scale;
    *slope = 1;
    if (softcap > 0) {
        double t = tanh(s / softcap);
        s = softcap * t;
        *slope = 1 - t * t;
    }
    return s;
}
