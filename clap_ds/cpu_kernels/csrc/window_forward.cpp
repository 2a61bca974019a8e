// Attention inside windows, forward. Heads are at most 64 wide (32 · STEPS); scores are in base 2 (times log2 e), so that
// weights are 2^score.

#include "windows.h"

namespace {

// A head of a window in the forward pass.
template <int STEPS>
struct alignas(64) Head {
    static constexpr int V_TILES = 2 * STEPS + 1;  // for each 32 tokens; the last: ones
    bf16 q[STEPS * 4 * TILE], k[STEPS * 4 * TILE], v[2 * V_TILES * TILE];
    Window window;
    int64_t index, head;
};

// Buffers between matrix and vector units for 16 queries: two alternating blocks, and one to recompute.
template <int STEPS>
struct alignas(64) Buffers {
    static constexpr int WIDTH = 32 * STEPS + 16;  // the last 16: sums of weights, if v leaves no column free
    Head<STEPS> heads[2];
    bf16 weights[3][2 * TILE];
    float scores[3][16 * N], mixed[2][16 * WIDTH], largest[16];
};

// Weights not divided by their sums. SAFE: subtracts each row's largest score first.
template <bool SAFE, bool MASKS>
inline void weigh_rows(
    bf16* weights, const float* scores, const float* bias, const uint64_t* apart, __m512 factor, float* all_largest) {
    for (int i = 0; i < 16; i++) {
        __m512 x[4];
        for (int j = 0; j < 4; j++) {
            const int at = i * N + 16 * j;
            x[j] = score_of<MASKS>(scores + at, factor, bias + at, apart[i], j);
        }
        if (SAFE) {
            all_largest[i] = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
            for (int j = 0; j < 4; j++) x[j] = x[j] - splat(all_largest[i]);
        }
        for (int j = 0; j < 4; j++) x[j] = exp2_ps<true>(x[j]);
        store(weights + 32 * i, x[0], x[1]);
        store(weights + TILE + 32 * i, x[2], x[3]);
    }
}

template <int STEPS>
struct Forward {
    static constexpr int WIDTH = Buffers<STEPS>::WIDTH, V_TILES = Head<STEPS>::V_TILES, SPARE = 2;
    const Shape& shape;
    const bf16* qkv;
    const float* bias;
    bf16* output;
    float* log_sums;
    Buffers<STEPS>& s;
    const int64_t width = shape.width(), dim = shape.dim;
    const bool spare_column = dim < 32 * STEPS;
    const __m512 factor = splat(LOG2E / sqrtf((float)dim));
    const __mmask32 mask[2] = {first_of_32(dim), first_of_32(dim - 32)};

    void start(Head<STEPS>& to, int64_t index, int64_t head) {
        to.window.set(shape, index);
        to.index = index;
        to.head = head;
        const Rows q = {qkv + head * dim, 3 * width, to.window.token, dim};
        q.pack<STEPS>(to.q, nullptr, nullptr);
        q.right(width).template pack<STEPS>(nullptr, to.k, nullptr);
        q.right(2 * width).template pack<STEPS, V_TILES>(nullptr, nullptr, to.v, spare_column);
    }

    void score(int slot, const Head<STEPS>& head, int block) {
        const Operand q = {head.q + block * TILE, 32, 0, 4 * TILE}, k = {head.k, 32, TILE, 4 * TILE};
        multiply_tiles<1, 4>(q, k, STEPS, s.scores[slot], N);
    }

    template <bool SAFE>
    void weigh(int slot, const Head<STEPS>& head, int block) {
        const auto run = head.window.masked ? weigh_rows<SAFE, true> : weigh_rows<SAFE, false>;
        const float* own_bias = bias + (head.head * N + 16 * block) * N;
        run(s.weights[slot], s.scores[slot], own_bias, head.window.apart + 16 * block, factor, s.largest);
    }

    void mix(float* mixed, const bf16* weights, const Head<STEPS>& head) {
        const Operand a = {weights, 32, 0, TILE}, b = {head.v, 32, TILE, V_TILES * TILE};
        if (spare_column)
            multiply_tiles<1, 2 * STEPS>(a, b, 2, mixed, WIDTH);
        else
            multiply_tiles<1, V_TILES>(a, b, 2, mixed, WIDTH);
    }

    __m512 weight_sums(const float* mixed) {
        const int column = spare_column ? dim / 32 * 32 + dim % 32 / 2 : 32 * STEPS;
        return _mm512_i32gather_ps(_mm512_mullo_epi32(lane_numbers(), _mm512_set1_epi32(WIDTH)), mixed + column, 4);
    }

    void finish(float* mixed, const Head<STEPS>& head, int block) {
        __m512 sums = weight_sums(mixed), shift = splat(0);
        const __mmask16 good = _mm512_cmp_ps_mask(sums, splat(0x1p-64f), _CMP_GT_OQ) &
                               _mm512_cmp_ps_mask(sums, splat(0x1p64f), _CMP_LT_OQ);
        if (good != 0xffff) {  // powers too large or too small without subtracting the largest score
            score(SPARE, head, block);
            weigh<true>(SPARE, head, block);
            mix(mixed, s.weights[SPARE], head);
            sums = weight_sums(mixed);
            shift = load(s.largest);
        }
        store(log_sums + (head.index * shape.heads + head.head) * N + 16 * block, log2_ps(sums) + shift);
        alignas(64) float inverse[16];
        store(inverse, splat(1.0f) / sums);
        for (int i = 0; i < 16; i++) {
            bf16* to = output + head.window.token[16 * block + i] * width + head.head * dim;
            write_row<STEPS>(to, mixed + i * WIDTH, splat(inverse[i]), mask);
        }
    }

    // Transfers between the matrix and vector units are slow, so blocks of 16 queries are pipelined: scores are one block ahead
    // of the weights, products one behind, and outputs two behind.
    void run(const Share& share) {
        for (auto& head : s.heads)
            for (int tile = 2 * STEPS; tile < 2 * V_TILES; tile += V_TILES) std::fill_n(head.v + tile * TILE, TILE, 0x3f80);
        const int64_t first = 4 * share.range.begin, end = 4 * share.range.end;
        if (first == end) return;
        const auto head_of = [&](int64_t n) -> Head<STEPS>& { return s.heads[n / 4 % 2]; };
        const auto start_of = [&](int64_t n) {
            const auto [index, head] = share.at(n / 4);
            start(head_of(n), index, head);
        };
        start_of(first);
        score(first % 2, head_of(first), 0);
        for (int64_t n = first; n < end + 2; n++) {
            if (n % 4 == 2 && n + 2 < end) start_of(n + 2);
            if (n + 1 < end) score((n + 1) % 2, head_of(n + 1), (n + 1) % 4);
            if (n < end) {
                weigh<false>(n % 2, head_of(n), n % 4);
                share.ahead(head_of(n).index, head_of(n).head, n % 4, 4, [&](int64_t, int64_t token) {
                    prefetch(qkv + token * 3 * width, 3 * width);
                });
            }
            if (n > first && n - 1 < end) mix(s.mixed[(n - 1) % 2], s.weights[(n - 1) % 2], head_of(n - 1));
            if (n > first + 1) finish(s.mixed[n % 2], head_of(n - 2), (n - 2) % 4);
        }
    }
};

}  // namespace

// qkv (clips, grid, grid, 3 · heads · dim) bf16, bias (heads, 64, 64) fp32 → output (clips, grid, grid, heads · dim) bf16 and
// log_sums (windows, heads, 64) fp32, the base-2 logarithms of the softmax denominators. dim: a multiple of 8 up to 64; grid:
// of 8; 0 ≤ shift < 8.
extern "C" void clap_window_attention_forward(
    const bf16* qkv, const float* bias, bf16* output, float* log_sums, int64_t clips, int64_t grid, int64_t heads, int64_t dim,
    int64_t shift) {
    const Shape shape = {clips, grid, heads, dim, shift};
    const int64_t count = heads * N * N;
    const auto scaled = scratch<float>(count);
    with_constant<1, 2>(dim <= 32 ? 1 : 2, [&](auto constant) {
        constexpr int STEPS = constant;
#pragma omp parallel
        {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < count; i++) scaled[i] = bias[i] * LOG2E;
            const Tiles tiles;
            const FlushToZero flush;
            const auto memory = scratch<Buffers<STEPS>>(1);
            Forward<STEPS>{shape, qkv, &scaled[0], output, log_sums, memory[0]}.run(Share{shape});
        }
    });
}
