// What the CPU kernels share: bf16 vectors, packing into tiles, the functions of one variable, and memory.
#pragma once

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "tiles.h"

static inline __m512 from_bf16(__m256i low) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
}
static inline __m512 load_bf16(const bf16* from) { return from_bf16(_mm256_loadu_si256((const __m256i*)from)); }
static inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
static inline void store_bf16(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, to_bf16(x)); }

// 2^x for x < 128; relative error below 2e-7. Very negative x gives less than 1.2e-38, NaN gives NaN.
static inline __m512 exp2_ps(__m512 x) {
    __m512 scaled = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // of NaN and a number the second
    __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(scaled, whole);  // 2^rest, |rest| ≤ 1/2, by its Taylor series in rest · ln 2
    __m512 y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
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

// 1 in the lanes that dropout with this probability keeps.
static inline __mmask16 kept(uint64_t seed, __m512i number, float probability) {
    const uint32_t limit = (uint32_t)std::min(probability * 4294967296.0, 4294967295.0);
    return _mm512_cmpge_epu32_mask(random_bits(seed, number), _mm512_set1_epi32((int)limit));
}

// Transposes a 16 × 16 block of 32-bit lanes in registers.
static inline void transpose16(__m512i r[16]) {
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
    for (int i = 0; i < 4; i++) {
        for (int half = 0; half < 2; half++) {
            t[8 * half + i] = _mm512_shuffle_i32x4(r[8 * half + i], r[8 * half + i + 4], 0x88);
            t[8 * half + i + 4] = _mm512_shuffle_i32x4(r[8 * half + i], r[8 * half + i + 4], 0xdd);
        }
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[8 + i + 4], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[8 + i + 4], 0xdd);
    }
}

// Rows 2i and 2i + 1 of 32 rows of 16 bf16, `stride` elements apart, as pairs: lane n is (rows[2i][n], rows[2i + 1][n]). Rows
// from `valid` on count as 0.
static inline __m512i load_pairs(const bf16* rows, int64_t stride, int i, int valid) {
    __m256i even = _mm256_setzero_si256(), odd = even;
    if (2 * i < valid) even = _mm256_loadu_si256((const __m256i*)(rows + 2 * i * stride));
    if (2 * i + 1 < valid) odd = _mm256_loadu_si256((const __m256i*)(rows + (2 * i + 1) * stride));
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// B tile of B[k][n] = rows[k][n], of rows as in `load_pairs`.
static inline void pack_rows(bf16* tile, const bf16* rows, int64_t stride, int valid = 32) {
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(tile + 32 * i, load_pairs(rows, stride, i, valid));
}

// B tile of B[k][n] = columns[n][k]: 16 rows of 32 bf16, `stride` elements apart.
static inline void pack_transposed(bf16* tile, const bf16* columns, int64_t stride) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(columns + i * stride);
    transpose16(r);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(tile + 32 * i, r[i]);
}

// A tile (16 × 32, row-major) of A[n][k] = rows[k][n], of rows as in `load_pairs`.
static inline void pack_rows_as_a(bf16* tile, const bf16* rows, int64_t stride, int valid = 32) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = load_pairs(rows, stride, i, valid);
    transpose16(r);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(tile + 32 * i, r[i]);
}

// A thread's memory for the time of a kernel, kept for the next one: huge pages, as with small ones an operand that fits the
// second-level cache still evicts itself from it.
class Arena {
   public:
    static Arena& of_thread() {
        static thread_local Arena arena;
        return arena;
    }
    void* take(int64_t bytes) {
        if (live_++ == 0) {
            if (wanted_ > size_) grow();
            used_ = wanted_ = 0;
        }
        bytes = (bytes + 63) / 64 * 64;
        wanted_ += bytes;
        if (used_ + bytes > size_) {
            void* apart = aligned_alloc(64, bytes);
            if (apart) return apart;
            fprintf(stderr, "CPU kernel: no memory for %lld bytes\n", (long long)bytes);
            abort();
        }
        used_ += bytes;
        return memory_ + used_ - bytes;
    }
    void give_back(void* p) {
        live_--;
        if (p < memory_ || p >= memory_ + size_) free(p);
    }
    ~Arena() { free(memory_); }

   private:
    void grow() {
        constexpr int64_t HUGE = 1 << 21;
        free(memory_);
        size_ = (wanted_ + HUGE - 1) / HUGE * HUGE;
        memory_ = (char*)aligned_alloc(HUGE, size_);
        if (!memory_) size_ = 0;
        if (memory_) madvise(memory_, size_, MADV_HUGEPAGE);
    }
    char* memory_ = nullptr;
    int64_t size_ = 0, used_ = 0, wanted_ = 0, live_ = 0;
};

struct Free {
    void operator()(void* p) const { Arena::of_thread().give_back(p); }
};

// Memory for `count` elements at a cache line's edge, until the end of the scope. Not to be handed to other threads for freeing.
template <typename T>
static inline std::unique_ptr<T[], Free> scratch(int64_t count) {
    return std::unique_ptr<T[], Free>((T*)Arena::of_thread().take(std::max<int64_t>(count, 1) * sizeof(T)));
}
