// Shared code of linear layers' products. They consist of blocks of 32 × 32 (2 × 2 tiles); "panels" of 32 rows or columns are
// packed into pairs of tiles, one pair per 32 elements of the summed dimension ("step").
#pragma once

#include "memory.h"
#include "packing.h"

constexpr int64_t BLOCK = 32;         // rows or columns
constexpr int64_t CACHED = 1 << 18;   // elements of one operand that fit in a core's L2 cache with the others
constexpr int64_t LARGE = 1 << 21;    // bytes of a tensor that isn't cached when the next kernel starts
constexpr int64_t LONGEST_KEPT = 16;  // steps of a block that stays in the L1 cache
constexpr int64_t MAX_GROUP = 16;     // panels packed at once

// Offset of the tile of row or column `i` in panels of `steps` steps.
static inline int64_t tile_at(int64_t i, int64_t step, int64_t steps) {
    return (i / BLOCK * steps + step) * 2 * TILE + i / 16 % 2 * TILE;
}

// c (32 × 32 fp32) = a · packed, each `steps` pairs of tiles; or c += it. Only the operand that the next block needs again stays
// in the L1 cache: a, unless it is too long. With `half` the lower 16 rows are ignored.
static inline void multiply_block(const bf16* a, const bf16* packed, int64_t steps, float* c, bool add, bool half = false) {
    const Operand left = {a, 32, TILE, 2 * TILE}, right = {packed, 32, TILE, 2 * TILE};
    if (half)
        multiply_tiles<1, 2, KEEPS, STREAMS>(left, right, steps, c, BLOCK, add);
    else if (steps > LONGEST_KEPT)
        multiply_tiles<2, 2, STREAMS, STREAMS>(left, right, steps, c, BLOCK, add);
    else
        multiply_tiles<2, 2, KEEPS, STREAMS>(left, right, steps, c, BLOCK, add);
}

// A matrix whose rows are in up to three consecutive tensors.
template <typename T>
struct Joined {
    T* parts[3];
    int64_t rows, width;  // total rows, elements per row
    const int64_t each = rows / (1 + (parts[1] != nullptr) + (parts[2] != nullptr));

    T* operator[](int64_t row) const {
        int part = 0;
        for (; row >= each; row -= each) part++;
        return parts[part] + row * width;
    }
    explicit operator bool() const { return parts[0] != nullptr; }
};

// Whether to store a tensor of this size past the caches, which avoids reading what is overwritten.
static inline bool goes_past_caches(const bf16* to, int64_t bytes) { return bytes >= LARGE && (uintptr_t)to % 64 == 0; }

static inline void store(bf16* to, __m512 low, __m512 high, bool past_caches) {
    past_caches ? _mm512_stream_si512((__m512i*)to, to_bf16(low, high)) : store(to, low, high);
}
