// Attention inside 8 × 8 windows of a square token grid, from and to the grid: partition, cyclic shift and reverse are where
// rows are read and written. Heads are at most 64 wide; scores are in base 2 (times log2 e), so that weights are 2^score.
//
// Rows of a head become B tiles of pairs by unpacking halves of 128-bit lanes, which leaves the columns of each 32 in the order
// 0-3, 8-11, 16-19, 24-27 (tile "low") and 4-7, 12-15, 20-23, 28-31 ("high"). What comes out of a product is put right in
// `write_rows`.

#include "common.h"

#include <cmath>
#include <utility>

namespace {

constexpr int N = 64;                        // tokens of a window
constexpr int SIDE = 8;                      // of a window
constexpr float LOG2E = 1.44269504088896341f;
constexpr float MASKED = -100.0f * LOG2E;    // MASKED_SCORE of window_attention.py
constexpr int64_t GROUP_BYTES = 256 * 1024;  // of qkv that stay in the L2 cache while heads take turns over them

// 2^x, relative error below 1e-4, a fortieth of what rounding to bf16 adds; 0 for very negative x.
inline __m512 exp2_ps(__m512 x) {
    const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    __m512 y = _mm512_set1_ps(0.0780245f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.22606721f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.69583351f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.99992522f));
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

// A window's place in its clip's grid.
struct Place {
    int64_t clip, down, across, grid, shift;

    Place(const Shape& shape, int64_t index) : grid(shape.grid), shift(shape.shift) {
        const int64_t per_side = shape.per_side(), rows = index / per_side;
        across = index - rows * per_side;
        clip = rows / per_side;
        down = rows - clip * per_side;
    }
    // Row of the (clips · grid², …) matrix that holds a token.
    int64_t token(int t) const {
        int64_t row = down * SIDE + t / SIDE + shift, column = across * SIDE + t % SIDE + shift;
        row -= row >= grid ? grid : 0;
        column -= column >= grid ? grid : 0;
        return (clip * grid + row) * grid + column;
    }
};

// Where a window's tokens are, and which of them attend to one another.
struct Window {
    int64_t token[N];
    uint64_t apart[N];  // bit k: token k is in another region; set where `masked`
    bool masked;

    void set(const Shape& shape, int64_t index) {
        const Place place(shape, index);
        const int64_t last = shape.per_side() - 1;
        for (int t = 0; t < N; t++) token[t] = place.token(t);
        const bool last_down = place.down == last, last_across = place.across == last;
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

// Which of the columns 32 · step and on a head has.
inline __mmask32 columns_mask(int64_t dim, int step) {
    const int64_t left = dim - 32 * step;
    return left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1;
}

// One head's part of the rows of a window's tokens.
struct Rows {
    const bf16* first;
    int64_t stride;
    const int64_t* token;
    int64_t dim;

    // Columns 32 · step and on; `beyond` where the head has no more.
    __m512i load(int t, int step, __m512i beyond = _mm512_setzero_si512()) const {
        return _mm512_mask_loadu_epi16(beyond, columns_mask(dim, step), first + token[t] * stride + 32 * step);
    }
};

// Two tokens' rows for both B tiles of pairs.
inline void store_pair(bf16* low, __m512i even, __m512i odd) {
    _mm512_store_si512(low, _mm512_unpacklo_epi16(even, odd));
    _mm512_store_si512(low + TILE, _mm512_unpackhi_epi16(even, odd));
}

// To any of: A tiles, row-major, [step][token / 16]; B tiles of the transpose, the same; B tiles of pairs of tokens,
// [token / 32][step][low, high], PAIR_TILES for each 32 tokens. With `ones`, the column after the last is all 1.
template <int STEPS, int PAIR_TILES = 2 * STEPS>
inline void pack(const Rows& rows, bf16* straight, bf16* columns, bf16* pairs, bool ones = false) {
    for (int step = 0; step < STEPS; step++) {
        __m512i beyond = _mm512_setzero_si512();
        if (ones && rows.dim / 32 == step) beyond = _mm512_maskz_set1_epi16(1u << (rows.dim % 32), 0x3f80);
        for (int block = 0; block < N / 16; block++) {
            const int tile = (step * 4 + block) * TILE;
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = rows.load(16 * block + i, step, beyond);
            if (straight) {
                for (int i = 0; i < 16; i++) _mm512_store_si512(straight + tile + 32 * i, r[i]);
            }
            if (pairs) {
                bf16* low = pairs + (block / 2 * PAIR_TILES + 2 * step) * TILE + block % 2 * TILE / 2;
                for (int i = 0; i < 8; i++) store_pair(low + 32 * i, r[2 * i], r[2 * i + 1]);
            }
            if (columns) {
                transpose16(r);
                for (int i = 0; i < 16; i++) _mm512_store_si512(columns + tile + 32 * i, r[i]);
            }
        }
    }
}

// C (16 × 32·STEPS, fp32) = A · B over 64 pairs' rows: A in two tiles, B pairs as `pack` leaves them.
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

// A thread's share of windows' heads: windows in groups, each group's windows head by head.
struct Share {
    const Shape& shape;
    int64_t first, end;

    explicit Share(const Shape& shape) : shape(shape), windows(shape.windows()), heads(shape.heads) {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        first = windows * heads * thread / threads;
        end = windows * heads * (thread + 1) / threads;
        group = std::max<int64_t>(1, GROUP_BYTES / (N * 3 * shape.width() * (int64_t)sizeof(bf16)));
    }
    // Window and head.
    std::pair<int64_t, int64_t> at(int64_t i) const {
        const int64_t start = i / (group * heads) * group;
        const int64_t size = std::min(group, windows - start), rest = i - start * heads;
        return {start + rest % size, rest / size};
    }
    // Calls fetch(row of the matrix) for this head's share, or one part of it, of a window's tokens of the next group.
    template <class Fetch>
    void ahead(int64_t window, int64_t head, int part, int parts, Fetch fetch) const {
        if (window + group >= windows) return;
        const Place place(shape, window + group);
        const int64_t own = head * parts + part, all = heads * parts;
        for (int64_t t = N * own / all; t < N * (own + 1) / all; t++) fetch(place.token(t));
    }

  private:
    int64_t windows, heads, group;
};

// Brings `count` elements to the L2 cache.
inline void prefetch(const bf16* from, int64_t count) {
    for (const char *p = (const char*)from, *end = (const char*)(from + count); p < end; p += 64) {
        _mm_prefetch(p, _MM_HINT_T1);
    }
}

// A head of a window on its way through the forward pass.
template <int STEPS>
struct alignas(64) ForwardHead {
    static constexpr int V_TILES = 2 * STEPS + 1;  // for each 32 tokens; the last: ones
    bf16 q[STEPS * 4 * TILE], k[STEPS * 4 * TILE], v[2 * V_TILES * TILE];
    Window window;
    int64_t index, head;
    const float* bias;
    bf16* output;
    float* log_sums;
};

// What 16 queries' products leave for the vector unit and the other way round: two blocks in turn, and one to do over.
template <int STEPS>
struct alignas(64) ForwardScratch {
    static constexpr int WIDTH = 32 * STEPS + 16;  // the last 16: sums of weights, where v leaves no column free
    ForwardHead<STEPS> heads[2];
    bf16 weights[3][2 * TILE];
    float scores[3][16 * N], mixed[2][16 * WIDTH], largest[16];
};

template <int STEPS>
inline void score(float* scores, const ForwardHead<STEPS>& head, int block) {
    multiply_tiles<1, 4>({head.q + block * TILE, 32, 0, 4 * TILE}, {head.k, 32, TILE, 4 * TILE}, STEPS, scores, N);
}

// Weights not divided by their sums. SAFE: each row's largest score is subtracted first.
template <bool SAFE, bool MASKS>
inline void weigh_rows(
    bf16* weights, const float* scores, const float* bias, const uint64_t* apart, __m512 factor, float* all_largest) {
    for (int i = 0; i < 16; i++) {
        __m512 x[4];
        for (int j = 0; j < 4; j++) {
            const int at = i * N + 16 * j;
            x[j] = _mm512_fmadd_ps(_mm512_load_ps(scores + at), factor, _mm512_load_ps(bias + at));
            if (MASKS) x[j] = _mm512_mask_add_ps(x[j], apart[i] >> (16 * j), x[j], _mm512_set1_ps(MASKED));
        }
        if (SAFE) {
            const float largest =
                _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
            all_largest[i] = largest;
            for (int j = 0; j < 4; j++) x[j] = _mm512_sub_ps(x[j], _mm512_set1_ps(largest));
        }
        for (int j = 0; j < 4; j++) x[j] = exp2_ps(x[j]);
        _mm512_store_si512(weights + 32 * i, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
        _mm512_store_si512(weights + TILE + 32 * i, (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
    }
}

template <int STEPS, bool SAFE>
inline void weigh(ForwardScratch<STEPS>& s, int slot, const ForwardHead<STEPS>& head, int block, __m512 factor) {
    const auto run = head.window.masked ? weigh_rows<SAFE, true> : weigh_rows<SAFE, false>;
    run(s.weights[slot], s.scores[slot], head.bias + 16 * block * N, head.window.apart + 16 * block, factor, s.largest);
}

template <int STEPS>
struct Forward {
    static constexpr int WIDTH = ForwardScratch<STEPS>::WIDTH;
    static constexpr int SPARE = 2, V_TILES = ForwardHead<STEPS>::V_TILES;
    const Shape& shape;
    const bf16* qkv;
    const float* bias;
    bf16* output;
    float* log_sums;
    ForwardScratch<STEPS>& s;
    const int64_t width = shape.width(), dim = shape.dim;
    const bool spare_column = dim < 32 * STEPS;
    const __m512 factor = _mm512_set1_ps(LOG2E / sqrtf((float)dim));

    void start(ForwardHead<STEPS>& to, int64_t index, int64_t head) {
        to.window.set(shape, index);
        to.index = index;
        to.head = head;
        to.bias = bias + head * N * N;
        to.output = output + head * dim;
        to.log_sums = log_sums + (index * shape.heads + head) * N;
        const Rows q = {qkv + head * dim, 3 * width, to.window.token, dim};
        const Rows k = {q.first + width, 3 * width, q.token, dim}, v = {k.first + width, 3 * width, q.token, dim};
        pack<STEPS>(q, to.q, nullptr, nullptr);
        pack<STEPS>(k, nullptr, to.k, nullptr);
        pack<STEPS, V_TILES>(v, nullptr, nullptr, to.v, spare_column);
    }

    void mix(float* mixed, const bf16* weights, const ForwardHead<STEPS>& head) {
        const Operand a = {weights, 32, 0, TILE}, b = {head.v, 32, TILE, V_TILES * TILE};
        if (spare_column)
            multiply_tiles<1, 2 * STEPS>(a, b, 2, mixed, WIDTH);
        else
            multiply_tiles<1, V_TILES>(a, b, 2, mixed, WIDTH);
    }

    __m512 weight_sums(const float* mixed) {
        const __m512i rows = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const int column = spare_column ? dim / 32 * 32 + dim % 32 / 2 : 32 * STEPS;
        return _mm512_i32gather_ps(_mm512_mullo_epi32(rows, _mm512_set1_epi32(WIDTH)), mixed + column, 4);
    }

    void finish(float* mixed, const ForwardHead<STEPS>& head, int block) {
        __m512 sums = weight_sums(mixed);
        __m512 shift = _mm512_setzero_ps();
        const __mmask16 good = _mm512_cmp_ps_mask(sums, _mm512_set1_ps(0x1p-64f), _CMP_GT_OQ) &
                               _mm512_cmp_ps_mask(sums, _mm512_set1_ps(0x1p64f), _CMP_LT_OQ);
        if (good != 0xffff) {  // powers too large or too small without subtracting the largest score
            score<STEPS>(s.scores[SPARE], head, block);
            weigh<STEPS, true>(s, SPARE, head, block, factor);
            mix(mixed, s.weights[SPARE], head);
            sums = weight_sums(mixed);
            shift = _mm512_load_ps(s.largest);
        }
        _mm512_storeu_ps(head.log_sums + 16 * block, _mm512_add_ps(log2_ps(sums), shift));
        alignas(64) float inverse[16];
        _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1.0f), sums));
        const __mmask32 mask[2] = {columns_mask(dim, 0), columns_mask(dim, 1)};
        for (int i = 0; i < 16; i++) {
            bf16* to = head.output + head.window.token[16 * block + i] * width;
            write_row<STEPS>(to, mixed + i * WIDTH, _mm512_set1_ps(inverse[i]), mask);
        }
    }

    // The matrix unit's stores take long to reach the vector unit and back, so each block of 16 queries is at four places on
    // its way: its scores are one block ahead of its weights, its products one behind, and its output two behind.
    void run(const Share& share) {
        for (auto& head : s.heads) {
            for (int tile = 2 * STEPS; tile < 2 * V_TILES; tile += V_TILES) std::fill_n(head.v + tile * TILE, TILE, 0x3f80);
        }
        const int64_t first = 4 * share.first, end = 4 * share.end;
        if (first == end) return;
        const auto head_of = [&](int64_t n) -> ForwardHead<STEPS>& { return s.heads[n / 4 % 2]; };
        const auto start_of = [&](int64_t n) {
            const auto [index, head] = share.at(n / 4);
            start(head_of(n), index, head);
        };
        start_of(first);
        score<STEPS>(s.scores[first % 2], head_of(first), 0);
        for (int64_t n = first; n < end + 2; n++) {
            if (n % 4 == 2 && n + 2 < end) start_of(n + 2);
            if (n + 1 < end) score<STEPS>(s.scores[(n + 1) % 2], head_of(n + 1), (n + 1) % 4);
            if (n < end) {
                weigh<STEPS, false>(s, n % 2, head_of(n), n % 4, factor);
                share.ahead(head_of(n).index, head_of(n).head, n % 4, 4, [&](int64_t token) {
                    prefetch(qkv + token * 3 * width, 3 * width);
                });
            }
            if (n > first && n - 1 < end) mix(s.mixed[(n - 1) % 2], s.weights[(n - 1) % 2], head_of(n - 1));
            if (n > first + 1) finish(s.mixed[n % 2], head_of(n - 2), (n - 2) % 4);
        }
    }
};

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
        Forward<STEPS>{shape, qkv, scaled.get(), output, log_sums, memory[0]}.run(Share(shape));
    }
}

// The backward pass has keys as rows and queries as columns, 32 of them at a time ("half"), so that the sums over keys are
// sums of vectors and weights and their gradients are A tiles of the gradients of v and k as they are.
template <int STEPS>
struct alignas(64) BackwardScratch {
    bf16 k[STEPS * 4 * TILE], v[STEPS * 4 * TILE];                  // A tiles
    bf16 q_columns[STEPS * 4 * TILE], d_columns[STEPS * 4 * TILE];  // B tiles of the transposes; d: the output's gradient
    bf16 q_pairs[STEPS * 4 * TILE], k_pairs[STEPS * 4 * TILE], d_pairs[STEPS * 4 * TILE];
    union {  // one after the other, to keep more of the L1 cache
        float scores[2][N * 32];  // a half's scores, then weights; gradients of weights
        float products[3][16 * 32 * STEPS];
    };
    bf16 low_weights[2][N * 32], d_scores[2][N * 32];
    bf16 d_scores_by_query[2][2][2][TILE];  // half, low or high queries, keys / 32
};

// C (64 × 32) = A · B^T for the queries of a half.
template <int STEPS>
inline void multiply_columns(float* c, const bf16* a, const bf16* columns, int half) {
    const Operand right = {columns + 2 * half * TILE, 32, TILE, 4 * TILE};
    for (int block = 0; block < 4; block += 2)
        multiply_tiles<2, 2>({a + block * TILE, 32, TILE, 4 * TILE}, right, STEPS, c + block * 16 * 32, 32);
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
            __m512 x = _mm512_fmadd_ps(_mm512_load_ps(s.scores[0] + at), factor, _mm512_load_ps(bias + at));
            if (MASKS) x = _mm512_mask_add_ps(x, window.apart[t] >> (32 * half + 16 * j), x, _mm512_set1_ps(MASKED));
            p[j] = exp2_ps(_mm512_sub_ps(x, log_sum[j]));
            delta[j] = _mm512_fmadd_ps(p[j], _mm512_load_ps(s.scores[1] + at), delta[j]);
            _mm512_store_ps(s.scores[0] + at, p[j]);
        }
        _mm512_store_si512(s.low_weights[half] + 32 * t, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
    }
    for (int t = 0; t < N; t++) {
        __m512 ds[2];
        for (int j = 0; j < 2; j++) {
            const int at = 32 * t + 16 * j;
            ds[j] = _mm512_mul_ps(
                _mm512_load_ps(s.scores[0] + at), _mm512_sub_ps(_mm512_load_ps(s.scores[1] + at), delta[j]));
            if (BIAS) _mm512_store_ps(d_bias + at, _mm512_add_ps(_mm512_load_ps(d_bias + at), ds[j]));
        }
        _mm512_store_si512(s.d_scores[half] + 32 * t, (__m512i)_mm512_cvtne2ps_pbh(ds[1], ds[0]));
    }
    for (int high = 0; high < 2; high++) {
        for (int pair = 0; pair < 2; pair++) {
            const bf16* from = s.d_scores[half] + 32 * 32 * pair;
            __m512i r[16];
            for (int i = 0; i < 16; i++) {
                const __m512i even = _mm512_load_si512(from + 64 * i), odd = _mm512_load_si512(from + 64 * i + 32);
                r[i] = high ? _mm512_unpackhi_epi16(even, odd) : _mm512_unpacklo_epi16(even, odd);
            }
            transpose16(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(s.d_scores_by_query[half][high][pair] + 32 * i, r[i]);
        }
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
    pack<STEPS>(q, nullptr, s.q_columns, s.q_pairs);
    pack<STEPS>(k, s.k, nullptr, s.k_pairs);
    pack<STEPS>(d, nullptr, s.d_columns, s.d_pairs);
    pack<STEPS>(v, s.v, nullptr, nullptr);
    const __m512 factor = _mm512_set1_ps(LOG2E / sqrtf((float)dim));
    for (int half = 0; half < 2; half++) {
        multiply_columns<STEPS>(s.scores[0], s.k, s.q_columns, half);
        multiply_columns<STEPS>(s.scores[1], s.v, s.d_columns, half);
        const int at = half * N * 32;
        if (window.masked) {
            score_gradients<STEPS, true, BIAS>(s, half, bias + at, d_bias + at, log_sums, window, factor);
        } else {
            score_gradients<STEPS, false, BIAS>(s, half, bias + at, d_bias + at, log_sums, window, factor);
        }
    }
    const __mmask32 mask[2] = {columns_mask(dim, 0), columns_mask(dim, 1)};
    const __m512 one = _mm512_set1_ps(1.0f), scale = _mm512_set1_ps(1.0f / sqrtf((float)dim));
    // Gradients of v, k and q, each in four blocks; written two blocks after the matrix unit has started on them.
    for (int i = 0; i < 14; i++) {
        if (i < 12) {
            float* product = s.products[i % 3];
            const int block = i % 4, rows = 16 * 32 * block;
            const auto& by_query = s.d_scores_by_query[block / 2][block % 2];
            const auto multiply = [&](Operand a, const bf16* pairs) {
                multiply_tiles<1, 2 * STEPS>(a, {pairs, 32, TILE, 2 * STEPS * TILE}, 2, product, 32 * STEPS);
            };
            if (i < 4) {
                multiply({s.low_weights[0] + rows, 32, 0, N * 32}, s.d_pairs);
            } else if (i < 8) {
                multiply({s.d_scores[0] + rows, 32, 0, N * 32}, s.q_pairs);
            } else {
                multiply({by_query[0], 32, 0, TILE}, s.k_pairs);
            }
        }
        if (i < 2) continue;
        const int done = i - 2, block = done % 4, part = 2 - done / 4;
        bf16* to = d_qkv + head * dim + part * width;
        for (int row = 0; row < 16; row++) {
            const int by_query = 32 * (block / 2) + 8 * (row / 4) + 4 * (block % 2) + row % 4;
            const int64_t token = window.token[part == 0 ? by_query : 16 * block + row];
            write_row<STEPS>(to + token * 3 * width, s.products[done % 3] + row * 32 * STEPS, part == 2 ? one : scale, mask);
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
            const Share share(shape);
            for (int64_t i = share.first; i < share.end; i++) {
                const auto [index, head] = share.at(i);
                Window window;
                window.set(shape, index);
                const int64_t at = head * N * N;
                backward_head<STEPS, BIAS>(
                    memory[0], shape, window, head, qkv, by_key.get() + at, log_sums + (index * shape.heads + head) * N,
                    d_output, d_qkv, BIAS ? own + at : own);
                share.ahead(index, head, 0, 1, [&](int64_t token) {
                    prefetch(qkv + token * 3 * shape.width(), 3 * shape.width());
                    prefetch(d_output + token * shape.width(), shape.width());
                });
            }
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
// log_sums (windows, heads, 64) fp32, the base-2 logarithms of the softmax denominators. dim: a multiple of 8 up to 64; grid:
// of 8; 0 ≤ shift < 8.
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
