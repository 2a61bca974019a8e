// From rows of bf16 in memory to tiles: A tiles are 16 rows of 32, B tiles 16 rows of 16 pairs (tiles.h).
#pragma once

#include "tiles.h"
#include "vectors.h"

INLINE void store_tile(bf16* tile, const __m512i r[16]) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(tile + 32 * i, r[i]);
}

// Rows 2i and 2i + 1 of 32 rows of 16 bf16, `stride` elements apart, as pairs: lane n is (rows[2i][n], rows[2i + 1][n]). Rows
// from `valid` on count as 0.
INLINE __m512i load_pairs(const bf16* rows, int64_t stride, int i, int valid) {
    const auto row = [=](int at) INLINED {
        return at < valid ? _mm256_loadu_si256((const __m256i*)(rows + at * stride)) : _mm256_setzero_si256();
    };
    const __m512i order = (__m512i)((__v16si)lane_numbers() * 0x10001 + (16 << 16));  // 0, 16, 1, 17, …
    return _mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(row(2 * i)), row(2 * i + 1), 1));
}

// B tile of B[k][n] = rows[k][n], of rows as in `load_pairs`.
static inline void pack_rows(bf16* tile, const bf16* rows, int64_t stride, int valid = 32) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(tile + 32 * i, load_pairs(rows, stride, i, valid));
}

// B tile of B[k][n] = columns[n][k]: `valid` rows of 32 bf16, `stride` elements apart, and zeros for more.
static inline void pack_transposed(bf16* tile, const bf16* columns, int64_t stride, int valid = 16) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = i < valid ? _mm512_loadu_si512(columns + i * stride) : _mm512_setzero_si512();
    transpose16(r);
    store_tile(tile, r);
}

// A tile of A[n][k] = rows[k][n], of rows as in `load_pairs`. Returns `sum` plus the sums of the 16 columns.
static inline __m512 pack_rows_as_a(bf16* tile, const bf16* rows, int64_t stride, int valid, __m512 sum = splat(0)) {
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    __m512 sums[2] = {sum, splat(0)};
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        r[i] = load_pairs(rows, stride, i, valid);
        sums[i % 2] = add_products(sums[i % 2], r[i], ones);
    }
    transpose16(r);
    store_tile(tile, r);
    return sums[0] + sums[1];
}
