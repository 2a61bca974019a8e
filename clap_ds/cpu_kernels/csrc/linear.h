// What the products of linear layers share. They are made of blocks of 32 × 32 (2 × 2 tiles); "panels" of 32 rows or columns
// are packed into pairs of tiles, one pair for each 32 of what is summed over ("step").
#pragma once

#include "memory.h"
#include "packing.h"

constexpr int64_t BLOCK = 32;         // rows or columns
constexpr int64_t CACHED = 1 << 18;   // elements of one operand that a core's second-level cache holds beside others
constexpr int64_t LARGE = 1 << 21;    // bytes of a tensor that the next kernel doesn't find in the caches
constexpr int64_t LONGEST_KEPT = 16;  // steps of a block that stays in a core's first-level cache
constexpr int64_t MAX_GROUP = 16;     // panels packed at once

// Where the tile of row or column `i` lies in panels of so many steps.
static inline int64_t tile_at(int64_t i, int64_t step, int64_t steps) {
    return (i / BLOCK * steps + step) * 2 * TILE + i / 16 % 2 * TILE;
}

// c (32 × 32 fp32) = a · packed, each `steps` pairs of tiles; or added to what c holds. Only the operand that the next block
// needs again stays in the first-level cache: a, unless it is too long for that. With `half` the lower 16 rows don't matter.
static inline void multiply_block(const bf16* a, const bf16* packed, int64_t steps, float* c, bool add, bool half = false) {
    const Operand left = {a, 32, TILE, 2 * TILE}, right = {packed, 32, TILE, 2 * TILE};
    if (half)
        multiply_tiles<1, 2, KEEPS, STREAMS>(left, right, steps, c, BLOCK, add);
    else if (steps > LONGEST_KEPT)
        multiply_tiles<2, 2, STREAMS, STREAMS>(left, right, steps, c, BLOCK, add);
    else
        multiply_tiles<2, 2, KEEPS, STREAMS>(left, right, steps, c, BLOCK, add);
}

// A matrix whose rows lie in up to three tensors one after the other.
template <typename T>
struct Joined {
    T* parts[3];
    int64_t rows, width;  // rows of all, elements of one
    const int64_t each = rows / (1 + (parts[1] != nullptr) + (parts[2] != nullptr));

    T* operator[](int64_t row) const {
        int part = 0;
        for (; row >= each; row -= each) part++;
        return parts[part] + row * width;
    }
    explicit operator bool() const { return parts[0] != nullptr; }
};

// Whether a tensor of so many bytes is stored past the caches, which spares reading what is overwritten.
static inline bool goes_past_caches(const bf16* to, int64_t bytes) { return bytes >= LARGE && (uintptr_t)to % 64 == 0; }

static inline void store(bf16* to, __m512 low, __m512 high, bool past_caches) {
    past_caches ? _mm512_stream_si512((__m512i*)to, to_bf16(low, high)) : store(to, low, high);
}
