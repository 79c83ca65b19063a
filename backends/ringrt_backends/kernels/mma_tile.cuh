// Tiles of 16-bit elements in shared memory, and the products of them on tensor cores.
//
// A row of D elements (a multiple of 64) is D / 8 chunks of 16 bytes; chunk c of row r lies at
// c ^ (r & 7), so that the eight rows that ldmatrix reads at a time lie in different banks.
// Fragments of mma.m16n8k16, see the PTX ISA: of C, lane l holds rows l / 4 and l / 4 + 8 and
// columns 2 * (l % 4) and the next.
#pragma once
#include "work.cuh"

const float LOG2E = 1.4426950408889634f;

template <class T, int D> DEVICE T* chunk_at(T* tile, int row, int chunk) {
    return tile + row * D + ((chunk ^ (row & 7)) << 3);
}

// Bring `rows` rows of `dim` elements to a tile of ROWS x D, zeros beyond. With `vector` every
// row begins at a multiple of 16 bytes and dim is a multiple of 8; the copies are asynchronous.
template <class T, int ROWS, int D, int THREADS>
DEVICE void load_tile(T* tile, const T* from, i64 stride, int rows, int dim, bool vector) {
    const int CHUNKS = D / 8;
#pragma unroll 2
    for (int n = threadIdx.x; n < ROWS * CHUNKS; n += THREADS) {
        int row = n / CHUNKS, chunk = n % CHUNKS, column = chunk * 8;
        T* to = chunk_at<T, D>(tile, row, chunk);
        const T* source = from + row * stride + column;
        if (vector) {
            bool ok = row < rows && column < dim;
            copy_async16(to, ok ? source : from, ok);
        } else {
            Vec16 v;
            for (int i = 0; i < 4; i++) {
                u32 low = row < rows && column + 2 * i < dim ? source[2 * i].bits : 0;
                u32 high = row < rows && column + 2 * i + 1 < dim ? source[2 * i + 1].bits : 0;
                v.x[i] = low | high << 16;
            }
            store16(to, v);
        }
    }
}

// Where a lane of a warp reads a fragment. Its own row and chunk give an offset that does not
// change; a chunk that the whole warp moves on by (even, so within the swizzle of 128 bytes only bits
// flip) and a row (a multiple of 8) are then cheap to add, in place of a register for each.
template <int D> DEVICE u32 lane_offset(int row, int chunk) { return row * D * 2 + ((chunk ^ (row & 7)) << 4); }
template <class T, int D> DEVICE const T* fragment_at(const T* tile, u32 lane, int row0, int chunk0) {
    u32 bytes = chunk0 * 16;
    return (const T*)((const unsigned char*)tile + ((lane ^ (bytes & 127)) + (bytes & ~127u) + row0 * D * 2));
}

// A operand: rows row0 .. row0 + 15, elements 16 * k ..
template <class T, int D> DEVICE void load_a(u32* a, const T* tile, int row0, int k) {
    int lane = threadIdx.x % 32;
    ldmatrix_x4(a, fragment_at<T, D>(tile, lane_offset<D>(lane % 16, lane / 16), row0, 2 * k));
}
// B operands of two neighbouring 8-column blocks: the columns are rows n0 .. n0 + 15 of the tile.
template <class T, int D> DEVICE void load_b(u32* b, const T* tile, int n0, int k) {
    int lane = threadIdx.x % 32;
    ldmatrix_x4(b, fragment_at<T, D>(tile, lane_offset<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2), n0, 2 * k));
}
// The same where the columns are elements 16 * n .. and k runs over rows k0 .. k0 + 15.
template <class T, int D> DEVICE void load_b_trans(u32* b, const T* tile, int k0, int n) {
    int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(b, fragment_at<T, D>(tile, lane_offset<D>(lane % 16, lane / 16), k0, 2 * n));
}

// c (16 x 8 * N per m-tile) += rows of `a_tile` times the rows of `b_tile`, over D elements.
template <class T, int D, int M, int N>
DEVICE void product_of_rows(float (&c)[M][N][4], const T* a_tile, int row0, const T* b_tile) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_a<T, D>(a[m], a_tile, row0 + 16 * m, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            load_b<T, D>(b, b_tile, 8 * n, k);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16816(c[m][n], a[m], b, T());
                mma_16816(c[m][n + 1], a[m], b + 2, T());
            }
        }
    }
}

// c (16 x D per m-tile) += p (16 x 8 * N, rounded to T) times a tile of 8 * N rows. Two
// neighbouring C fragments are one A fragment.
template <class T, int D, int M, int N>
DEVICE void product_with_tile(float (&c)[M][D / 8][4], const float (&p)[M][N][4], const T* tile) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            a[m][0] = pack2(p[m][2 * k][0], p[m][2 * k][1], T());
            a[m][1] = pack2(p[m][2 * k][2], p[m][2 * k][3], T());
            a[m][2] = pack2(p[m][2 * k + 1][0], p[m][2 * k + 1][1], T());
            a[m][3] = pack2(p[m][2 * k + 1][2], p[m][2 * k + 1][3], T());
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            u32 b[4];
            load_b_trans<T, D>(b, tile, 16 * k, n);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16816(c[m][2 * n], a[m], b, T());
                mma_16816(c[m][2 * n + 1], a[m], b + 2, T());
            }
        }
    }
}

template <int M, int N> DEVICE void clear(float (&c)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[m][n][e] = 0.f;
}

// How raw products q.k become scores in powers of two. Where `plain`, the score is x * factor with
// factor = scale * log2(e) > 0, left to the exponent's multiply-add. Otherwise (softcap, or a
// scale that is not positive) `apply` makes it, and factor is 1.
struct Scores {
    float scale, softcap, factor;
    bool plain;

    DEVICE Scores(float scale, float softcap) : scale(scale), softcap(softcap) {
        plain = scale > 0.f && softcap == 0.f;
        factor = plain ? scale * LOG2E : 1.f;
    }
    DEVICE float apply(float x) const {
        float s = scale == 0.f ? x * 0.f : x * scale;
        return (softcap > 0.f ? softcap * tanhf(s / softcap) : s) * LOG2E;
    }
    // d capped / d uncapped at a score that `apply` gave.
    DEVICE float slope(float s) const {
        float t = s / (softcap * LOG2E);
        return 1.f - t * t;
    }
};

template <int M, int N> DEVICE void apply_scores(float (&s)[M][N][4], const Scores& scores) {
    if (scores.plain) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[m][n][e] = scores.apply(s[m][n][e]);
}

// -inf where row i does not see key j. The fragment's rows begin at i0 and its columns at j0 or,
// TRANSPOSED, the other way round.
template <bool TRANSPOSED, int M, int N>
DEVICE void hide(float (&s)[M][N][4], const Piece& piece, int row0, int column0) {
    int lane = threadIdx.x % 32;
    bool whole = TRANSPOSED ? all_see(piece, column0, column0 + 8 * N, row0, row0 + 16 * M)
                            : all_see(piece, row0, row0 + 16 * M, column0, column0 + 8 * N);
    if (whole) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = row0 + 16 * m + lane / 4 + 8 * h;
            Range seen = TRANSPOSED ? queries_of(piece, row) : keys_of(piece, row);
            int begin = seen.begin - column0 - lane % 4 * 2, end = seen.end - column0 - lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (8 * n + e < begin || 8 * n + e >= end) s[m][n][2 * h + e] = -INF;
        }
}
