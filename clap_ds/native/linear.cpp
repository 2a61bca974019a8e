// Linear layers on tiles: forward, both gradients, and what follows each in the same pass (bias, GELU, residual).
//
// Shapes: x (M, K), weight (N, K), y (M, N), all bf16 and row-major, sums in fp32. N and K are multiples of 32, M is any. The
// weight's rows, like the bias, may be in up to three equal parts, each a multiple of 32: layers that have the same input.
// A product is made of blocks of 32 × 32 (2 × 2 tiles); its right side is packed into tiles first.

#include "common.h"

namespace {

constexpr int64_t BLOCK = 32;              // elements
constexpr int64_t CACHED = 1 << 18;        // elements of one operand that a core's second-level cache holds beside others
constexpr int64_t LARGE = 1 << 21;         // bytes of a tensor that the next kernel doesn't find in the caches
constexpr int64_t LONGEST_KEPT = 16;       // steps of a block that stays in a core's first-level cache
constexpr int64_t SLICE = 768;             // of a sum, multiplied at once
constexpr int64_t MAX_GROUP = 16;          // panels packed at once
constexpr int64_t PACKING = 3;             // what packing an element costs, in copies of one

// Both are odd functions of x around 1/2, fitted as x · p(u), u = 2 (x/5)² − 1, on [−5, 5] by least squares at Chebyshev nodes
// (largest error 3e-7 and 1e-5), then held at their value at 5 above, and 0 below. NaN gives NaN.
inline __m512 odd_around_half(__m512 x, const float (&p)[13]) {
    const __m512 limit = _mm512_set1_ps(5.0f);
    const __mmask16 within = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-5.0f), _CMP_NLT_UQ);
    x = _mm512_min_ps(limit, x);  // of NaN and a number the second
    __m512 u = _mm512_fmsub_ps(_mm512_mul_ps(x, _mm512_set1_ps(2.0f / 25.0f)), x, _mm512_set1_ps(1.0f));
    // Estrin's scheme: the processor works on several terms at once.
    auto two = [&](int i) { return _mm512_fmadd_ps(_mm512_set1_ps(p[i]), u, _mm512_set1_ps(p[i + 1])); };
    __m512 u2 = _mm512_mul_ps(u, u), u4 = _mm512_mul_ps(u2, u2);
    __m512 top = _mm512_fmadd_ps(_mm512_set1_ps(p[0]), u4, _mm512_fmadd_ps(two(1), u2, two(3)));
    __m512 middle = _mm512_fmadd_ps(two(5), u2, two(7)), bottom = _mm512_fmadd_ps(two(9), u2, two(11));
    __m512 y = _mm512_fmadd_ps(_mm512_fmadd_ps(top, u4, middle), u4, bottom);
    return _mm512_maskz_fmadd_ps(within, x, y, _mm512_set1_ps(0.5f));
}

inline __m512 gelu(__m512 x) {
    constexpr float normal_cdf[13] = {5.83855444e-04f,  -1.60097051e-03f, 1.79127875e-03f,  -2.71631791e-03f, 6.34037485e-03f,
                                      -1.11366638e-02f, 1.64349611e-02f,  -2.32794187e-02f, 3.14353271e-02f,  -4.04409245e-02f,
                                      5.15210371e-02f,  -7.02963528e-02f, 1.41363781e-01f};
    return _mm512_mul_ps(x, odd_around_half(x, normal_cdf));
}

inline __m512 gelu_slope(__m512 x) {
    constexpr float slope[13] = {9.74766830e-03f,  -2.44107615e-02f, 1.91263578e-02f,  -1.85007832e-02f, 4.99539126e-02f,
                                 -7.67406240e-02f, 8.13064132e-02f,  -8.21334916e-02f, 8.00736153e-02f,  -7.20447791e-02f,
                                 6.65920857e-02f,  -7.51012627e-02f, 1.42133531e-01f};
    return odd_around_half(x, slope);
}

// A matrix whose rows lie in up to three tensors one after the other.
template <typename T>
struct Joined {
    T* parts[3];
    int64_t rows, width;  // rows of all, elements of one

    T* operator[](int64_t row) const {
        const int64_t each = rows / (1 + (parts[1] != nullptr) + (parts[2] != nullptr));
        return parts[row / each] + row % each * width;
    }
    explicit operator bool() const { return parts[0] != nullptr; }
};

// c (32 × 32 fp32) = a · packed, each `steps` pairs of tiles; or added to what c holds. Only the operand that the next block
// needs again stays in the first-level cache: a, unless it is too long for that.
inline void multiply_block(const bf16* a, const bf16* packed, int64_t steps, float* c, int64_t c_stride, bool add) {
    const Operand left = {a, 32, TILE, 2 * TILE}, right = {packed, 32, TILE, 2 * TILE};
    if (steps > LONGEST_KEPT)
        multiply_tiles<2, 2, STREAMS, STREAMS>(left, right, steps, c, c_stride, add);
    else
        multiply_tiles<2, 2, KEEPS, STREAMS>(left, right, steps, c, c_stride, add);
}

// Block m of 32 rows as pairs of tiles, rows from `rows` on as zeros.
inline void tile_rows(bf16* tiles, const bf16* left, int64_t m, int64_t rows, int64_t inner) {
    for (int64_t r = 0; r < BLOCK; r++) {
        const bf16* row = left + (BLOCK * m + r) * inner;
        for (int64_t k = 0; k < inner; k += BLOCK) {
            __m512i values = BLOCK * m + r < rows ? _mm512_loadu_si512(row + k) : _mm512_setzero_si512();
            _mm512_store_si512(tiles + 2 * TILE * (k / BLOCK) + BLOCK * r, values);
        }
    }
}

// `left` (rows, inner) times a right side with `columns`. `pack(column, count, k, length, tiles)` packs `count` panels of 32
// columns of the right side's rows k … k + length, each `length` / 32 pairs of tiles. `fetch(row, column)` may prefetch what
// `finish(row, column, c)`, which gets 32 fp32 results of one row, will read. Called outside of parallel regions.
//
// Threads share the rows or the columns, whichever leaves them less to rearrange. Each works through its part in chunks of rows,
// groups of panels and slices of `inner` that stay in its cache together, and packs a group just before it multiplies it: what
// one core packs for another is slow to fetch.
template <typename Pack, typename Fetch, typename Finish>
void multiply(const bf16* left, int64_t rows, int64_t inner, int64_t columns, Pack pack, Fetch fetch, Finish finish) {
    const int64_t panels = columns / BLOCK, blocks = (rows + BLOCK - 1) / BLOCK;
    const int64_t slices = (inner + SLICE - 1) / SLICE;
    const int64_t slice = (inner / BLOCK + slices - 1) / slices * BLOCK;
    const int64_t longest = std::max<int64_t>(1, CACHED / (BLOCK * slice));  // blocks of a chunk
    const int64_t group = std::clamp<int64_t>(CACHED / (2 * BLOCK * slice), 1, MAX_GROUP);
    auto chunks = [=](int64_t count) { return (count + longest - 1) / longest; };
#pragma omp parallel
    {
        Tiles tiles;
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t shared = (blocks + threads - 1) / threads;
        const int64_t by_rows = shared + PACKING * panels * chunks(shared);
        const int64_t by_columns = blocks + PACKING * panels * chunks(blocks) / threads;
        int64_t first = 0, last = blocks, n0 = 0, n1 = panels;
        if (by_rows <= by_columns) {
            first = blocks * thread / threads, last = blocks * (thread + 1) / threads;
        } else {
            n0 = panels * thread / threads, n1 = panels * (thread + 1) / threads;
        }
        const int64_t chunk = std::min(longest, last - first);
        auto packed = scratch<bf16>(group * BLOCK * slice), tiled = scratch<bf16>(std::max<int64_t>(chunk, 1) * BLOCK * inner);
        auto sums = scratch<float>((slices > 1 ? chunk : 1) * group * BLOCK * BLOCK);
        for (int64_t start = first; start < last; start += longest) {
            const int64_t stop = std::min(last, start + longest);
            for (int64_t m = start; m < stop; m++) tile_rows(&tiled[(m - start) * BLOCK * inner], left, m, rows, inner);
            for (int64_t g = n0; g < n1; g += group) {
                const int64_t count = std::min(group, n1 - g);
                for (int64_t k = 0; k < inner; k += slice) {
                    const int64_t length = std::min(slice, inner - k);
                    pack(BLOCK * g, count, k, length, &packed[0]);
                    for (int64_t m = start; m < stop; m++) {
                        float* c = &sums[slices > 1 ? (m - start) * count * BLOCK * BLOCK : 0];
                        for (int64_t n = 0; n < count; n++)
                            multiply_block(&tiled[(m - start) * BLOCK * inner + BLOCK * k], &packed[n * BLOCK * length],
                                           length / BLOCK, c + n * BLOCK * BLOCK, BLOCK, k > 0);
                        if (k + length < inner) continue;
                        const int64_t end = std::min(BLOCK * (m + 1), rows);
                        for (int64_t row = end; row < std::min(end + BLOCK, rows); row++)
                            for (int64_t n = 0; n < count; n++) fetch(row, BLOCK * (g + n));
                        for (int64_t row = BLOCK * m; row < end; row++)
                            for (int64_t n = 0; n < count; n++)
                                finish(row, BLOCK * (g + n), c + (n * BLOCK + row % BLOCK) * BLOCK);
                    }
                }
            }
        }
        _mm_sfence();  // what was streamed is there for other threads
    }
}

inline void prefetch_rows(const bf16* rows, int64_t stride, int64_t count, int64_t width) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t k = 0; k < width; k += BLOCK) _mm_prefetch(rows + r * stride + k, _MM_HINT_T1);
}

// `pack_rows_as_a`, and the sums of the 16 columns added to `sum`.
inline __m512 pack_and_add(bf16* tile, const bf16* rows, int64_t stride, int valid, __m512 sum) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 others = _mm512_setzero_ps();
    __m512i r[16];
    for (int i = 0; i < 16; i++) {
        r[i] = load_pairs(rows, stride, i, valid);
        __m512& half = i % 2 ? others : sum;
        half = _mm512_dpbf16_ps(half, (__m512bh)r[i], ones);
    }
    transpose16(r);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(tile + 32 * i, r[i]);
    return _mm512_add_ps(sum, others);
}

// Stores rows of 32; past the caches if they are `LARGE`, which spares reading what is overwritten.
class Output {
   public:
    Output(bf16* to, int64_t bytes) : to_(to), streams_(bytes >= LARGE && (uintptr_t)to % 64 == 0) {}
    explicit operator bool() const { return to_ != nullptr; }
    void store(int64_t at, __m512 low, __m512 high) const {
        const __m512i values = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        if (streams_)
            _mm512_stream_si512((__m512i*)(to_ + at), values);
        else
            _mm512_storeu_si512(to_ + at, values);
    }

   private:
    bf16* to_;
    bool streams_;
};

}  // namespace

// y = x · weightᵀ + bias + residual; bias and residual may be null. With `activated`, also activated = gelu(y).
extern "C" void clap_linear(const bf16* x, const bf16* weight0, const bf16* weight1, const bf16* weight2, const bf16* bias0,
                            const bf16* bias1, const bf16* bias2, const bf16* residual, bf16* y, bf16* activated, int64_t M,
                            int64_t N, int64_t K) {
    const Joined<const bf16> weight{{weight0, weight1, weight2}, N, K}, bias{{bias0, bias1, bias2}, N, 1};
    auto pack = [=](int64_t first, int64_t count, int64_t k0, int64_t length, bf16* tiles) {
        for (int64_t n = 0; n < BLOCK * count; n += 16) {
            const bf16* rows = weight[first + n] + k0;
            bf16* panel = tiles + n / BLOCK * BLOCK * length + n % BLOCK * BLOCK;
            for (int64_t k = 0; k < length; k += BLOCK) pack_transposed(panel + 2 * TILE * (k / BLOCK), rows + k, K);
        }
    };
    const Output before(y, activated ? LARGE : 2 * M * N), after(activated, 2 * M * N);  // y is read much later then
    auto fetch = [=](int64_t m, int64_t n) {
        if (residual) _mm_prefetch(residual + m * N + n, _MM_HINT_T1);
    };
    auto finish = [=](int64_t m, int64_t n, const float* c) {
        __m512 low = _mm512_load_ps(c), high = _mm512_load_ps(c + 16);
        if (bias) {
            low = _mm512_add_ps(low, load_bf16(bias[n]));
            high = _mm512_add_ps(high, load_bf16(bias[n] + 16));
        }
        if (residual) {
            low = _mm512_add_ps(low, load_bf16(residual + m * N + n));
            high = _mm512_add_ps(high, load_bf16(residual + m * N + n + 16));
        }
        before.store(m * N + n, low, high);
        if (after) after.store(m * N + n, gelu(low), gelu(high));
    };
    multiply(x, M, K, N, pack, fetch, finish);
}

// dx = (dy · weight) ⊙ gelu′(before) + passed; `before` and `passed` (M, K) may be null.
extern "C" void clap_linear_backward_input(const bf16* dy, const bf16* weight0, const bf16* weight1, const bf16* weight2,
                                           const bf16* before, const bf16* passed, bf16* dx, int64_t M, int64_t N, int64_t K) {
    const Joined<const bf16> weight{{weight0, weight1, weight2}, N, K};
    auto pack = [=](int64_t first, int64_t count, int64_t n0, int64_t length, bf16* tiles) {
        for (int64_t n = 0; n < length; n += BLOCK) {
            const bf16* rows = weight[n0 + n] + first;
            for (int64_t k = 0; k < BLOCK * count; k += 16)
                pack_rows(tiles + k / BLOCK * BLOCK * length + 2 * TILE * (n / BLOCK) + k % BLOCK * BLOCK, rows + k, K);
        }
    };
    const Output result(dx, 2 * M * K);
    auto fetch = [=](int64_t m, int64_t k) {
        if (before) _mm_prefetch(before + m * K + k, _MM_HINT_T1);
        if (passed) _mm_prefetch(passed + m * K + k, _MM_HINT_T1);
    };
    auto finish = [=](int64_t m, int64_t k, const float* c) {
        __m512 low = _mm512_load_ps(c), high = _mm512_load_ps(c + 16);
        if (before) {
            low = _mm512_mul_ps(low, gelu_slope(load_bf16(before + m * K + k)));
            high = _mm512_mul_ps(high, gelu_slope(load_bf16(before + m * K + k + 16)));
        }
        if (passed) {
            low = _mm512_add_ps(low, load_bf16(passed + m * K + k));
            high = _mm512_add_ps(high, load_bf16(passed + m * K + k + 16));
        }
        result.store(m * K + k, low, high);
    };
    multiply(dy, M, N, K, pack, fetch, finish);
}

// dweight (N, K) = dyᵀ · x and dbias (N) = column sums of dy; dbias may be null.
//
// Threads share the longer side of dweight, so that none waits for another and sums have one order. There may be no rows.
extern "C" void clap_linear_backward_weight(const bf16* dy, const bf16* x, bf16* dweight0, bf16* dweight1, bf16* dweight2,
                                            bf16* dbias0, bf16* dbias1, bf16* dbias2, int64_t M, int64_t N, int64_t K) {
    const Joined<bf16> dweight{{dweight0, dweight1, dweight2}, N, K}, dbias{{dbias0, dbias1, dbias2}, N, 1};
    const bool by_row = N >= K;
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t shared = (by_row ? N : K) / BLOCK;
        const int64_t first = BLOCK * (shared * thread / threads), last = BLOCK * (shared * (thread + 1) / threads);
        const int64_t n0 = by_row ? first : 0, n1 = by_row ? last : N, k0 = by_row ? 0 : first, k1 = by_row ? K : last;
        const int64_t width = k1 - k0;
        if (first < last) {
            Tiles tiles;
            const int64_t padded = std::max<int64_t>(1, (M + BLOCK - 1) / BLOCK) * BLOCK;
            const int64_t chunk = std::min(padded, std::clamp<int64_t>(CACHED / width / BLOCK * BLOCK, 8 * BLOCK, 16 * BLOCK));
            const int64_t count = std::clamp<int64_t>(CACHED / 2 / (chunk * BLOCK), 1, MAX_GROUP);
            auto right = scratch<bf16>(chunk * width), left = scratch<bf16>(count * chunk * BLOCK);
            auto sums = scratch<float>((n1 - n0) * width);
            auto bias_sums = scratch<float>(n1 - n0);
            memset(&bias_sums[0], 0, (n1 - n0) * sizeof(float));
            if (M == 0) memset(&sums[0], 0, (n1 - n0) * width * sizeof(float));
            for (int64_t m0 = 0; m0 < M; m0 += chunk) {
                const int64_t steps = (std::min(chunk, M - m0) + BLOCK - 1) / BLOCK;
                for (int64_t s = 0; s < steps; s++) {
                    const int64_t m = m0 + BLOCK * s;
                    const int valid = (int)std::min(BLOCK, M - m);
                    prefetch_rows(x + (m + BLOCK) * K + k0, K, std::min(BLOCK, M - m - BLOCK), width);
                    for (int64_t k = 0; k < width; k += 16)
                        pack_rows(&right[(k / BLOCK * steps + s) * 2 * TILE + k / 16 % 2 * TILE], x + m * K + k0 + k, K, valid);
                }
                for (int64_t group = n0; group < n1; group += BLOCK * count) {
                    const int64_t end = std::min(n1, group + BLOCK * count);
                    for (int64_t s = 0; s < steps; s++) {
                        const int64_t m = m0 + BLOCK * s;
                        const int valid = (int)std::min(BLOCK, M - m);
                        prefetch_rows(dy + (m + BLOCK) * N + group, N, std::min(BLOCK, M - m - BLOCK), end - group);
                        for (int64_t n = group; n < end; n += 16) {
                            bf16* tile = &left[(((n - group) / BLOCK) * steps + s) * 2 * TILE + (n / 16 % 2) * TILE];
                            __m512 sum = _mm512_loadu_ps(&bias_sums[n - n0]);
                            sum = pack_and_add(tile, dy + m * N + n, N, valid, sum);
                            _mm512_storeu_ps(&bias_sums[n - n0], sum);
                        }
                    }
                    for (int64_t n = group; n < end; n += BLOCK)
                        for (int64_t k = 0; k < width; k += BLOCK)
                            multiply_block(&left[(n - group) / BLOCK * steps * 2 * TILE], &right[k / BLOCK * steps * 2 * TILE],
                                           steps, &sums[(n - n0) * width + k], width, m0 > 0);
                }
            }
            for (int64_t n = n0; n < n1; n++) {
                const float* row = &sums[(n - n0) * width];
                const Output to(dweight[n] + k0, LARGE);  // not needed soon
                for (int64_t k = 0; k < width; k += BLOCK)
                    to.store(k, _mm512_loadu_ps(row + k), _mm512_loadu_ps(row + k + 16));
            }
            _mm_sfence();
            if (dbias && k0 == 0)  // by rows everyone, else the one that has the first columns
                for (int64_t n = n0; n < n1; n += 16) store_bf16(dbias[n], _mm512_loadu_ps(&bias_sums[n - n0]));
        }
    }
}
