// What a block works on: its rows, and the pieces of the other side that they meet.
//
// The host cuts the band tiles at blocks of rows. `items` [n][4] holds, for each block, its first
// row and the row behind its last, and the range of its pieces; blocks with the most work come
// first. `pieces` [n][6] are tiles in the shard's own indices: rows [q0, q1) see keys [k0, k1) where
// lower <= i - j <= upper; indices and bounds are below 2^30 in size. A block has no rows that one of
// its pieces has not: a row that has nothing to do with a piece never meets what its keys hold,
// not even with weight 0, which would make NaN of NaN.
#pragma once
#include "prims.cuh"

struct Piece { int q0, q1, k0, k1, lower, upper; };

DEVICE Piece load_piece(const int* pieces, int index) {
    const int* p = pieces + (i64)index * 6;
    return Piece{p[0], p[1], p[2], p[3], p[4], p[5]};
}

struct Range { int begin, end; };

// The keys that row i sees, and the rows that see key j, of a piece that has that row, or key.
DEVICE Range keys_of(const Piece& p, int i) {
    return Range{max_of(p.k0, i - p.upper), min_of(p.k1, i - p.lower + 1)};
}
DEVICE Range queries_of(const Piece& p, int j) {
    return Range{max_of(p.q0, j + p.lower), min_of(p.q1, j + p.upper + 1)};
}

struct Item { int first, end, pieces_begin, pieces_end; };

DEVICE Item load_item(const int* items, int index) {
    const int* p = items + (i64)index * 4;
    return Item{p[0], p[1], p[2], p[3]};
}

// Whether all of rows [i0, i1) see all of keys [j0, j1).
DEVICE bool all_see(const Piece& p, int i0, int i1, int j0, int j1) {
    return i0 >= p.q0 && i1 <= p.q1 && j0 >= p.k0 && j1 <= p.k1
        && i0 - (j1 - 1) >= p.lower && (i1 - 1) - j0 <= p.upper;
}

// One [batch, rows, heads, dim] tensor: elements from one index to the next; dim is contiguous.
struct Strides { i64 batch, row, head; };

// Walks over the tiles of a list of pieces, TILE rows of one side at a time.
// KEYS: along the keys of each piece; otherwise along its queries.
template <bool KEYS, int TILE> struct Walk {
    const int* pieces;
    int index, end, at, stop;

    DEVICE Walk(const int* pieces, const Item& item)
        : pieces(pieces), index(item.pieces_begin), end(item.pieces_end) { enter(); }
    DEVICE bool more() const { return index < end; }
    // Rows of the present tile.
    DEVICE int count() const { return min_of(TILE, stop - at); }
    // Loaded anew where it is needed: registers are dear.
    DEVICE Piece piece() const { return load_piece(pieces, index); }
    DEVICE void next() {
        at += TILE;
        if (at >= stop) {
            index++;
            enter();
        }
    }
    DEVICE void enter() {
        if (index >= end) return;
        const int* range = pieces + (i64)index * 6 + (KEYS ? 2 : 0);
        at = range[0];
        stop = range[1];
    }
};
