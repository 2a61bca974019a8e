// What attention of segments of rows over other segments shares forward and backward: where segments are, dropout, and products
// of any number of rows, which are padded with zeros to whole tiles in scratch memory. D is the width of a head.
#pragma once

#include <cstring>

#include "memory.h"
#include "packing.h"

static inline int64_t tiles_of(int64_t rows) { return divide_up(rows, 16); }
static inline int64_t blocks_of(int64_t rows) { return divide_up(rows, 32); }

// Rows of one tensor; `stride` in elements.
struct Matrix {
    bf16* at;
    int64_t stride;
    Matrix from(int64_t row, int64_t column) const { return {at + row * stride + column, stride}; }
};

template <int D>
static void store_zeros(Matrix to, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) memset(to.at + row * to.stride, 0, D * sizeof(bf16));
}

// Where the segments lie among the `total` rows of a tensor, one after the other, perhaps with gaps.
struct Segments {
    const int32_t *start, *rows;
    int64_t count, total;

    int64_t longest() const { return count ? *std::max_element(rows, rows + count) : 0; }

    // Zeros in the gap behind a segment, and in the one before the first.
    template <int D>
    void clear_gaps(Matrix to, int64_t segment) const {
        int64_t end = start[segment] + rows[segment], next = segment + 1 < count ? start[segment + 1] : total;
        store_zeros<D>(to.from(end, 0), next - end);
        if (segment == 0) store_zeros<D>(to, start[0]);
    }
};

// Dropout of one head's weights in one segment. Weights are numbered query by query, `stride` of them each.
struct Dropout {
    uint64_t seed;
    float probability;
    uint32_t stride;

    // For weights of so many keys; `index` is of all heads of all segments.
    Dropout(uint64_t seed, float probability, int64_t index, int64_t keys)
        : seed(seed + 0x9e3779b97f4a7c15 * (uint64_t)index), probability(probability), stride(blocks_of(keys) * 32) {}

    // What it multiplies the rest by.
    float factor() const { return 1.0f / (1.0f - probability); }

    // 1 for the weights that stay, of these numbers counted from (query, key).
    __mmask16 keeps(int64_t query, int64_t key, __m512i numbers) const {
        const uint32_t first = (uint32_t)query * stride + (uint32_t)key;
        return kept(seed, _mm512_add_epi32(numbers, _mm512_set1_epi32((int)first)), probability);
    }
};

// Products of one tile by many, in strips of up to five: many sums at once hide how long each takes. DOWN: `one` is the right
// operand, else the left.
template <bool DOWN>
static void multiply_strips(Operand one, Operand many, int64_t tiles, int64_t steps, float* c, int64_t c_stride) {
    for (int64_t strips = divide_up(tiles, 5), tile = 0; strips > 0; strips--) {
        const int64_t width = divide_up(tiles - tile, strips);
        auto multiply = [&](auto constant) {
            constexpr int W = constant;
            if constexpr (DOWN)
                multiply_tiles<W, 1>(many.from(tile), one, steps, c + tile * 16 * c_stride, c_stride);
            else
                multiply_tiles<1, W>(one, many.from(tile), steps, c + tile * 16, c_stride);
        };
        switch (width) {
            case 1: multiply(std::integral_constant<int, 1>()); break;
            case 2: multiply(std::integral_constant<int, 2>()); break;
            case 3: multiply(std::integral_constant<int, 3>()); break;
            case 4: multiply(std::integral_constant<int, 4>()); break;
            case 5: multiply(std::integral_constant<int, 5>()); break;
        }
        tile += width;
    }
}

// C (16 × 16·b_tiles, fp32, rows `c_stride` apart) = A · B.
static inline void multiply_across(Operand a, Operand b, int64_t b_tiles, int64_t steps, float* c, int64_t c_stride) {
    multiply_strips<false>(a, b, b_tiles, steps, c, c_stride);
}

// C (16·a_tiles × 16, fp32, rows one after the other) = A · B.
static inline void multiply_down(Operand a, int64_t a_tiles, Operand b, int64_t steps, float* c) {
    multiply_strips<true>(b, a, a_tiles, steps, c, 16);
}

// A tiles: rows one after the other, then zeros up to whole tiles.
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

// Rows of D fp32 one after the other, times `factors[row]` if there are any, to bf16.
template <int D, bool SCALED = false>
static void store_rows(Matrix to, const float* from, int64_t rows, const float* factors = nullptr) {
    for (int64_t row = 0; row < rows; row++) {
        for (int i = 0; i < D; i += 32) {
            __m512 low = load(from + row * D + i), high = load(from + row * D + i + 16);
            if constexpr (SCALED) low = low * splat(factors[row]), high = high * splat(factors[row]);
            store(to.at + row * to.stride + i, low, high);
        }
    }
}

// Calls `function(state, segment, head)` for all, in several threads, each with a `prepare()` of its own.
template <typename Prepare, typename Function>
static void for_each_head(int64_t segments, int64_t heads, Prepare prepare, Function function) {
#pragma omp parallel
    {
        const Tiles tiles;
        const FlushToZero flush;
        auto state = prepare();
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < segments * heads; i++) function(state, i / heads, i % heads);
    }
}

// Calls `function` with the head dim as a constant.
template <typename Function>
static void with_head_dim(int64_t head_dim, Function function) {
    switch (head_dim) {
        case 32: return function(std::integral_constant<int, 32>());
        case 64: return function(std::integral_constant<int, 64>());
        case 96: return function(std::integral_constant<int, 96>());
        case 128: return function(std::integral_constant<int, 128>());
    }
}
