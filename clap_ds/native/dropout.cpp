// Dropout of a bf16 tensor.

#include "common.h"

// y = x / (1 − probability) where it is kept, else 0. What is kept is a function of the seed and the element's number, so the
// backward pass is the same call on the gradient.
extern "C" void clap_dropout(const bf16* x, bf16* y, int64_t count, int64_t seed, float probability) {
    const __m512 factor = _mm512_set1_ps(1.0f / (1.0f - probability));
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma omp parallel for schedule(static) if (count > 1 << 16)
    for (int64_t i = 0; i < count / 16; i++) {
        const __m512i number = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(16 * i)));
        const uint64_t part = (uint64_t)seed + ((uint64_t)(16 * i) >> 32);  // numbers have 32 bits
        const __m512 factors = _mm512_maskz_mov_ps(kept(part, number, probability), factor);
        store_bf16(y + 16 * i, _mm512_mul_ps(load_bf16(x + 16 * i), factors));  // NaN stays, as with torch
    }
}
