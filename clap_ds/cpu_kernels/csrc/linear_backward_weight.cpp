// The gradients of a linear layer's weight and bias (linear.cpp).

#include "linear.h"

namespace {

// Calls pack(tile, first column, rows, number of valid rows up to 32) for every 16 of `width` columns of `steps` blocks of rows,
// of which `rows` remain; prefetches the next block.
template <typename Pack>
void for_each_tile(const bf16* from, int64_t stride, int64_t width, int64_t rows, int64_t steps, Pack pack) {
    for (int64_t step = 0; step < steps; step++, rows -= BLOCK, from += BLOCK * stride) {
        for (int64_t next = BLOCK; next < std::min(2 * BLOCK, rows); next++) prefetch(from + next * stride, width);
        for (int64_t i = 0; i < width; i += 16) pack(tile_at(i, step, steps), i, from + i, (int)std::min(BLOCK, rows));
    }
}

// One thread's part of dweight (N, K) = dyᵀ · x: rows `n` and columns `k`, summed over chunks of rows of x and dy that fit in
// its cache.
void sum_up(const bf16* dy, const bf16* x, int64_t M, int64_t N, int64_t K, Range n, Range k, const Joined<bf16>& dweight,
            const Joined<bf16>& dbias) {
    const int64_t height = n.end - n.begin, width = k.end - k.begin;
    const int64_t chunk = std::min(std::max<int64_t>(1, divide_up(M, BLOCK)) * BLOCK,
                                   std::clamp<int64_t>(CACHED / width / BLOCK * BLOCK, 8 * BLOCK, 16 * BLOCK));
    const int64_t panels = std::clamp<int64_t>(CACHED / 2 / (chunk * BLOCK), 1, MAX_GROUP);
    const auto right = scratch<bf16>(chunk * width), left = scratch<bf16>(panels * chunk * BLOCK);
    const auto sums = scratch<float>(height * width), bias_sums = scratch<float>(height);  // sums in blocks
    memset(&bias_sums[0], 0, height * sizeof(float));
    if (M == 0) memset(&sums[0], 0, height * width * sizeof(float));
    for (int64_t m = 0; m < M; m += chunk) {
        const int64_t steps = divide_up(std::min(chunk, M - m), BLOCK);
        for_each_tile(x + m * K + k.begin, K, width, M - m, steps, [&](int64_t at, int64_t, const bf16* rows, int valid) {
            pack_rows(&right[at], rows, K, valid);
        });
        for (int64_t group = 0; group < height; group += BLOCK * panels) {
            const int64_t count = std::min(BLOCK * panels, height - group);
            const auto pack = [&](int64_t at, int64_t i, const bf16* rows, int valid) {
                float* bias = &bias_sums[group + i];
                store(bias, pack_rows_as_a(&left[at], rows, N, valid, load(bias)));
            };
            for_each_tile(dy + m * N + n.begin + group, N, count, M - m, steps, pack);
            for (int64_t i = 0; i < count; i += BLOCK)
                for (int64_t j = 0; j < width; j += BLOCK) {
                    float* c = &sums[(group + i) * width + BLOCK * j];
                    if (m > 0 && j + BLOCK < width) prefetch(c + BLOCK * BLOCK, BLOCK * BLOCK);
                    multiply_block(&left[tile_at(i, 0, steps)], &right[tile_at(j, 0, steps)], steps, c, m > 0);
                }
        }
    }
    for (int64_t i = 0; i < height; i++) {
        bf16* to = dweight[n.begin + i] + k.begin;
        const bool past_caches = goes_past_caches(to, LARGE);  // not needed soon
        const float* from = &sums[i / BLOCK * BLOCK * width + i % BLOCK * BLOCK];
        for (int64_t j = 0; j < width; j += BLOCK) store(to + j, load(from + 32 * j), load(from + 32 * j + 16), past_caches);
    }
    _mm_sfence();
    if (dbias && k.begin == 0)  // written by the threads with the first columns
        for (int64_t i = 0; i < height; i += 16) store(dbias[n.begin + i], load(&bias_sums[i]));
}

}  // namespace

// dweight (N, K) = dyᵀ · x and dbias (N) = column sums of dy; dbias may be null. Threads split the longer side of dweight, so
// that none waits for another and the order of sums is fixed. M may be 0.
extern "C" void clap_linear_backward_weight(const bf16* dy, const bf16* x, bf16* dweight0, bf16* dweight1, bf16* dweight2,
                                            bf16* dbias0, bf16* dbias1, bf16* dbias2, int64_t M, int64_t N, int64_t K) {
    const Joined<bf16> dweight{{dweight0, dweight1, dweight2}, N, K}, dbias{{dbias0, dbias1, dbias2}, N, 1};
#pragma omp parallel
    {
        const Tiles tiles;
        const Range blocks = share_of(std::max(N, K) / BLOCK), own = {BLOCK * blocks.begin, BLOCK * blocks.end};
        if (own.begin < own.end)
            sum_up(dy, x, M, N, K, N >= K ? own : Range{0, N}, N >= K ? Range{0, K} : own, dweight, dbias);
    }
}
