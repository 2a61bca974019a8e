// The gradients of a linear layer's weight and bias (linear.cpp).

#include "linear.h"

namespace {

// One thread's part of dweight (N, K) = dyᵀ · x: rows `n` and columns `k`. The sum goes over chunks of rows of x and dy that
// stay in its cache.
class WeightGradient {
   public:
    WeightGradient(const bf16* dy, const bf16* x, int64_t M, int64_t N, int64_t K, Range n, Range k)
        : dy(dy), x(x), M(M), N(N), K(K), n(n), k(k) {
        memset(&bias_sums[0], 0, height * sizeof(float));
        if (M == 0) memset(&sums[0], 0, height * width * sizeof(float));
    }

    void sum_up() {
        for (int64_t m0 = 0; m0 < M; m0 += chunk) {
            const int64_t steps = divide_up(std::min(chunk, M - m0), BLOCK);
            for_each_tile(x + k.begin, K, width, m0, steps, [&](int64_t at, int64_t, const bf16* rows, int valid) {
                pack_rows(&right[at], rows, K, valid);
            });
            for (int64_t group = n.begin; group < n.end; group += BLOCK * panels) {
                const int64_t count = std::min(BLOCK * panels, n.end - group);
                float* bias = &bias_sums[group - n.begin];
                for_each_tile(dy + group, N, count, m0, steps, [&](int64_t at, int64_t i, const bf16* rows, int valid) {
                    store(bias + i, pack_rows_as_a(&left[at], rows, N, valid, load(bias + i)));
                });
                for (int64_t i = 0; i < count; i += BLOCK)
                    for (int64_t j = 0; j < width; j += BLOCK) {
                        float* c = &sums[(group + i - n.begin) * width + BLOCK * j];
                        if (m0 > 0 && j + BLOCK < width) prefetch(c + BLOCK * BLOCK, BLOCK * BLOCK);
                        multiply_block(&left[tile_at(i, 0, steps)], &right[tile_at(j, 0, steps)], steps, c, BLOCK, m0 > 0);
                    }
            }
        }
    }

    void write(const Joined<bf16>& dweight, const Joined<bf16>& dbias) const {
        for (int64_t i = 0; i < height; i++) {
            const Output to(dweight[n.begin + i] + k.begin, LARGE);  // not needed soon
            const float* from = &sums[i / BLOCK * BLOCK * width + i % BLOCK * BLOCK];
            for (int64_t j = 0; j < width; j += BLOCK) to.store(j, load(from + BLOCK * j), load(from + BLOCK * j + 16));
        }
        _mm_sfence();
        if (dbias && k.begin == 0)  // threads that share rows all write it, else the one that has the first columns
            for (int64_t i = 0; i < height; i += 16) store(dbias[n.begin + i], load(&bias_sums[i]));
    }

   private:
    // Calls pack(place of the tile, first column, rows, how many of the 32 there are) for all blocks of `width` columns.
    template <typename Pack>
    void for_each_tile(const bf16* from, int64_t stride, int64_t width, int64_t m0, int64_t steps, Pack pack) const {
        for (int64_t step = 0; step < steps; step++) {
            const int64_t m = m0 + BLOCK * step;
            for (int64_t next = m + BLOCK; next < std::min(m + 2 * BLOCK, M); next++) prefetch(from + next * stride, width);
            for (int64_t i = 0; i < width; i += 16)
                pack(tile_at(i, step, steps), i, from + m * stride + i, (int)std::min(BLOCK, M - m));
        }
    }

    const bf16 *dy, *x;
    const int64_t M, N, K;
    const Range n, k;
    const int64_t height = n.end - n.begin, width = k.end - k.begin;
    const int64_t chunk = std::min(std::max<int64_t>(1, divide_up(M, BLOCK)) * BLOCK,
                                   std::clamp<int64_t>(CACHED / width / BLOCK * BLOCK, 8 * BLOCK, 16 * BLOCK));
    const int64_t panels = std::clamp<int64_t>(CACHED / 2 / (chunk * BLOCK), 1, MAX_GROUP);
    Scratch<bf16> right = scratch<bf16>(chunk * width), left = scratch<bf16>(panels * chunk * BLOCK);
    Scratch<float> sums = scratch<float>(height * width);  // in blocks
    Scratch<float> bias_sums = scratch<float>(height);
};

}  // namespace

// dweight (N, K) = dyᵀ · x and dbias (N) = column sums of dy; dbias may be null. Threads share the longer side of dweight, so
// that none waits for another and sums have one order. There may be no rows.
extern "C" void clap_linear_backward_weight(const bf16* dy, const bf16* x, bf16* dweight0, bf16* dweight1, bf16* dweight2,
                                            bf16* dbias0, bf16* dbias1, bf16* dbias2, int64_t M, int64_t N, int64_t K) {
    const Joined<bf16> dweight{{dweight0, dweight1, dweight2}, N, K}, dbias{{dbias0, dbias1, dbias2}, N, 1};
    const bool by_row = N >= K;
#pragma omp parallel
    {
        const Range blocks = share_of((by_row ? N : K) / BLOCK), own = {BLOCK * blocks.begin, BLOCK * blocks.end};
        if (own.begin < own.end) {
            Tiles tiles;
            WeightGradient gradient(dy, x, M, N, K, by_row ? own : Range{0, N}, by_row ? Range{0, K} : own);
            gradient.sum_up();
            gradient.write(dweight, dbias);
        }
    }
}
