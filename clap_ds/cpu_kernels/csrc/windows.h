// Places of the tokens of 8 × 8 windows in a square grid, which of them attend to each other, and reading and writing of their
// rows, which includes partition, cyclic shift and reverse. Rows of a head become B tiles of pairs by unpacking halves of
// 128-bit lanes, which leaves the columns of each 32 in the order 0-3, 8-11, 16-19, 24-27 (tile "low") and 4-7, 12-15, 20-23,
// 28-31 ("high"). `write_row` restores the order of products.
#pragma once

#include <cmath>

#include "memory.h"
#include "packing.h"

constexpr int N = 64;                        // tokens of a window
constexpr int SIDE = 8;                      // of a window
constexpr float MASKED = -100.0f * LOG2E;    // MASKED_SCORE of window_attention.py
constexpr int64_t GROUP_BYTES = 256 * 1024;  // of qkv that stay in the L2 cache while all heads are processed

struct Shape {
    int64_t clips, grid, heads, dim, shift;

    int64_t per_side() const { return grid / SIDE; }
    int64_t windows() const { return clips * per_side() * per_side(); }
    int64_t width() const { return heads * dim; }

    // Calls function(t, row of the (clips · grid², …) matrix that holds it) for a window's tokens from `begin` to `end`.
    template <typename Function>
    void for_tokens(int64_t window, int64_t begin, int64_t end, Function function) const {
        const int64_t rows = window / per_side(), clip = rows / per_side();
        const int64_t top = (rows - clip * per_side()) * SIDE + shift, left = (window - rows * per_side()) * SIDE + shift;
        for (int64_t t = begin; t < end; t++) {
            const int64_t row = top + t / SIDE, column = left + t % SIDE;
            function(t, (clip * grid + row - (row >= grid ? grid : 0)) * grid + column - (column >= grid ? grid : 0));
        }
    }
};

// Places of a window's tokens, and which of them attend to each other.
struct Window {
    int64_t token[N];
    uint64_t apart[N];  // bit k: token k is in another region; set if `masked`
    bool masked;

    void set(const Shape& shape, int64_t index) {
        shape.for_tokens(index, 0, N, [this](int64_t t, int64_t row) { token[t] = row; });
        const int64_t last = shape.per_side() - 1;
        const bool last_down = index / (last + 1) % (last + 1) == last, last_across = index % (last + 1) == last;
        masked = shape.shift > 0 && (last_down || last_across);
        if (!masked) return;
        uint64_t below = 0, right = 0;  // tokens that the shift moved from the grid's other side
        if (last_down) below = ~0ull << (SIDE * (SIDE - shape.shift));
        if (last_across) right = 0x0101010101010101ull * (uint8_t)(0xff << (SIDE - shape.shift));
        for (int t = 0; t < N; t++) apart[t] = (below ^ -(below >> t & 1)) | (right ^ -(right >> t & 1));
    }
};

// Scores of 16 tokens, from 16 · `column` on, with one: product · factor + bias, in base 2, lower if `apart`.
template <bool MASKS>
static inline __m512 score_of(const float* product, __m512 factor, const float* bias, uint64_t apart, int column) {
    const __m512 score = fma(load(product), factor, load(bias));
    return MASKS ? _mm512_mask_add_ps(score, (__mmask16)(apart >> (16 * column)), score, splat(MASKED)) : score;
}

// One head's part of the rows of a window's tokens.
struct Rows {
    const bf16* first;
    int64_t stride;
    const int64_t* token;
    int64_t dim;

    Rows right(int64_t columns) const { return {first + columns, stride, token, dim}; }

    // To any of: A tiles, row-major, [step][token / 16]; B tiles of the transpose, the same; B tiles of pairs of tokens,
    // [token / 32][step][low, high], PAIR_TILES for each 32 tokens. With `ones`, the column after the last is all 1.
    template <int STEPS, int PAIR_TILES = 2 * STEPS>
    void pack(bf16* straight, bf16* columns, bf16* pairs, bool ones = false) const {
        for (int step = 0; step < STEPS; step++) {
            const __mmask32 mask = first_of_32(dim - 32 * step);
            __m512i beyond = _mm512_setzero_si512();
            if (ones && dim / 32 == step) beyond = _mm512_maskz_set1_epi16(1u << (dim % 32), 0x3f80);
            for (int block = 0; block < N / 16; block++) {
                const int tile = (step * 4 + block) * TILE;
                __m512i r[16];
                for (int i = 0; i < 16; i++)
                    r[i] = _mm512_mask_loadu_epi16(beyond, mask, first + token[16 * block + i] * stride + 32 * step);
                if (straight) store_tile(straight + tile, r);
                if (pairs) {
                    bf16* low = pairs + (block / 2 * PAIR_TILES + 2 * step) * TILE + block % 2 * TILE / 2;
                    for (int i = 0; i < 16; i += 2) {
                        _mm512_storeu_si512(low + 16 * i, _mm512_unpacklo_epi16(r[i], r[i + 1]));
                        _mm512_storeu_si512(low + TILE + 16 * i, _mm512_unpackhi_epi16(r[i], r[i + 1]));
                    }
                }
                if (columns) {
                    transpose16(r);
                    store_tile(columns + tile, r);
                }
            }
        }
    }
};

// Converts a row of a product into one head's part of a token's row.
template <int STEPS>
static inline void write_row(bf16* to, const float* from, __m512 factor, const __mmask32* mask) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int step = 0; step < STEPS; step++) {
        const __m512i halves = to_bf16(load(from + 32 * step) * factor, load(from + 32 * step + 16) * factor);
        _mm512_mask_storeu_epi16(to + 32 * step, mask[step], _mm512_permutexvar_epi64(order, halves));
    }
}

// A thread's share of windows' heads: groups of windows, each processed head by head.
struct Share {
    const Shape& shape;
    const int64_t windows = shape.windows(), heads = shape.heads;
    const int64_t group = std::max<int64_t>(1, GROUP_BYTES / (N * 3 * shape.width() * (int64_t)sizeof(bf16)));
    const Range range = share_of(windows * heads);

    // Window and head.
    std::pair<int64_t, int64_t> at(int64_t i) const {
        const int64_t start = i / (group * heads) * group;
        const int64_t size = std::min(group, windows - start), rest = i - start * heads;
        return {start + rest % size, rest / size};
    }
    // Calls fetch(token, row of the matrix) for this head's share, or one part of it, of a window's tokens of the next group.
    template <class Fetch>
    void ahead(int64_t window, int64_t head, int part, int parts, Fetch fetch) const {
        const int64_t own = head * parts + part, all = heads * parts;
        if (window + group < windows) shape.for_tokens(window + group, N * own / all, N * (own + 1) / all, fetch);
    }
};
