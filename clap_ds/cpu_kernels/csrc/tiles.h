// The kernels' only operation on tiles, with AMX or AVX-512, depending on compiler flags. A product C (16 × 16 fp32) += A (16 ×
// 32 bf16) · B (32 × 16 bf16) takes B with pairs of rows interleaved: row r of the tile holds B[2r][n], B[2r+1][n] for n = 0 …
// 15 ("pairs": one 32-bit lane is one pair).
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

constexpr int TILE = 512;  // bf16 elements of a tile

// Tiles of one side of a product; all distances in elements: between rows of a tile, from one tile to the next across the
// result, and from one to the next along what is summed over.
struct Operand {
    const bf16* at;
    int64_t row, tile, step;

    Operand from(int64_t tiles) const { return {at + tiles * tile, row, tile, step}; }
};

enum Reuse { KEEPS, STREAMS };  // whether an operand should stay in the L1 cache

#ifdef CLAP_AMX

constexpr int64_t SLICE = 768;  // elements of a linear layer's sum that are multiplied at once

#ifdef CLAP_EMULATED_AMX
#include CLAP_EMULATED_AMX  // from tests, for processors without AMX
#else

// The compiler's intrinsics don't accept tile numbers that depend on template parameters. These don't declare which memory
// loads and stores access, so `fence`, which isn't an instruction, does.
namespace amx {

INLINE void configure(const uint8_t (&layout)[64]) { asm volatile("ldtilecfg %0" ::"m"(layout)); }
INLINE void release() { asm volatile("tilerelease"); }
template <int TO, Reuse REUSE = KEEPS>
INLINE void load(const void* from, int64_t row_bytes) {
    if constexpr (REUSE == KEEPS)
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(TO));
    else
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(TO));
}
template <int FROM>
INLINE void store(void* to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(FROM));
}
template <int SUM>
INLINE void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(SUM)); }
template <int SUM, int LEFT, int RIGHT>
INLINE void multiply_add() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT)); }
INLINE void fence() { asm volatile("" ::: "memory"); }

}  // namespace amx

#endif

// Configures all eight tiles as 16 rows of 64 bytes for the calling thread, which needs one while it multiplies.
struct Tiles {
    Tiles() {
        uint8_t layout[64] = {1};
        for (int i = 0; i < 8; i++) {
            layout[16 + 2 * i] = 64;  // bytes of a row
            layout[48 + i] = 16;      // rows
        }
        amx::configure(layout);
    }
    ~Tiles() { amx::release(); }
};

// Calls function(0), … function(COUNT − 1), numbers being constants.
template <int... I, typename Function>
INLINE void each(std::integer_sequence<int, I...>, Function function) {
    (function(std::integral_constant<int, I>()), ...);
}
template <int COUNT, typename Function>
INLINE void each(Function function) {
    each(std::make_integer_sequence<int, COUNT>(), function);
}

// C (16·M × 16·N fp32, rows `c_stride` apart) = A · B, each `steps` tiles long; with `add`, added to what C holds.
template <int M, int N, Reuse A_REUSE = KEEPS, Reuse B_REUSE = KEEPS>
INLINE void multiply_tiles(Operand a, Operand b, int64_t steps, float* c, int64_t c_stride, bool add = false) {
    // Tiles: sums, then A's, then B's. Operands that are used once alternate in the remaining tiles.
    constexpr int SUMS = M * N, RIGHT = M > 1 ? N : 7 - SUMS, LEFT = N > 1 ? M : 8 - SUMS - RIGHT;
    static_assert(SUMS + LEFT + RIGHT <= 8 && LEFT > 0 && RIGHT > 0);
    const auto place = [=](int i) INLINED { return c + i / N * 16 * c_stride + i % N * 16; };
    amx::fence();
    if (add)
        each<SUMS>([=](auto i) INLINED { amx::load<i>(place(i), 4 * c_stride); });
    else
        each<SUMS>([](auto i) INLINED { amx::zero<i>(); });
    for (int64_t step = 0; step < steps; step++, a.at += a.step, b.at += b.step) {
        each<M>([=](auto m) INLINED {
            constexpr int row = m, left = SUMS + m % LEFT;
            amx::load<left, A_REUSE>(a.at + row * a.tile, 2 * a.row);
            each<N>([=](auto n) INLINED {
                constexpr int right = SUMS + LEFT + n % RIGHT;
                if constexpr (row == 0) amx::load<right, B_REUSE>(b.at + n * b.tile, 2 * b.row);
                amx::multiply_add<row * N + n, left, right>();
            });
        });
    }
    each<SUMS>([=](auto i) INLINED { amx::store<i>(place(i), 4 * c_stride); });
    amx::fence();
}

#else

constexpr int64_t SLICE = 384;

struct Tiles {
    Tiles() {}  // no setup; not trivial, because compilers warn of unused variables
};

// As above. Processes all columns and as many rows at once as leave registers for B's row and A's pair.
template <int M, int N, Reuse = KEEPS, Reuse = KEEPS>
INLINE void multiply_tiles(Operand a, Operand b, int64_t steps, float* c, int64_t c_stride, bool add = false) {
    constexpr int ROWS = N == 1 ? 16 : N <= 3 ? 8 : 4;
    static_assert(ROWS * N <= 24);
    for (int first = 0; first < 16 * M; first += ROWS) {
        const bf16 *left = a.at + first / 16 * a.tile + first % 16 * a.row, *right = b.at;
        float* to = c + first * c_stride;
        __m512 sums[ROWS][N];
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 6
            for (int n = 0; n < N; n++) sums[i][n] = add ? load(to + i * c_stride + 16 * n) : splat(0);
        for (int64_t step = 0; step < steps; step++, left += a.step, right += b.step) {
            for (int k = 0; k < 16; k++) {
                __m512i pairs[N];
#pragma GCC unroll 6
                for (int n = 0; n < N; n++) pairs[n] = _mm512_loadu_si512(right + n * b.tile + k * b.row);
#pragma GCC unroll 16
                for (int i = 0; i < ROWS; i++) {
                    int pair;
                    memcpy(&pair, left + i * a.row + 2 * k, sizeof(pair));
                    const __m512i all = _mm512_set1_epi32(pair);
#pragma GCC unroll 6
                    for (int n = 0; n < N; n++) sums[i][n] = add_products(sums[i][n], all, pairs[n]);
                }
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 6
            for (int n = 0; n < N; n++) store(to + i * c_stride + 16 * n, sums[i][n]);
    }
}

#endif
