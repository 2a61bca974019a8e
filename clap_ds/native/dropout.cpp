// Dropout of a bf16 tensor.

#include "vectors.h"

// y = x / (1 − probability) where it is kept, else 0. What is kept is a function of the seed and the element's number, so the
// backward pass is the same call on the gradient.
extern "C" void clap_dropout(const bf16* x, bf16* y, int64_t count, int64_t seed, float probability) {
    const __m512 factor = splat(1.0f / (1.0f - probability));
#pragma omp parallel for schedule(static) if (count > 1 << 16)
    for (int64_t i = 0; i < count; i += 16) {
        const __m512i number = _mm512_add_epi32(lane_numbers(), _mm512_set1_epi32((int)i));
        const uint64_t part = (uint64_t)seed + ((uint64_t)i >> 32);  // numbers have 32 bits
        store(y + i, load(x + i) * _mm512_maskz_mov_ps(kept(part, number, probability), factor));  // NaN stays, as with torch
    }
}
