// Vectors of 16 numbers: bf16 and fp32, functions of one variable, random bits, sums across vectors. Arithmetic on __m512 uses
// the compiler's operators (+, −, ·, /), which never fuse a product and a sum; `fma` does.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#define INLINED __attribute__((always_inline))
#define INLINE static inline INLINED

typedef uint16_t bf16;

// Calls function(value) with the one of VALUES that is `value`, as a constant.
template <int... VALUES, typename Function>
static inline void with_constant(int64_t value, Function function) {
    ((value == VALUES ? function(std::integral_constant<int, VALUES>()) : void()), ...);
}

constexpr float LOG2E = 1.44269504088896341f;

static inline __m512 splat(float x) { return _mm512_set1_ps(x); }
static inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }

static inline __m512 from_bf16(__m256i low) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
}

// Rounding to the nearest, and sums plus both products of each lane's pairs of bf16.
#ifdef __AVX512BF16__
static inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
static inline __m512i to_bf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
static inline __m512 add_products(__m512 sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}
#else
static inline __m256i to_bf16(__m512 x) {
    const __m512i bits = (__m512i)x, odd = _mm512_srli_epi32(bits, 16) & _mm512_set1_epi32(1);
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(-1)), 16));
}
static inline __m512i to_bf16(__m512 low, __m512 high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(low)), to_bf16(high), 1);
}
static inline __m512 add_products(__m512 sums, __m512i a, __m512i b) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    sums = fma((__m512)(a & upper), (__m512)(b & upper), sums);
    return fma((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), sums);
}
#endif

static inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }
static inline __m512 load(const bf16* from) { return from_bf16(_mm256_loadu_si256((const __m256i*)from)); }
static inline void store(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
static inline void store(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, to_bf16(x)); }
static inline void store(bf16* to, __m512 low, __m512 high) { _mm512_storeu_si512(to, to_bf16(low, high)); }

// The first `count` of 16 lanes, all of them for more, none for a negative number.
static inline __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : count > 0 ? (1u << count) - 1 : 0; }
static inline __mmask32 first_of_32(int64_t count) { return first_lanes(count) | (__mmask32)first_lanes(count - 16) << 16; }
static inline __m512i lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// During its lifetime, the calling thread flushes denormal results to 0, such as weights of masked tokens, which are otherwise
// a hundred times slower.
struct FlushToZero {
    const unsigned before = _mm_getcsr();
    FlushToZero() { _mm_setcsr(before | 0x8040); }
    ~FlushToZero() { _mm_setcsr(before); }
};

// Highest power first.
template <int COUNT>
static inline __m512 polynomial(__m512 x, const float (&factors)[COUNT]) {
    __m512 y = splat(factors[0]);
#pragma GCC unroll 8
    for (int i = 1; i < COUNT; i++) y = fma(y, x, splat(factors[i]));
    return y;
}

// 2^x, 0 for very negative x, NaN for NaN. Relative error below 2e-7; QUICK: 1e-4, 1/40 of bf16's rounding error.
template <bool QUICK = false>
static inline __m512 exp2_ps(__m512 x) {
    constexpr float exact[] = {1.87757507e-3f, 8.98934435e-3f, 5.58263138e-2f, 2.40153626e-1f, 6.93153083e-1f, 0.99999994f};
    constexpr float quick[] = {0.0780245f, 0.22606721f, 0.69583351f, 0.99992522f};
    const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    return _mm512_scalef_ps(QUICK ? polynomial(rest, quick) : polynomial(rest, exact), x);  // times 2^floor(x)
}

// log2(x) of positive normal x, absolute error below 1e-6.
static inline __m512 log2_ps(__m512 x) {
    const __m512 mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
    const __m512 t = (mantissa - splat(1.0f)) / (mantissa + splat(1.0f));  // ln mantissa = 2 artanh t
    constexpr float artanh[] = {2 * LOG2E / 9, 2 * LOG2E / 7, 2 * LOG2E / 5, 2 * LOG2E / 3, 2 * LOG2E};
    return fma(polynomial(t * t, artanh), t, _mm512_getexp_ps(x / mantissa));
}

// 32 random bits for each number and seed, by a multiplicative hash.
static inline __m512i random_bits(uint64_t seed, __m512i number) {
    __m512i x = _mm512_xor_si512(number, _mm512_set1_epi32((int)seed));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(0x7feb352d));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)), _mm512_set1_epi32((int)0x846ca68b));
    x = _mm512_add_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32((int)(seed >> 32)));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(0x21f0aaad));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
}

// 1 in the lanes kept by dropout with this probability.
static inline __mmask16 kept(uint64_t seed, __m512i number, float probability) {
    const uint32_t limit = (uint32_t)std::min(probability * 4294967296.0, 4294967295.0);
    return _mm512_cmpge_epu32_mask(random_bits(seed, number), _mm512_set1_epi32((int)limit));
}

// Transposes a 16 × 16 block of 32-bit lanes in registers.
INLINE void transpose16(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 16; i++) {
        const __m512i* pair = r + i / 8 * 8 + i % 4;
        t[i] = i % 8 < 4 ? _mm512_shuffle_i32x4(pair[0], pair[4], 0x88) : _mm512_shuffle_i32x4(pair[0], pair[4], 0xdd);
    }
    for (int i = 0; i < 16; i++) {
        const __m512i* pair = t + i % 8;
        r[i] = i < 8 ? _mm512_shuffle_i32x4(pair[0], pair[8], 0x88) : _mm512_shuffle_i32x4(pair[0], pair[8], 0xdd);
    }
}

// Lane i of the result is r[i] reduced over its lanes by `combine`.
template <typename Combine>
static inline __m512 across(const __m512 r[16], Combine combine) {
    __m512 fours[4];
    for (int i = 0; i < 4; i++) {
        const __m512* q = r + 4 * i;
        const auto a = (__m512d)combine(_mm512_unpacklo_ps(q[0], q[1]), _mm512_unpackhi_ps(q[0], q[1]));
        const auto b = (__m512d)combine(_mm512_unpacklo_ps(q[2], q[3]), _mm512_unpackhi_ps(q[2], q[3]));
        fours[i] = combine((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    auto halve = [&](__m512 a, __m512 b) {
        return combine(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return halve(halve(fours[0], fours[1]), halve(fours[2], fours[3]));
}
