// Emulates tiles.h's AMX instructions with AVX-512, for tests on processors without AMX, as defined in Intel's manual (SDM).
// TDPBF16PS sums the products of the 32's even and odd elements separately with fused multiply-adds, then adds both to the sum.
// It rounds to nearest and flushes denormals to 0, regardless of MXCSR. Differences: which of several NaNs results, the
// compiler's reordering of memory accesses (so `fence` isn't tested), load hints, and time.
//
// For unconfigured or released tiles, where the processor would fault, results are NaN. So are newly configured tiles, which
// are zero on the processor.
#include <cstring>

namespace amx {

struct State {
    __m512i tiles[8][16];
    bool configured;
};
inline thread_local State state;

inline __m512i* tile(int number) {
    if (!state.configured) memset(state.tiles, 0xff, sizeof(state.tiles));
    return state.tiles[number];
}

inline void release() { state.configured = false; }

// 1 palette, 16 rows of 64 bytes each; all else is 0.
inline void configure(const uint8_t (&layout)[64]) {
    uint8_t expected[64] = {1};
    for (int i = 0; i < 8; i++) expected[16 + 2 * i] = 64, expected[48 + i] = 16;
    release();
    tile(0);
    state.configured = memcmp(layout, expected, sizeof(expected)) == 0;
}

template <int TO, Reuse = KEEPS>
void load(const void* from, int64_t row_bytes) {
    __m512i* to = tile(TO);
    for (int row = 0; row < 16; row++) to[row] = _mm512_loadu_si512((const char*)from + row * row_bytes);
}

template <int FROM>
void store(void* to, int64_t row_bytes) {
    const __m512i* from = tile(FROM);
    for (int row = 0; row < 16; row++) _mm512_storeu_si512((char*)to + row * row_bytes, from[row]);
}

template <int SUM>
void zero() {
    memset(tile(SUM), 0, 16 * 64);
}

template <int SUM, int LEFT, int RIGHT>
void multiply_add() {
    __m512 *sums = (__m512*)tile(SUM), b[2][16];
    const int(*left)[16] = (const int(*)[16])tile(LEFT);
    const __m512i *right = tile(RIGHT), upper = _mm512_set1_epi32((int)0xffff0000);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    asm volatile("" ::: "memory");  // nothing below is computed before this
    for (int k = 0; k < 16; k++) b[0][k] = (__m512)_mm512_slli_epi32(right[k], 16), b[1][k] = (__m512)(right[k] & upper);
    for (int m = 0; m < 16; m++) {
        __m512 products[2] = {};
        for (int k = 0; k < 16; k++) {
            const __m512i pair = _mm512_set1_epi32(left[m][k]);
            products[0] = fma((__m512)_mm512_slli_epi32(pair, 16), b[0][k], products[0]);
            products[1] = fma((__m512)(pair & upper), b[1][k], products[1]);
        }
        sums[m] = sums[m] + (products[0] + products[1]);
    }
    asm volatile("" ::: "memory");
    _mm_setcsr(before);
}

inline void fence() {}

}  // namespace amx
