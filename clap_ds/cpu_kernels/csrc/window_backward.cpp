// Attention inside windows, backward. Keys are rows and queries columns, 32 of them at a time ("half"), so that sums over keys
// are sums of vectors, and weights and their gradients are A tiles of the gradients of v and k as they are.

#include "windows.h"

namespace {

template <int STEPS>
struct alignas(64) Buffers {
    bf16 k[STEPS * 4 * TILE], v[STEPS * 4 * TILE];                  // A tiles
    bf16 q_columns[STEPS * 4 * TILE], d_columns[STEPS * 4 * TILE];  // B tiles of the transposes; d: the output's gradient
    bf16 q_pairs[STEPS * 4 * TILE], k_pairs[STEPS * 4 * TILE], d_pairs[STEPS * 4 * TILE];
    union {  // used in turn, to save L1 cache
        float scores[2][N * 32];  // a half's scores, then weights; gradients of weights
        float products[3][16 * 32 * STEPS];
    };
    bf16 low_weights[2][N * 32], d_scores[2][N * 32];
    bf16 d_scores_by_query[4][2][TILE];  // queries / 16, keys / 32
};

// Turns a half's scores into weights, fp32 and bf16, and products of the output's gradient with v into gradients of scores.
template <bool MASKS>
inline void differentiate_scores(
    float* scores, const float* slopes, bf16* weights, bf16* d_scores, const float* bias, float* d_bias, const float* log_sums,
    const uint64_t* apart, int half, __m512 factor) {
    const __m512 log_sum[2] = {load(log_sums), load(log_sums + 16)};
    __m512 delta[2] = {splat(0), splat(0)};  // sums of weight · its gradient
#pragma GCC unroll 2
    for (int t = 0; t < N; t++) {
        __m512 p[2];
        for (int j = 0; j < 2; j++) {
            const int at = 32 * t + 16 * j;
            p[j] = exp2_ps<true>(score_of<MASKS>(scores + at, factor, bias + at, apart[t], 2 * half + j) - log_sum[j]);
            delta[j] = fma(p[j], load(slopes + at), delta[j]);
            store(scores + at, p[j]);
        }
        store(weights + 32 * t, p[0], p[1]);
    }
    for (int t = 0; t < N; t++) {
        __m512 ds[2];
        for (int j = 0; j < 2; j++) {
            const int at = 32 * t + 16 * j;
            ds[j] = load(scores + at) * (load(slopes + at) - delta[j]);
            store(d_bias + at, load(d_bias + at) + ds[j]);
        }
        store(d_scores + 32 * t, ds[0], ds[1]);
    }
}

template <int STEPS>
struct Backward {
    const Shape& shape;
    const bf16* qkv;
    const float* bias;  // [head][half][key][32 queries], and so is its gradient
    const float* log_sums;
    const bf16* d_output;
    bf16* d_qkv;
    float* d_bias;
    Buffers<STEPS>& s;
    const int64_t width = shape.width(), dim = shape.dim;
    const __mmask32 mask[2] = {first_of_32(dim), first_of_32(dim - 32)};

    // C (64 × 32) = A · Bᵀ for the queries of a half.
    static void multiply_columns(float* c, const bf16* a, const bf16* columns, int half) {
        const Operand right = {columns + 2 * half * TILE, 32, TILE, 4 * TILE};
        for (int block = 0; block < 4; block += 2)
            multiply_tiles<2, 2>({a + block * TILE, 32, TILE, 4 * TILE}, right, STEPS, c + block * 16 * 32, 32);
    }

    void run(const Window& window, int64_t index, int64_t head) {
        const Rows q = {qkv + head * dim, 3 * width, window.token, dim}, d = {d_output + head * dim, width, q.token, dim};
        q.pack<STEPS>(nullptr, s.q_columns, s.q_pairs);
        q.right(width).template pack<STEPS>(s.k, nullptr, s.k_pairs);
        d.pack<STEPS>(nullptr, s.d_columns, s.d_pairs);
        q.right(2 * width).template pack<STEPS>(s.v, nullptr, nullptr);
        const __m512 factor = splat(LOG2E / sqrtf((float)dim));
        const float* sums = log_sums + (index * shape.heads + head) * N;
        for (int half = 0; half < 2; half++) {
            multiply_columns(s.scores[0], s.k, s.q_columns, half);
            multiply_columns(s.scores[1], s.v, s.d_columns, half);
            const int64_t at = (head * 2 + half) * N * 32;
            const auto differentiate = window.masked ? differentiate_scores<true> : differentiate_scores<false>;
            differentiate(s.scores[0], s.scores[1], s.low_weights[half], s.d_scores[half], bias + at, d_bias + at,
                          sums + 32 * half, window.apart, half, factor);
            for (int i = 0; i < 4; i++) {
                const bf16* from = s.d_scores[half] + i % 2 * 32 * 32 + i / 2 * 16;
                pack_rows_as_a(s.d_scores_by_query[2 * half + i / 2][i % 2], from, 32, 32);
            }
        }
        for (int i = 0; i < 14; i++) {  // written two blocks after the matrix unit started them
            if (i < 12) multiply(i);
            if (i >= 2) write(i - 2, window, head);
        }
    }

    // The gradients of v, k and q in turn, each in four blocks of 16 tokens.
    void multiply(int i) {
        const int block = i % 4, rows = 16 * 32 * block;
        const auto times = [&](const bf16* a, int64_t a_step, const bf16* pairs) {
            multiply_tiles<1, 2 * STEPS>(
                {a, 32, 0, a_step}, {pairs, 32, TILE, 2 * STEPS * TILE}, 2, s.products[i % 3], 32 * STEPS);
        };
        if (i < 4)
            times(s.low_weights[0] + rows, N * 32, s.d_pairs);
        else if (i < 8)
            times(s.d_scores[0] + rows, N * 32, s.q_pairs);
        else
            times(s.d_scores_by_query[block][0], TILE, s.k_pairs);
    }

    void write(int i, const Window& window, int64_t head) {
        const int block = i % 4, part = 2 - i / 4;
        const __m512 factor = splat(part == 2 ? 1.0f : 1.0f / sqrtf((float)dim));
        bf16* to = d_qkv + head * dim + part * width;
        for (int row = 0; row < 16; row++) {
            bf16* own = to + window.token[16 * block + row] * 3 * width;
            write_row<STEPS>(own, s.products[i % 3] + row * 32 * STEPS, factor, mask);
        }
    }
};

// From [head][query][key] to [head][half][key][32 queries], times log2 e, or back. Threads share the 16 × 16 blocks.
template <bool TO_KEYS>
inline void transpose_bias(int64_t heads, const float* from, float* to) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < heads * 16; i++) {
        const int64_t head = i / 16, queries = i / 4 % 4, keys = i % 4;
        const int64_t by_query = (head * N + 16 * queries) * N + 16 * keys;
        const int64_t by_key = head * N * N + queries / 2 * N * 32 + 16 * keys * 32 + queries % 2 * 16;
        __m512i r[16];
        for (int j = 0; j < 16; j++) r[j] = (__m512i)load(from + (TO_KEYS ? by_query + j * N : by_key + j * 32));
        transpose16(r);
        for (int j = 0; j < 16; j++)
            store(to + (TO_KEYS ? by_key + j * 32 : by_query + j * N), (__m512)r[j] * splat(TO_KEYS ? LOG2E : 1.0f));
    }
}

}  // namespace

// Like forward, with its `log_sums`; d_output like output → d_qkv like qkv, and d_bias (heads, 64, 64) fp32.
extern "C" void clap_window_attention_backward(
    const bf16* qkv, const float* bias, const float* log_sums, const bf16* d_output, bf16* d_qkv, float* d_bias, int64_t clips,
    int64_t grid, int64_t heads, int64_t dim, int64_t shift) {
    const Shape shape = {clips, grid, heads, dim, shift};
    const int64_t count = heads * N * N, width = shape.width();
    const auto by_key = scratch<float>(count), sums = scratch<float>(omp_get_max_threads() * count);
    with_constant<1, 2>(dim <= 32 ? 1 : 2, [&](auto constant) {
        constexpr int STEPS = constant;
#pragma omp parallel
        {
            const int64_t threads = omp_get_num_threads();
            transpose_bias<true>(heads, bias, &by_key[0]);
            float* own = &sums[omp_get_thread_num() * count];
            memset(own, 0, count * sizeof(float));
            {
                const Tiles tiles;
                const FlushToZero flush;
                const auto memory = scratch<Buffers<STEPS>>(1);
                Backward<STEPS> each{shape, qkv, &by_key[0], log_sums, d_output, d_qkv, own, memory[0]};
                const Share share{shape};
                Window window;
                for (int64_t i = share.range.begin; i < share.range.end; i++) {
                    const auto [index, head] = share.at(i);
                    window.set(shape, index);
                    each.run(window, index, head);
                    share.ahead(index, head, 0, 1, [&](int64_t, int64_t token) {
                        prefetch(qkv + token * 3 * width, 3 * width);
                        prefetch(d_output + token * width, width);
                    });
                }
            }
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t i = 0; i < count; i++)
                for (int64_t t = 1; t < threads; t++) sums[i] += sums[t * count + i];
            transpose_bias<false>(heads, &sums[0], d_bias);
        }
    });
}
