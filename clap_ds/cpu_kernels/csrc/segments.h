// Shared code of forward and backward attention of segments of rows over other segments: segments' places, dropout, and products
// of any number of rows, zero-padded to whole tiles in scratch memory. D is the width of a head.
#pragma once

#include "memory.h"
#include "packing.h"

static inline int64_t tiles_of(int64_t rows) { return divide_up(rows, 16); }
static inline int64_t blocks_of(int64_t rows) { return divide_up(rows, 32); }

// Rows of one tensor; `stride` in elements.
struct Matrix {
    bf16* at;
    int64_t stride;

    Matrix from(int64_t row, int64_t column) const { return {at + row * stride + column, stride}; }
    void clear(int64_t rows, int64_t columns) const {
        for (int64_t row = 0; row < rows; row++) memset(at + row * stride, 0, columns * sizeof(bf16));
    }
};

// Places of the segments among the `total` rows of a tensor, in order, with optional gaps.
struct Segments {
    const int32_t *start, *rows;
    int64_t count, total;

    int64_t longest() const { return count ? *std::max_element(rows, rows + count) : 0; }

    // Columns of a segment's rows. With `clears`, zeros the gap after it, and before the first.
    Matrix part(Matrix all, int64_t segment, int64_t column, int64_t columns, bool clears) const {
        const int64_t end = start[segment] + rows[segment];
        if (clears) all.from(end, column).clear((segment + 1 < count ? start[segment + 1] : total) - end, columns);
        if (clears && segment == 0) all.from(0, column).clear(start[0], columns);
        return all.from(start[segment], column);
    }
};

// Dropout of one head's weights in one segment. Each query has `stride` weight numbers.
struct Dropout {
    uint64_t seed;
    float probability;
    uint32_t stride;

    // Factor of kept weights.
    float factor() const { return 1.0f / (1.0f - probability); }

    // 1 for kept weights among these numbers counted from (query, key).
    __mmask16 keeps(int64_t query, int64_t key, __m512i numbers) const {
        const uint32_t first = (uint32_t)query * stride + (uint32_t)key;
        return kept(seed, _mm512_add_epi32(numbers, _mm512_set1_epi32((int)first)), probability);
    }
};

// C (fp32, rows `c_stride` apart) = A · B. One of them (with DOWN the right one) is one tile wide, the other `tiles`, processed
// in strips of up to five, because many simultaneous sums hide latency.
template <bool DOWN>
static void multiply(Operand a, Operand b, int64_t tiles, int64_t steps, float* c, int64_t c_stride) {
    for (int64_t strips = divide_up(tiles, 5), tile = 0; strips > 0; strips--) {
        const int64_t width = divide_up(tiles - tile, strips);
        with_constant<1, 2, 3, 4, 5>(width, [=](auto constant) {
            if constexpr (DOWN)
                multiply_tiles<constant, 1>(a.from(tile), b, steps, c + tile * 16 * c_stride, c_stride);
            else
                multiply_tiles<1, constant>(a, b.from(tile), steps, c + tile * 16, c_stride);
        });
        tile += width;
    }
}

// A tiles: consecutive rows, then zeros up to whole tiles.
template <int D>
static Operand copy_padded(bf16* to, Matrix from, int64_t rows) {
    for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < D; i += 32)
            _mm512_storeu_si512(to + row * D + i, _mm512_loadu_si512(from.at + row * from.stride + i));
    memset(to + rows * D, 0, (tiles_of(rows) * 16 - rows) * D * sizeof(bf16));
    return {to, D, 16 * D, 32};
}

// B tiles of rows as columns, D / 32 tiles for each 16 rows.
template <int D>
static Operand pack_columns(bf16* to, Matrix from, int64_t rows) {
    for (int64_t tile = 0; tile < tiles_of(rows); tile++)
        for (int i = 0; i < D / 32; i++)
            pack_transposed(to + (tile * (D / 32) + i) * TILE, from.from(16 * tile, 32 * i).at, from.stride,
                            (int)std::min<int64_t>(16, rows - 16 * tile));
    return {to, 32, D / 32 * TILE, TILE};
}

// B tiles of rows to sum over, D / 16 tiles for each 32 rows.
template <int D>
static Operand pack_summed(bf16* to, Matrix from, int64_t rows) {
    for (int64_t block = 0; block < blocks_of(rows); block++)
        for (int i = 0; i < D / 16; i++)
            pack_rows(to + (block * (D / 16) + i) * TILE, from.from(32 * block, 16 * i).at, from.stride,
                      (int)std::min<int64_t>(32, rows - 32 * block));
    return {to, 32, TILE, D / 16 * TILE};
}

// Consecutive rows of D fp32, times `factors[row]` if not null, to bf16.
template <int D>
static void store_rows(Matrix to, const float* from, int64_t rows, const float* factors = nullptr) {
    for (int64_t row = 0; row < rows; row++) {
        const __m512 factor = splat(factors ? factors[row] : 1.0f);
        for (int i = 0; i < D; i += 32)
            store(to.at + row * to.stride + i, load(from + row * D + i) * factor, load(from + row * D + i + 16) * factor);
    }
}

// A call's segments and sizes, as 64-bit integers.
struct Sizes {
    int64_t count, q_rows, k_rows, heads, head_dim;
    uint64_t seed;
};

// A head of a segment; `index` is of all heads of all segments.
struct SegmentHead {
    const Segments &in_queries, &in_keys;
    const Sizes& sizes;
    int64_t index;
    float scale, probability;
    const int64_t segment = index / sizes.heads, head = index % sizes.heads, dim = sizes.head_dim;
    const int64_t queries = in_queries.rows[segment], keys = in_keys.rows[segment];
    const Dropout dropout = {sizes.seed + 0x9e3779b97f4a7c15 * (uint64_t)index, probability, (uint32_t)blocks_of(keys) * 32};

    Matrix of_queries(Matrix all, bool clears = false) const {
        return in_queries.part(all, segment, head * dim, dim, clears);
    }
    Matrix of_keys(Matrix all, bool clears = false) const { return in_keys.part(all, segment, head * dim, dim, clears); }
    // Of the first query in (heads, rows of queries).
    int64_t place() const { return head * in_queries.total + in_queries.start[segment]; }
};

// Calls a State<head dim>'s `attend(head, at, log_sums)` for all heads, in several threads, each with its own state, made from
// the longest segments' lengths. `places` is (4, count): where queries start, their rows, where keys start, their rows.
template <template <int> class State, typename LogSum>
static void for_each_head(
    const Matrix* at, LogSum* log_sums, const int32_t* places, const Sizes& sizes, float scale, float dropout) {
    const int64_t count = sizes.count;
    const Segments queries = {places, places + count, count, sizes.q_rows};
    const Segments keys = {places + 2 * count, places + 3 * count, count, sizes.k_rows};
    with_constant<32, 64, 96, 128>(sizes.head_dim, [&](auto constant) {
#pragma omp parallel
        {
            const Tiles tiles;
            const FlushToZero flush;
            State<decltype(constant)::value> state(queries.longest(), keys.longest());
#pragma omp for schedule(dynamic, 4)
            for (int64_t i = 0; i < count * sizes.heads; i++)
                state.attend({queries, keys, sizes, i, scale, dropout}, at, log_sums);
        }
    });
}
