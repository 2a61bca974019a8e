// Linear layers on tiles: forward and the input's gradient, each fused with bias, GELU and residual. Shapes:
// x (M, K), weight (N, K), y (M, N), all bf16 and row-major, sums in fp32. N and K are multiples of 32, M is any. The weight's
// rows, like the bias, may be in up to three equal parts, each a multiple of 32: layers that have the same input.

#include "linear.h"

namespace {

constexpr int64_t PACKING = 3;  // cost of packing an element, in copies of one

// Both are odd functions of x around 1/2, fitted as x · p(u), u = 2 (x/5)² − 1, on [−5, 5] by least squares at Chebyshev nodes
// (largest errors 3e-7 and 1e-5); above 5 their value at 5, below −5 0. NaN gives NaN.
inline __m512 odd_around_half(__m512 x, const float (&p)[13]) {
    const __mmask16 within = _mm512_cmp_ps_mask(x, splat(-5.0f), _CMP_NLT_UQ);
    x = _mm512_min_ps(splat(5.0f), x);  // min of NaN and a number is the second operand
    const __m512 u = _mm512_fmsub_ps(x * splat(2.0f / 25.0f), x, splat(1.0f));
    // Estrin's scheme computes several terms in parallel.
    auto two = [&](int i) { return fma(splat(p[i]), u, splat(p[i + 1])); };
    const __m512 u2 = u * u, u4 = u2 * u2;
    const __m512 top = fma(splat(p[0]), u4, fma(two(1), u2, two(3)));
    const __m512 middle = fma(two(5), u2, two(7)), bottom = fma(two(9), u2, two(11));
    return _mm512_maskz_fmadd_ps(within, x, fma(fma(top, u4, middle), u4, bottom), splat(0.5f));
}

inline __m512 gelu(__m512 x) {
    constexpr float normal_cdf[13] = {5.83855444e-04f,  -1.60097051e-03f, 1.79127875e-03f,  -2.71631791e-03f, 6.34037485e-03f,
                                      -1.11366638e-02f, 1.64349611e-02f,  -2.32794187e-02f, 3.14353271e-02f,  -4.04409245e-02f,
                                      5.15210371e-02f,  -7.02963528e-02f, 1.41363781e-01f};
    return x * odd_around_half(x, normal_cdf);
}

inline __m512 gelu_slope(__m512 x) {
    constexpr float slope[13] = {9.74766830e-03f,  -2.44107615e-02f, 1.91263578e-02f,  -1.85007832e-02f, 4.99539126e-02f,
                                 -7.67406240e-02f, 8.13064132e-02f,  -8.21334916e-02f, 8.00736153e-02f,  -7.20447791e-02f,
                                 6.65920857e-02f,  -7.51012627e-02f, 1.42133531e-01f};
    return odd_around_half(x, slope);
}

// Block m of 32 rows as pairs of tiles, rows from `rows` on as zeros.
inline void tile_rows(bf16* tiles, const bf16* left, int64_t m, int64_t rows, int64_t inner) {
    for (int64_t r = 0; r < BLOCK; r++) {
        const bf16* row = left + (BLOCK * m + r) * inner;
        for (int64_t k = 0; k < inner; k += BLOCK) {
            __m512i values = BLOCK * m + r < rows ? _mm512_loadu_si512(row + k) : _mm512_setzero_si512();
            _mm512_storeu_si512(tiles + 2 * TILE * (k / BLOCK) + BLOCK * r, values);
        }
    }
}

// The calling thread's part of the product, in blocks. Threads split the rows or the columns, whichever needs less packing. A
// chunk of rows, for which all columns are packed, has at most `longest` blocks.
inline std::pair<Range, Range> part_of(int64_t blocks, int64_t panels, int64_t longest) {
    const int64_t threads = omp_get_num_threads(), shared = divide_up(blocks, threads);
    const int64_t by_rows = shared + PACKING * panels * divide_up(shared, longest);
    const int64_t by_columns = blocks + PACKING * panels * divide_up(blocks, longest) / threads;
    if (by_rows <= by_columns) return {share_of(blocks), {0, panels}};
    return {{0, blocks}, share_of(panels)};
}

// Computes `to` = (c + bias) · gelu′(slopes) + added from a product's rows. All but `to` may be null; `activated` receives its
// gelu.
struct Finish {
    Joined<const bf16> bias;
    const bf16 *slopes, *added;
    bf16 *to, *activated;
    bool past_caches, activated_past_caches;
    int64_t columns;

    // Block m of the result's `rows`, 32 columns wide; prefetches the next block's data.
    void operator()(int64_t m, int64_t rows, int64_t column, const float* c) const {
        __m512 shift[2] = {splat(0), splat(0)};
        if (bias) shift[0] = load(bias[column]), shift[1] = load(bias[column] + 16);
        for (int64_t row = BLOCK * m; row < std::min(BLOCK * (m + 1), rows); row++, c += BLOCK) {
            const int64_t at = row * columns + column, below = at + (row + BLOCK < rows ? BLOCK * columns : 0);
            if (slopes) prefetch(slopes + below, 1);
            if (added) prefetch(added + below, 1);
            __m512 low = load(c) + shift[0], high = load(c + 16) + shift[1];
            if (slopes) low = low * gelu_slope(load(slopes + at)), high = high * gelu_slope(load(slopes + at + 16));
            if (added) low = low + load(added + at), high = high + load(added + at + 16);
            store(to + at, low, high, past_caches);
            if (activated) store(activated + at, gelu(low), gelu(high), activated_past_caches);
        }
    }
};

// `left` (rows, inner) times a right side with as many columns as the result. `pack(column, count, k, length, tiles)` packs
// `count` panels of 32 columns of the right side's rows k … k + length, each `length` / 32 pairs of tiles.
//
// Each thread processes its part in chunks of rows, groups of panels and slices of `inner` that fit in its cache together. It
// packs each group itself just before multiplying, because data packed by another core is slow to fetch.
template <typename Pack>
void multiply(const bf16* left, int64_t rows, int64_t inner, Pack pack, const Finish& given) {
    const int64_t slices = divide_up(inner, SLICE), slice = divide_up(inner / BLOCK, slices) * BLOCK;
    const int64_t longest = std::max<int64_t>(1, CACHED / (BLOCK * slice));  // blocks of a chunk
    const int64_t group = std::clamp<int64_t>(CACHED / (2 * BLOCK * slice), 1, MAX_GROUP);
#pragma omp parallel
    {
        Tiles tiles;
        const Finish finish = given;  // a local variable, which no store can alias
        const auto [blocks, panels] = part_of(divide_up(rows, BLOCK), finish.columns / BLOCK, longest);
        const int64_t chunk = std::min(longest, blocks.end - blocks.begin);
        auto packed = scratch<bf16>(group * BLOCK * slice), tiled = scratch<bf16>(chunk * BLOCK * inner);
        auto sums = scratch<float>((slices > 1 ? chunk : 1) * group * BLOCK * BLOCK);
        for (int64_t start = blocks.begin; start < blocks.end; start += longest) {
            const int64_t stop = std::min(blocks.end, start + longest);
            for (int64_t m = start; m < stop; m++) tile_rows(&tiled[(m - start) * BLOCK * inner], left, m, rows, inner);
            for (int64_t g = panels.begin; g < panels.end; g += group) {
                const int64_t count = std::min(group, panels.end - g);
                for (int64_t k = 0; k < inner; k += slice) {
                    const int64_t length = std::min(slice, inner - k);
                    pack(BLOCK * g, count, k, length, &packed[0]);
                    for (int64_t m = start; m < stop; m++) {
                        float* c = &sums[slices > 1 ? (m - start) * count * BLOCK * BLOCK : 0];
                        for (int64_t n = 0; n <= count; n++) {  // finished one block after the matrix unit started it
                            if (n < count)
                                multiply_block(&tiled[(m - start) * BLOCK * inner + BLOCK * k], &packed[n * BLOCK * length],
                                               length / BLOCK, c + n * BLOCK * BLOCK, k > 0, rows - BLOCK * m <= 16);
                            if (n > 0 && k + length == inner) finish(m, rows, BLOCK * (g + n - 1), c + (n - 1) * BLOCK * BLOCK);
                        }
                    }
                }
            }
        }
        _mm_sfence();  // makes streamed data visible to other threads
    }
}

}  // namespace

// y = x · weightᵀ + bias + residual; bias and residual may be null. With `activated`, also activated = gelu(y).
extern "C" void clap_linear(const bf16* x, const bf16* weight0, const bf16* weight1, const bf16* weight2, const bf16* bias0,
                            const bf16* bias1, const bf16* bias2, const bf16* residual, bf16* y, bf16* activated, int64_t M,
                            int64_t N, int64_t K) {
    const Joined<const bf16> weight{{weight0, weight1, weight2}, N, K}, bias{{bias0, bias1, bias2}, N, 1};
    auto pack = [=](int64_t first, int64_t count, int64_t k0, int64_t length, bf16* tiles) {
        for (int64_t n = 0; n < BLOCK * count; n += 16) {
            const bf16* rows = weight[first + n] + k0;
            for (int64_t k = 0; k < length; k += BLOCK)
                pack_transposed(tiles + tile_at(n, k / BLOCK, length / BLOCK), rows + k, K);
        }
    };
    const bool y_past = goes_past_caches(y, activated ? LARGE : 2 * M * N);  // with `activated` it is read much later
    multiply(x, M, K, pack, {bias, nullptr, residual, y, activated, y_past, goes_past_caches(activated, 2 * M * N), N});
}

// dx = (dy · weight) ⊙ gelu′(before) + passed; `before` and `passed` (M, K) may be null.
extern "C" void clap_linear_backward_input(const bf16* dy, const bf16* weight0, const bf16* weight1, const bf16* weight2,
                                           const bf16* before, const bf16* passed, bf16* dx, int64_t M, int64_t N, int64_t K) {
    const Joined<const bf16> weight{{weight0, weight1, weight2}, N, K};
    auto pack = [=](int64_t first, int64_t count, int64_t n0, int64_t length, bf16* tiles) {
        for (int64_t n = 0; n < length; n += BLOCK) {
            const bf16* rows = weight[n0 + n] + first;
            for (int64_t k = 0; k < BLOCK * count; k += 16)
                pack_rows(tiles + tile_at(k, n / BLOCK, length / BLOCK), rows + k, K);
        }
    };
    multiply(dy, M, N, pack, {{}, before, passed, dx, nullptr, goes_past_caches(dx, 2 * M * K), false, K});
}
