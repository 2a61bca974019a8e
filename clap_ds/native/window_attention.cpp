// Attention inside 8 × 8 windows of a square token grid, from and to the grid: partition, cyclic shift and reverse are where
// rows are read and written. Heads are at most 64 wide; scores are in base 2 (times log2 e), so that weights are 2^score.
//
// Rows of a head become B tiles of pairs by unpacking halves of 128-bit lanes, which leaves the columns of each 32 in the order
// 0-3, 8-11, 16-19, 24-27 (tile "low") and 4-7, 12-15, 20-23, 28-31 ("high"). What comes out of a product is put right in
// `write_rows`.

#include "common.h"

#include <cmath>

namespace {

constexpr int N = 64;                        // tokens of a window
constexpr int SIDE = 8;                      // of a window
constexpr int TILE = 512;                    // bf16 elements of a tile
constexpr float LOG2E = 1.44269504088896341f;
constexpr float MASKED = -100.0f * LOG2E;    // MASKED_SCORE of window_attention.py
constexpr int64_t GROUP_BYTES = 512 * 1024;  // of qkv that stay in the L2 cache while heads take turns over them

// 2^x, relative error below 4e-6; 0 for very negative x.
inline __m512 exp2_ps(__m512 x) {
    const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    __m512 y = _mm512_set1_ps(1.3534167e-2f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(5.2011464e-2f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(2.4144275e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(6.9300383e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0000026f));
    return _mm512_scalef_ps(y, x);  // times 2^floor(x)
}

// log2(x) of positive finite x, absolute error below 1e-6.
inline __m512 log2_ps(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
    const __m512 exponent = _mm512_getexp_ps(_mm512_div_ps(x, mantissa));
    const __m512 t = _mm512_div_ps(_mm512_sub_ps(mantissa, one), _mm512_add_ps(mantissa, one));  // ln m = 2 artanh t
    const __m512 square = _mm512_mul_ps(t, t);
    __m512 y = _mm512_set1_ps(2.0f * LOG2E / 9);
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(2.0f * LOG2E / 7));
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(2.0f * LOG2E / 5));
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(2.0f * LOG2E / 3));
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(2.0f * LOG2E));
    return _mm512_fmadd_ps(y, t, exponent);
}

// While it lives, the calling thread's results too small for normal floats are 0, such as weights of masked tokens: a hundred
// times slower otherwise.
struct FlushToZero {
    const unsigned before = _mm_getcsr();
    FlushToZero() { _mm_setcsr(before | 0x8040); }
    ~FlushToZero() { _mm_setcsr(before); }
};

struct Shape {
    int64_t clips, grid, heads, dim, shift;

    int64_t per_side() const { return grid / SIDE; }
    int64_t windows() const { return clips * per_side() * per_side(); }
    int64_t width() const { return heads * dim; }
};

// Where a window's tokens are, and which of them attend to one another.
struct Window {
    int64_t token[N];   // rows of the (clips · grid², …) matrix
    uint64_t apart[N];  // bit k: token k is in another region; set where `masked`
    bool masked;

    Window(const Shape& shape, int64_t index) {
        const int64_t per_side = shape.per_side();
        const int64_t across = index % per_side, down = index / per_side % per_side;
        const int64_t clip = index / (per_side * per_side);
        int64_t columns[SIDE];
        for (int j = 0; j < SIDE; j++) columns[j] = (across * SIDE + j + shape.shift) % shape.grid;
        for (int i = 0; i < SIDE; i++) {
            const int64_t row = (clip * shape.grid + (down * SIDE + i + shape.shift) % shape.grid) * shape.grid;
            for (int j = 0; j < SIDE; j++) token[i * SIDE + j] = row + columns[j];
        }
        const bool last_down = down == per_side - 1, last_across = across == per_side - 1;
        masked = shape.shift > 0 && (last_down || last_across);
        if (!masked) return;
        uint64_t below = 0, right = 0;  // tokens that the shift brought from the grid's other side
        if (last_down) below = ~0ull << (SIDE * (SIDE - shape.shift));
        if (last_across) right = 0x0101010101010101ull * (uint8_t)(0xff << (SIDE - shape.shift));
        for (int t = 0; t < N; t++) {
            apart[t] = (below ^ -(below >> t & 1)) | (right ^ -(right >> t & 1));
        }
    }
};

// One head's part of the rows of a window's tokens.
struct Rows {
    const bf16* first;
    int64_t stride;
    const int64_t* token;
    int64_t dim;

    __mmask32 mask(int step) const {
        const int64_t left = dim - 32 * step;
        return left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1;
    }
    // Columns 32 · step and on; `beyond` where the head has no more.
    __m512i load(int t, int step, __m512i beyond = _mm512_setzero_si512()) const {
        return _mm512_mask_loadu_epi16(beyond, mask(step), first + token[t] * stride + 32 * step);
    }
};

// A tiles, row-major: 64 × 32·STEPS.
template <int STEPS>
inline void copy_rows(bf16* to, const Rows& rows) {
    for (int step = 0; step < STEPS; step++) {
        for (int t = 0; t < N; t++) _mm512_store_si512(to + (step * N + t) * 32, rows.load(t, step));
    }
}

// B tiles of the transpose: [step][token / 16].
template <int STEPS>
inline void pack_columns(bf16* to, const Rows& rows) {
    for (int step = 0; step < STEPS; step++) {
        for (int block = 0; block < N / 16; block++) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = rows.load(16 * block + i, step);
            transpose16(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(to + (step * 4 + block) * TILE + 32 * i, r[i]);
        }
    }
}

// B tiles of pairs of tokens: [token / 32][step][low, high]. With `ones`, the column after the last is all 1.
template <int STEPS>
inline void pack_pairs(bf16* to, const Rows& rows, bool ones = false) {
    for (int step = 0; step < STEPS; step++) {
        __m512i beyond = _mm512_setzero_si512();
        if (ones && rows.dim / 32 == step) beyond = _mm512_maskz_set1_epi16(1u << (rows.dim % 32), 0x3f80);
        for (int half = 0; half < 2; half++) {
            bf16* low = to + (half * STEPS + step) * 2 * TILE;
            for (int r = 0; r < 16; r++) {
                const __m512i even = rows.load(32 * half + 2 * r, step, beyond);
                const __m512i odd = rows.load(32 * half + 2 * r + 1, step, beyond);
                _mm512_store_si512(low + 32 * r, _mm512_unpacklo_epi16(even, odd));
                _mm512_store_si512(low + TILE + 32 * r, _mm512_unpackhi_epi16(even, odd));
            }
        }
    }
}

// C (16 × 32·STEPS, fp32) = A · B over 64 pairs' rows: A in two tiles, B as `pack_pairs` leaves it.
template <int STEPS>
inline void multiply(float* c, int64_t c_stride, const bf16* a0, const bf16* a1, const bf16* b) {
    _tile_loadd(2, a0, 64);
    _tile_loadd(3, a1, 64);
    for (int step = 0; step < STEPS; step++) {
        const bf16* b0 = b + step * 2 * TILE;
        const bf16* b1 = b0 + STEPS * 2 * TILE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(4, b0, 64);
        _tile_dpbf16ps(0, 2, 4);
        _tile_loadd(5, b0 + TILE, 64);
        _tile_dpbf16ps(1, 2, 5);
        _tile_loadd(6, b1, 64);
        _tile_dpbf16ps(0, 3, 6);
        _tile_loadd(7, b1 + TILE, 64);
        _tile_dpbf16ps(1, 3, 7);
        _tile_stored(0, c + 32 * step, c_stride * sizeof(float));
        _tile_stored(1, c + 32 * step + 16, c_stride * sizeof(float));
    }
}

// Converts a row of a product into one head's part of a token's row.
template <int STEPS>
inline void write_row(bf16* to, const float* from, __m512 factor, const __mmask32* mask) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int step = 0; step < STEPS; step++) {
        const __m512 low = _mm512_mul_ps(_mm512_load_ps(from + 32 * step), factor);
        const __m512 high = _mm512_mul_ps(_mm512_load_ps(from + 32 * step + 16), factor);
        const __m512i row = _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        _mm512_mask_storeu_epi16(to + 32 * step, mask[step], row);
    }
}

template <int STEPS>
struct alignas(64) ForwardScratch {
    static constexpr int WIDTH = 32 * STEPS + 16;
    bf16 q[STEPS * 4 * TILE], k[STEPS * 4 * TILE], v[STEPS * 4 * TILE], ones[TILE], weights[2 * TILE];
    float scores[2][16 * N];
    float mixed[N * WIDTH];  // the last 16 columns: sums of weights, where q, k and v leave no column free
    float inverse[N], largest[N];
};

// Scores of 16 queries.
template <int STEPS>
inline void score(ForwardScratch<STEPS>& s, int block) {
    float* scores = s.scores[block % 2];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < STEPS; step++) {
        const bf16* k = s.k + step * 4 * TILE;
        _tile_loadd(4, s.q + (step * 4 + block) * TILE, 64);
        _tile_loadd(5, k, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, k + TILE, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, k + 2 * TILE, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, k + 3 * TILE, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, scores, N * sizeof(float));
    _tile_stored(1, scores + 16, N * sizeof(float));
    _tile_stored(2, scores + 32, N * sizeof(float));
    _tile_stored(3, scores + 48, N * sizeof(float));
}

// Weights of 16 queries, not divided by their sums; SAFE subtracts the row's largest score first.
template <int STEPS, bool SAFE, bool MASKS>
inline void weigh(ForwardScratch<STEPS>& s, int block, const float* bias, const Window& window, __m512 factor) {
    const float* scores = s.scores[block % 2];
    for (int i = 0; i < 16; i++) {
        const int t = 16 * block + i;
        __m512 x[4];
        for (int j = 0; j < 4; j++) {
            x[j] = _mm512_fmadd_ps(_mm512_load_ps(scores + i * N + 16 * j), factor, _mm512_load_ps(bias + t * N + 16 * j));
            if (MASKS) x[j] = _mm512_mask_add_ps(x[j], window.apart[t] >> (16 * j), x[j], _mm512_set1_ps(MASKED));
        }
        if (SAFE) {
            const float largest =
                _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
            s.largest[t] = largest;
            for (int j = 0; j < 4; j++) x[j] = _mm512_sub_ps(x[j], _mm512_set1_ps(largest));
        }
        for (int j = 0; j < 4; j++) x[j] = exp2_ps(x[j]);
        _mm512_store_si512(s.weights + 32 * i, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
        _mm512_store_si512(s.weights + TILE + 32 * i, (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
    }
}

// False where sums of weights left the range that is safe without subtracting the largest score.
template <int STEPS, bool SAFE>
bool forward_head(
    ForwardScratch<STEPS>& s, const Shape& shape, const Window& window, int64_t head, const bf16* qkv, const float* bias,
    bf16* output, float* log_sums) {
    constexpr int WIDTH = ForwardScratch<STEPS>::WIDTH;
    const int64_t width = shape.width(), dim = shape.dim;
    const bool spare_column = dim < 32 * STEPS;
    const Rows q = {qkv + head * dim, 3 * width, window.token, dim};
    if (!SAFE) {
        const Rows k = {q.first + width, 3 * width, window.token, dim}, v = {k.first + width, 3 * width, window.token, dim};
        copy_rows<STEPS>(s.q, q);
        pack_columns<STEPS>(s.k, k);
        pack_pairs<STEPS>(s.v, v, spare_column);
    }
    const __m512 factor = _mm512_set1_ps(LOG2E / sqrtf((float)dim));
    score<STEPS>(s, 0);
    for (int block = 0; block < 4; block++) {
        if (block < 3) score<STEPS>(s, block + 1);  // the matrix unit works ahead of the vector unit
        if (window.masked) {
            weigh<STEPS, SAFE, true>(s, block, bias, window, factor);
        } else {
            weigh<STEPS, SAFE, false>(s, block, bias, window, factor);
        }
        float* mixed = s.mixed + 16 * block * WIDTH;
        multiply<STEPS>(mixed, WIDTH, s.weights, s.weights + TILE, s.v);
        if (!spare_column) {
            _tile_zero(0);
            _tile_loadd(4, s.ones, 64);
            _tile_dpbf16ps(0, 2, 4);
            _tile_dpbf16ps(0, 3, 4);
            _tile_stored(0, mixed + 32 * STEPS, WIDTH * sizeof(float));
        }
    }
    const int sum_column = spare_column ? dim / 32 * 32 + dim % 32 / 2 : 32 * STEPS;
    const __m512i places = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(WIDTH));
    for (int block = 0; block < 4; block++) {
        const __m512 sums = _mm512_i32gather_ps(places, s.mixed + 16 * block * WIDTH + sum_column, 4);
        const __mmask16 good = _mm512_cmp_ps_mask(sums, _mm512_set1_ps(0x1p-64f), _CMP_GT_OQ) &
                               _mm512_cmp_ps_mask(sums, _mm512_set1_ps(0x1p64f), _CMP_LT_OQ);
        if (!SAFE && good != 0xffff) return false;
        _mm512_store_ps(s.inverse + 16 * block, _mm512_div_ps(_mm512_set1_ps(1.0f), sums));
        __m512 log_sum = log2_ps(sums);
        if (SAFE) log_sum = _mm512_add_ps(log_sum, _mm512_load_ps(s.largest + 16 * block));
        _mm512_storeu_ps(log_sums + 16 * block, log_sum);
    }
    const __mmask32 mask[2] = {q.mask(0), q.mask(1)};
    for (int t = 0; t < N; t++) {
        bf16* to = output + window.token[t] * width + head * dim;
        write_row<STEPS>(to, s.mixed + t * WIDTH, _mm512_set1_ps(s.inverse[t]), mask);
    }
    return true;
}

// Calls one(window, head) for a thread's share: windows in groups, each group's windows head by head.
template <class One>
inline void each_head(const Shape& shape, One one) {
    const int64_t windows = shape.windows(), heads = shape.heads, total = windows * heads;
    const int64_t group = std::max<int64_t>(1, GROUP_BYTES / (N * 3 * shape.width() * (int64_t)sizeof(bf16)));
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t i = total * thread / threads; i < total * (thread + 1) / threads; i++) {
        const int64_t first = i / (group * heads) * group;
        const int64_t size = std::min(group, windows - first), rest = i - first * heads;
        one(first + rest % size, rest / size);
    }
}

template <int STEPS>
void forward(const Shape& shape, const bf16* qkv, const float* bias, bf16* output, float* log_sums) {
    const int64_t count = shape.heads * N * N;
    const auto scaled = scratch<float>(count);
#pragma omp parallel num_threads(omp_get_max_threads())
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) scaled[i] = bias[i] * LOG2E;
        const Tiles tiles;
        const FlushToZero flush;
        const auto memory = scratch<ForwardScratch<STEPS>>(1);
        ForwardScratch<STEPS>& s = memory[0];
        for (int i = 0; i < TILE; i++) s.ones[i] = 0x3f80;
        each_head(shape, [&](int64_t index, int64_t head) {
            const Window window(shape, index);
            const float* own_bias = scaled.get() + head * N * N;
            float* own_sums = log_sums + (index * shape.heads + head) * N;
            if (!forward_head<STEPS, false>(s, shape, window, head, qkv, own_bias, output, own_sums)) {
                forward_head<STEPS, true>(s, shape, window, head, qkv, own_bias, output, own_sums);
            }
        });
    }
}

// The backward pass has keys as rows and queries as columns, 32 of them at a time ("half"), so that the sums over keys are
// sums of vectors and weights and their gradients are A tiles of the gradients of v and k as they are.
template <int STEPS>
struct alignas(64) BackwardScratch {
    bf16 k[STEPS * 4 * TILE], v[STEPS * 4 * TILE];                  // A tiles
    bf16 q_columns[STEPS * 4 * TILE], d_columns[STEPS * 4 * TILE];  // B tiles of the transposes; d: the output's gradient
    bf16 q_pairs[STEPS * 4 * TILE], k_pairs[STEPS * 4 * TILE], d_pairs[STEPS * 4 * TILE];
    float weights[N * 32], d_weights[N * 32];
    bf16 low_weights[2][N * 32], d_scores[2][N * 32];
    bf16 d_scores_by_query[2][2][2][TILE];  // half, low or high queries, keys / 32
    float product[16 * 32 * STEPS];
};

// C (64 × 32) = A · B^T for the queries of a half.
template <int STEPS>
inline void multiply_columns(float* c, const bf16* a, const bf16* columns, int half) {
    for (int block = 0; block < 4; block++) {
        _tile_zero(0);
        _tile_zero(1);
        for (int step = 0; step < STEPS; step++) {
            const bf16* b = columns + (step * 4 + 2 * half) * TILE;
            _tile_loadd(2, a + (step * 4 + block) * TILE, 64);
            _tile_loadd(3, b, 64);
            _tile_dpbf16ps(0, 2, 3);
            _tile_loadd(4, b + TILE, 64);
            _tile_dpbf16ps(1, 2, 4);
        }
        _tile_stored(0, c + block * 16 * 32, 128);
        _tile_stored(1, c + block * 16 * 32 + 16, 128);
    }
}

// Weights and gradients of scores for a half's queries, from products to bf16 tiles.
template <int STEPS, bool MASKS, bool BIAS>
inline void score_gradients(
    BackwardScratch<STEPS>& s, int half, const float* bias, float* d_bias, const float* log_sums, const Window& window,
    __m512 factor) {
    const __m512 log_sum[2] = {_mm512_loadu_ps(log_sums + 32 * half), _mm512_loadu_ps(log_sums + 32 * half + 16)};
    __m512 delta[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};  // sums of weight · its gradient
#pragma GCC unroll 2
    for (int t = 0; t < N; t++) {
        __m512 p[2];
        for (int j = 0; j < 2; j++) {
            const int at = 32 * t + 16 * j;
            __m512 x = _mm512_fmadd_ps(_mm512_load_ps(s.weights + at), factor, _mm512_load_ps(bias + at));
            if (MASKS) x = _mm512_mask_add_ps(x, window.apart[t] >> (32 * half + 16 * j), x, _mm512_set1_ps(MASKED));
            p[j] = exp2_ps(_mm512_sub_ps(x, log_sum[j]));
            delta[j] = _mm512_fmadd_ps(p[j], _mm512_load_ps(s.d_weights + at), delta[j]);
            _mm512_store_ps(s.weights + at, p[j]);
        }
        _mm512_store_si512(s.low_weights[half] + 32 * t, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
    }
    for (int pair = 0; pair < 2; pair++) {
        __m512i low[16], high[16];
        for (int i = 0; i < 16; i++) {
            __m512i row[2];
            for (int odd = 0; odd < 2; odd++) {
                const int t = 32 * pair + 2 * i + odd;
                __m512 ds[2];
                for (int j = 0; j < 2; j++) {
                    const int at = 32 * t + 16 * j;
                    const __m512 centred = _mm512_sub_ps(_mm512_load_ps(s.d_weights + at), delta[j]);
                    ds[j] = _mm512_mul_ps(_mm512_load_ps(s.weights + at), centred);
                    if (BIAS) _mm512_store_ps(d_bias + at, _mm512_add_ps(_mm512_load_ps(d_bias + at), ds[j]));
                }
                row[odd] = (__m512i)_mm512_cvtne2ps_pbh(ds[1], ds[0]);
                _mm512_store_si512(s.d_scores[half] + 32 * t, row[odd]);
            }
            low[i] = _mm512_unpacklo_epi16(row[0], row[1]);
            high[i] = _mm512_unpackhi_epi16(row[0], row[1]);
        }
        transpose16(low);
        for (int i = 0; i < 16; i++) _mm512_store_si512(s.d_scores_by_query[half][0][pair] + 32 * i, low[i]);
        transpose16(high);
        for (int i = 0; i < 16; i++) _mm512_store_si512(s.d_scores_by_query[half][1][pair] + 32 * i, high[i]);
    }
}

template <int STEPS, bool BIAS>
void backward_head(
    BackwardScratch<STEPS>& s, const Shape& shape, const Window& window, int64_t head, const bf16* qkv, const float* bias,
    const float* log_sums, const bf16* d_output, bf16* d_qkv, float* d_bias) {
    const int64_t width = shape.width(), dim = shape.dim;
    const Rows q = {qkv + head * dim, 3 * width, window.token, dim};
    const Rows k = {q.first + width, 3 * width, window.token, dim}, v = {k.first + width, 3 * width, window.token, dim};
    const Rows d = {d_output + head * dim, width, window.token, dim};
    pack_columns<STEPS>(s.q_columns, q);
    copy_rows<STEPS>(s.k, k);
    pack_columns<STEPS>(s.d_columns, d);
    copy_rows<STEPS>(s.v, v);
    const __m512 factor = _mm512_set1_ps(LOG2E / sqrtf((float)dim));
    for (int half = 0; half < 2; half++) {
        multiply_columns<STEPS>(s.weights, s.k, s.q_columns, half);
        multiply_columns<STEPS>(s.d_weights, s.v, s.d_columns, half);
        if (half == 0) {
            pack_pairs<STEPS>(s.q_pairs, q);
            pack_pairs<STEPS>(s.k_pairs, k);
            pack_pairs<STEPS>(s.d_pairs, d);
        }
        const int at = half * N * 32;
        if (window.masked) {
            score_gradients<STEPS, true, BIAS>(s, half, bias + at, d_bias + at, log_sums, window, factor);
        } else {
            score_gradients<STEPS, false, BIAS>(s, half, bias + at, d_bias + at, log_sums, window, factor);
        }
    }
    const __mmask32 mask[2] = {q.mask(0), q.mask(1)};
    const __m512 one = _mm512_set1_ps(1.0f), scale = _mm512_set1_ps(1.0f / sqrtf((float)dim));
    for (int block = 0; block < 4; block++) {
        const int rows = 16 * block;
        bf16* to = d_qkv + head * dim;
        multiply<STEPS>(s.product, 32 * STEPS, s.low_weights[0] + 32 * rows, s.low_weights[1] + 32 * rows, s.d_pairs);
        for (int i = 0; i < 16; i++) {
            const int64_t token = window.token[rows + i];
            write_row<STEPS>(to + token * 3 * width + 2 * width, s.product + i * 32 * STEPS, one, mask);
        }
        multiply<STEPS>(s.product, 32 * STEPS, s.d_scores[0] + 32 * rows, s.d_scores[1] + 32 * rows, s.q_pairs);
        for (int i = 0; i < 16; i++) {
            const int64_t token = window.token[rows + i];
            write_row<STEPS>(to + token * 3 * width + width, s.product + i * 32 * STEPS, scale, mask);
        }
        const int half = block / 2, high = block % 2;
        const auto& by_query = s.d_scores_by_query[half][high];
        multiply<STEPS>(s.product, 32 * STEPS, by_query[0], by_query[1], s.k_pairs);
        for (int i = 0; i < 16; i++) {
            const int64_t token = window.token[32 * half + 8 * (i / 4) + 4 * high + i % 4];
            write_row<STEPS>(to + token * 3 * width, s.product + i * 32 * STEPS, scale, mask);
        }
    }
}

// Transposes an fp32 block of 16 × 16.
inline void transpose_block(float* to, int64_t to_stride, __m512i r[16], float factor) {
    transpose16(r);
    for (int i = 0; i < 16; i++) {
        _mm512_storeu_ps(to + i * to_stride, _mm512_mul_ps(_mm512_castsi512_ps(r[i]), _mm512_set1_ps(factor)));
    }
}

template <int STEPS, bool BIAS>
void backward(
    const Shape& shape, const bf16* qkv, const float* bias, const float* log_sums, const bf16* d_output, bf16* d_qkv,
    float* d_bias) {
    const int64_t count = shape.heads * N * N;
    const int max_threads = omp_get_max_threads();
    const auto by_key = scratch<float>(count);  // the bias, and its gradient by thread: [head][half][key][32 queries]
    const auto sums = scratch<float>(BIAS ? max_threads * count : 16);
#pragma omp parallel num_threads(max_threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < shape.heads * 16; i++) {
            const int64_t head = i / 16, queries = i / 4 % 4, keys = i % 4;
            __m512i r[16];
            for (int j = 0; j < 16; j++) {
                r[j] = _mm512_loadu_si512(bias + (head * N + 16 * queries + j) * N + 16 * keys);
            }
            float* to = by_key.get() + head * N * N + queries / 2 * N * 32 + 16 * keys * 32 + queries % 2 * 16;
            transpose_block(to, 32, r, LOG2E);
        }
        const int threads = omp_get_num_threads();
        float* own = sums.get() + (BIAS ? omp_get_thread_num() * count : 0);
        if (BIAS) memset(own, 0, count * sizeof(float));
        {
            const Tiles tiles;
            const FlushToZero flush;
            const auto memory = scratch<BackwardScratch<STEPS>>(1);
            each_head(shape, [&](int64_t index, int64_t head) {
                const Window window(shape, index);
                const int64_t at = head * N * N;
                backward_head<STEPS, BIAS>(
                    memory[0], shape, window, head, qkv, by_key.get() + at, log_sums + (index * shape.heads + head) * N,
                    d_output, d_qkv, BIAS ? own + at : own);
            });
        }
        if (BIAS) {
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t i = 0; i < shape.heads * 16; i++) {
                const int64_t head = i / 16, queries = i / 4 % 4, keys = i % 4;
                const float* from = sums.get() + head * N * N + queries / 2 * N * 32 + 16 * keys * 32 + queries % 2 * 16;
                __m512i r[16];
                for (int j = 0; j < 16; j++) {
                    __m512 sum = _mm512_loadu_ps(from + 32 * j);
                    for (int t = 1; t < threads; t++) sum = _mm512_add_ps(sum, _mm512_loadu_ps(from + t * count + 32 * j));
                    r[j] = _mm512_castps_si512(sum);
                }
                transpose_block(d_bias + (head * N + 16 * queries) * N + 16 * keys, N, r, 1.0f);
            }
        }
    }
}

}  // namespace

// qkv (clips, grid, grid, 3 · heads · dim) bf16, bias (heads, 64, 64) fp32 → output (clips, grid, grid, heads · dim) bf16 and
// log_sums (windows, heads, 64) fp32, the base-2 logarithms of the softmax denominators. dim: a multiple of 8 up to 64; grid: of
// 8; 0 ≤ shift < 8.
extern "C" void clap_window_attention_forward(
    const bf16* qkv, const float* bias, bf16* output, float* log_sums, int64_t clips, int64_t grid, int64_t heads, int64_t dim,
    int64_t shift) {
    const Shape shape = {clips, grid, heads, dim, shift};
    (dim <= 32 ? forward<1> : forward<2>)(shape, qkv, bias, output, log_sums);
}

// As above; d_output like output → d_qkv like qkv, and d_bias (heads, 64, 64) fp32 unless it is null.
extern "C" void clap_window_attention_backward(
    const bf16* qkv, const float* bias, const float* log_sums, const bf16* d_output, bf16* d_qkv, float* d_bias, int64_t clips,
    int64_t grid, int64_t heads, int64_t dim, int64_t shift) {
    const Shape shape = {clips, grid, heads, dim, shift};
    const auto run = dim <= 32 ? (d_bias ? backward<1, true> : backward<1, false>)
                               : (d_bias ? backward<2, true> : backward<2, false>);
    run(shape, qkv, bias, log_sums, d_output, d_qkv, d_bias);
}
