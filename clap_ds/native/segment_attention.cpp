// Softmax attention of segments of rows over other segments of rows, forward and backward.
//
// One (segment, head) at a time. Scores of a few queries with all keys stay in cache, so the softmax is the plain one. Forward
// they are (queries × keys), 16 queries at a time, which leaves the first cache to keys and values. Backward they are
// (keys × queries), which is how dV and dK take them as a left operand, and sums over keys go down the columns. Rows are padded
// with zeros to whole tiles in scratch memory.
#include <cmath>

#include "common.h"

namespace {

constexpr float LOG2_E = 1.44269504088896341f;

int64_t tiles_of(int64_t rows) { return (rows + 15) / 16; }
int64_t blocks_of(int64_t rows) { return (rows + 31) / 32; }

// The first `lanes` of 16, none for a negative number.
__mmask16 first_lanes(int64_t lanes) { return lanes >= 16 ? 0xffff : lanes > 0 ? (1u << lanes) - 1 : 0; }

// Rows of one tensor; `stride` in elements.
struct Rows {
    bf16* at;
    int64_t stride;
    Rows from(int64_t row, int64_t column) const { return {at + row * stride + column, stride}; }
};

template <int D>
void store_zeros(Rows to, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) memset(to.at + row * to.stride, 0, D * sizeof(bf16));
}

// Where the segments lie among the `total` rows of a tensor, one after the other, perhaps with gaps.
struct Places {
    const int32_t *start, *rows;
    int64_t count, total;

    int64_t longest() const { return count ? *std::max_element(rows, rows + count) : 0; }

    // Zeros in the gap behind a segment, and in the one before the first.
    template <int D>
    void clear_gaps(Rows to, int64_t segment) const {
        int64_t end = start[segment] + rows[segment], next = segment + 1 < count ? start[segment + 1] : total;
        store_zeros<D>(to.from(end, 0), next - end);
        if (segment == 0) store_zeros<D>(to, start[0]);
    }
};

// Dropout of one head's weights in one segment. Weights are numbered query by query, `stride` of them each.
struct Dropout {
    uint64_t seed;
    float probability;
    uint32_t stride;

    // What it multiplies the rest by.
    float factor() const { return 1.0f / (1.0f - probability); }

    // 1 for the weights that stay, of these numbers counted from (query, key).
    __mmask16 keeps(int64_t query, int64_t key, __m512i numbers) const {
        const uint32_t first = (uint32_t)query * stride + (uint32_t)key;
        return kept(seed, _mm512_add_epi32(numbers, _mm512_set1_epi32((int)first)), probability);
    }
};

__m512i lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// Products of one tile by many, in strips of up to five: many sums at once hide how long each takes. DOWN: `one` is the right
// operand, else the left.
template <bool DOWN>
void multiply_strips(Operand one, Operand many, int64_t tiles, int64_t steps, float* c, int64_t c_stride) {
    int64_t next = DOWN ? 16 * c_stride : 16, strips = (tiles + 4) / 5;
    for (int64_t strip = 0, tile = 0; strip < strips; strip++) {
        int64_t width = (tiles - tile + strips - strip - 1) / (strips - strip);
        auto multiply = [&](auto constant) {
            constexpr int W = constant;
            if constexpr (DOWN)
                multiply_tiles<W, 1>(many.from(tile), one, steps, c + tile * next, c_stride);
            else
                multiply_tiles<1, W>(one, many.from(tile), steps, c + tile * next, c_stride);
        };
        switch (width) {
            case 1: multiply(std::integral_constant<int, 1>()); break;
            case 2: multiply(std::integral_constant<int, 2>()); break;
            case 3: multiply(std::integral_constant<int, 3>()); break;
            case 4: multiply(std::integral_constant<int, 4>()); break;
            case 5: multiply(std::integral_constant<int, 5>()); break;
        }
        tile += width;
    }
}

// C (16 × 16·b_tiles, fp32, rows `c_stride` apart) = A · B.
void multiply_across(Operand a, Operand b, int64_t b_tiles, int64_t steps, float* c, int64_t c_stride) {
    multiply_strips<false>(a, b, b_tiles, steps, c, c_stride);
}

// C (16·a_tiles × 16, fp32, rows one after the other) = A · B.
void multiply_down(Operand a, int64_t a_tiles, Operand b, int64_t steps, float* c) {
    multiply_strips<true>(b, a, a_tiles, steps, c, 16);
}

// `rows` rows of D one after the other, then zeros up to `padded` rows.
template <int D>
void copy_padded(bf16* to, Rows from, int64_t rows, int64_t padded) {
    for (int64_t row = 0; row < rows; row++) {
        for (int i = 0; i < D; i += 32) {
            _mm512_storeu_si512(to + row * D + i, _mm512_loadu_si512(from.at + row * from.stride + i));
        }
    }
    memset(to + rows * D, 0, (padded - rows) * D * sizeof(bf16));
}

__m512i two_to_bf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// Rows of D fp32 one after the other, times `factors[row]` if there are any, to bf16.
template <int D, bool SCALED>
void store_rows(Rows to, const float* from, const float* factors, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) {
        for (int i = 0; i < D; i += 32) {
            __m512 low = _mm512_loadu_ps(from + row * D + i), high = _mm512_loadu_ps(from + row * D + i + 16);
            if constexpr (SCALED) {
                __m512 factor = _mm512_set1_ps(factors[row]);
                low = _mm512_mul_ps(low, factor);
                high = _mm512_mul_ps(high, factor);
            }
            _mm512_storeu_si512(to.at + row * to.stride + i, two_to_bf16(low, high));
        }
    }
}

// B tiles of the rows of `from` (D wide) as columns, D / 32 tiles for each 16 rows.
template <int D>
Operand pack_columns(bf16* to, const bf16* from, int64_t stride, int64_t tiles) {
    for (int64_t tile = 0; tile < tiles; tile++) {
        for (int i = 0; i < D / 32; i++) {
            pack_transposed(to + (tile * (D / 32) + i) * TILE, from + tile * 16 * stride + i * 32, stride);
        }
    }
    return {to, 32, D / 32 * TILE, TILE};
}

// B tiles of rows (D wide) to sum over, D / 16 tiles for each 32 rows.
template <int D>
Operand pack_summed(bf16* to, const bf16* from, int64_t stride, int64_t rows) {
    for (int64_t block = 0; block < blocks_of(rows); block++) {
        int valid = (int)std::min<int64_t>(32, rows - 32 * block);
        for (int i = 0; i < D / 16; i++) {
            pack_rows(to + (block * (D / 16) + i) * TILE, from + block * 32 * stride + i * 16, stride, valid);
        }
    }
    return {to, 32, TILE, D / 16 * TILE};
}

// ln x for positive, normal x; relative error below 3e-7, absolute near 1.
__m512 log_ps(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 part = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
    __m512 whole = _mm512_getexp_ps(_mm512_div_ps(x, part));
    __m512 t = _mm512_div_ps(_mm512_sub_ps(part, one), _mm512_add_ps(part, one));  // ln part = 2 · artanh t, |t| ≤ 1/5
    __m512 square = _mm512_mul_ps(t, t);
    __m512 y = _mm512_set1_ps(2.0f / 9);
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(2.0f / 7));
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(2.0f / 5));
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(2.0f / 3));
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(2.0f));
    return _mm512_fmadd_ps(whole, _mm512_set1_ps(0.693147180559945309f), _mm512_mul_ps(y, t));
}

// Lane i of the result is all lanes of r[i] taken together.
template <typename Combine>
__m512 across(__m512 r[16], Combine combine) {
    __m512 fours[4];
    for (int i = 0; i < 4; i++) {
        __m512 *q = r + 4 * i;
        __m512 first = combine(_mm512_unpacklo_ps(q[0], q[1]), _mm512_unpackhi_ps(q[0], q[1]));
        __m512 last = combine(_mm512_unpacklo_ps(q[2], q[3]), _mm512_unpackhi_ps(q[2], q[3]));
        __m512d a = _mm512_castps_pd(first), b = _mm512_castps_pd(last);
        fours[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    auto halve = [&](__m512 a, __m512 b) {
        return combine(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return halve(halve(fours[0], fours[1]), halve(fours[2], fours[3]));
}

// Softmax of 16 rows of scores, `stride` apart, without the division: puts bf16 weights where each row of scores began, zeros
// up to a multiple of 32 keys, and gives what to multiply them by. `scale` includes log2 e. Returns ln Σ e^score. DROPS: with
// `dropout` of the weights, where the first row is that of `query`.
template <bool DROPS>
__m512 exponentiate_rows(
    float* scores, float* factors, int64_t stride, int64_t keys, float scale, Dropout dropout, int64_t query) {
    const __m512i numbers = lane_numbers();
    const __m512 lowest = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(scale);
    int64_t last = (keys - 1) / 32 * 32;
    __mmask16 low_mask = first_lanes(keys - last), high_mask = first_lanes(keys - last - 16);
    __m512 r[16];
    for (int row = 0; row < 16; row++) {
        const float* s = scores + row * stride;
        __m512 low = _mm512_mask_loadu_ps(lowest, low_mask, s + last);
        __m512 high = _mm512_mask_loadu_ps(lowest, high_mask, s + last + 16);
        for (int64_t key = 0; key < last; key += 32) {
            low = _mm512_max_ps(low, _mm512_loadu_ps(s + key));
            high = _mm512_max_ps(high, _mm512_loadu_ps(s + key + 16));
        }
        r[row] = _mm512_max_ps(low, high);
    }
    __m512 most = _mm512_mul_ps(across(r, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); }), factor);
    alignas(64) float shifts[16];
    _mm512_store_ps(shifts, most);
    for (int row = 0; row < 16; row++) {
        float* s = scores + row * stride;
        bf16* w = (bf16*)s;  // never ahead of what is read
        __m512 shift = _mm512_set1_ps(shifts[row]);
        __m512 low_sum = _mm512_setzero_ps(), high_sum = low_sum;
        auto store = [&](int64_t key, __m512 low, __m512 high) {
            if constexpr (DROPS) {
                low = _mm512_maskz_mov_ps(dropout.keeps(query + row, key, numbers), low);
                high = _mm512_maskz_mov_ps(dropout.keeps(query + row, key + 16, numbers), high);
            }
            _mm512_storeu_si512(w + key, two_to_bf16(low, high));
        };
        for (int64_t key = 0; key < last; key += 32) {
            __m512 low = exp2_ps(_mm512_fmsub_ps(_mm512_loadu_ps(s + key), factor, shift));
            __m512 high = exp2_ps(_mm512_fmsub_ps(_mm512_loadu_ps(s + key + 16), factor, shift));
            low_sum = _mm512_add_ps(low_sum, low);
            high_sum = _mm512_add_ps(high_sum, high);
            store(key, low, high);
        }
        __m512 low = _mm512_maskz_loadu_ps(low_mask, s + last), high = _mm512_maskz_loadu_ps(high_mask, s + last + 16);
        low = _mm512_maskz_mov_ps(low_mask, exp2_ps(_mm512_fmsub_ps(low, factor, shift)));
        high = _mm512_maskz_mov_ps(high_mask, exp2_ps(_mm512_fmsub_ps(high, factor, shift)));
        store(last, low, high);
        r[row] = _mm512_add_ps(_mm512_add_ps(low_sum, low), _mm512_add_ps(high_sum, high));
    }
    __m512 sums = across(r, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
    _mm512_storeu_ps(factors, _mm512_div_ps(_mm512_set1_ps(DROPS ? dropout.factor() : 1.0f), sums));
    return _mm512_fmadd_ps(most, _mm512_set1_ps(1.0f / LOG2_E), log_ps(sums));
}

template <int D>
class Forward {
  public:
    explicit Forward(int64_t most_keys)
        : keys_(blocks_of(most_keys) * 32),
          key_columns_(scratch<bf16>(keys_ * D)),
          values_(scratch<bf16>(keys_ * D)),
          tail_(scratch<bf16>(16 * D)),
          scores_(scratch<float>(16 * keys_)) {}

    void attend(
        Rows q, int64_t queries, Rows k, Rows v, int64_t keys, float scale, Dropout dropout, Rows out, float* log_sums) {
        if (keys == 0) {
            store_zeros<D>(out, queries);
            std::fill(log_sums, log_sums + queries, 0.0f);
            return;
        }
        int64_t whole = keys / 16, stride = blocks_of(keys) * 32;
        Operand columns = pack_columns<D>(key_columns_.get(), k.at, k.stride, whole);
        if (keys > whole * 16) {
            copy_padded<D>(tail_.get(), k.from(whole * 16, 0), keys - whole * 16, 16);
            pack_columns<D>(key_columns_.get() + whole * columns.tile, tail_.get(), D, 1);
        }
        Operand values = pack_summed<D>(values_.get(), v.at, v.stride, keys);
        for (int64_t start = 0; start < queries; start += 16) {
            int64_t rows = std::min<int64_t>(16, queries - start);
            Rows own = q.from(start, 0);
            Operand block = {own.at, own.stride, 0, 32};
            if (rows < 16) {
                copy_padded<D>(tail_.get(), own, rows, 16);
                block = {tail_.get(), D, 0, 32};
            }
            multiply_across(block, columns, tiles_of(keys), D / 32, scores_.get(), stride);
            alignas(64) float factors[16];
            auto exponentiate = dropout.probability > 0 ? exponentiate_rows<true> : exponentiate_rows<false>;
            __m512 sums = exponentiate(scores_.get(), factors, stride, keys, scale * LOG2_E, dropout, start);
            _mm512_mask_storeu_ps(log_sums + start, first_lanes(rows), sums);
            Operand weights = {(bf16*)scores_.get(), stride * 2, 0, 32};
            multiply_across(weights, values, D / 16, stride / 32, mixed_, D);
            store_rows<D, true>(out.from(start, 0), mixed_, factors, rows);
        }
    }

  private:
    typedef std::unique_ptr<bf16[], Free> Low;
    int64_t keys_;
    Low key_columns_, values_, tail_;
    std::unique_ptr<float[], Free> scores_;
    alignas(64) float mixed_[16 * D];
};

template <int D>
class Backward {
  public:
    Backward(int64_t most_queries, int64_t most_keys)
        : queries_(blocks_of(most_queries) * 32),
          keys_(blocks_of(most_keys) * 32),
          rows_(scratch<bf16>(queries_ * D)),
          key_rows_(scratch<bf16>(keys_ * D)),
          value_rows_(scratch<bf16>(keys_ * D)),
          packed_keys_(scratch<bf16>(keys_ * D)),
          query_columns_(scratch<bf16>(queries_ * D)),
          output_columns_(scratch<bf16>(queries_ * D)),
          packed_queries_(scratch<bf16>(queries_ * D)),
          packed_outputs_(scratch<bf16>(queries_ * D)),
          scores_(scratch<float>(keys_ * 16)),
          slopes_(scratch<float>(keys_ * 16)),
          weights_(scratch<bf16>(keys_ * queries_)),
          d_scores_(scratch<bf16>(keys_ * queries_)),
          d_score_rows_(scratch<bf16>(keys_ * 16)) {}

    struct Gradients {
        Rows d_q, d_k, d_v;
    };

    void attend(
        Rows q, int64_t queries, Rows k, Rows v, int64_t keys, float scale, Dropout dropout, Rows d_out, const float* log_sums,
        Gradients to) {
        if (keys == 0) {
            store_zeros<D>(to.d_q, queries);
            return;
        }
        if (queries == 0) {
            store_zeros<D>(to.d_k, keys);
            store_zeros<D>(to.d_v, keys);
            return;
        }
        int64_t key_tiles = tiles_of(keys), query_tiles = tiles_of(queries), stride = blocks_of(keys) * 32 * 32;
        copy_padded<D>(key_rows_.get(), k, keys, key_tiles * 16);
        copy_padded<D>(value_rows_.get(), v, keys, key_tiles * 16);
        Operand packed_keys = pack_summed<D>(packed_keys_.get(), key_rows_.get(), D, keys);
        copy_padded<D>(rows_.get(), q, queries, query_tiles * 16);
        Operand query_columns = pack_columns<D>(query_columns_.get(), rows_.get(), D, query_tiles);
        Operand packed_queries = pack_summed<D>(packed_queries_.get(), rows_.get(), D, queries);
        copy_padded<D>(rows_.get(), d_out, queries, query_tiles * 16);
        Operand output_columns = pack_columns<D>(output_columns_.get(), rows_.get(), D, query_tiles);
        Operand packed_outputs = pack_summed<D>(packed_outputs_.get(), rows_.get(), D, queries);
        Operand key_rows = {key_rows_.get(), D, 16 * D, 32}, value_rows = {value_rows_.get(), D, 16 * D, 32};
        for (int64_t tile = 0; tile < query_tiles; tile++) {
            int64_t start = tile * 16, rows = std::min<int64_t>(16, queries - start);
            multiply_down(key_rows, key_tiles, query_columns.from(tile), D / 32, scores_.get());
            multiply_down(value_rows, key_tiles, output_columns.from(tile), D / 32, slopes_.get());
            bf16 *weights = weights_.get() + tile / 2 * stride, *d_scores = d_scores_.get() + tile / 2 * stride;
            if (dropout.probability > 0) {
                differentiate_softmax<true>(weights, d_scores, start, log_sums + start, rows, keys, scale, dropout);
            } else {
                differentiate_softmax<false>(weights, d_scores, start, log_sums + start, rows, keys, scale, dropout);
            }
        }
        // Apart from the loop above, which would no longer fit the first cache.
        for (int64_t tile = 0; tile < query_tiles; tile++) {
            int64_t start = tile * 16, rows = std::min<int64_t>(16, queries - start), half = tile % 2;
            const bf16* d_scores = d_scores_.get() + tile / 2 * stride;
            for (int64_t step = 0; step < blocks_of(keys); step++) {
                int valid = (int)std::min<int64_t>(32, keys - 32 * step);
                pack_rows_as_a(d_score_rows_.get() + step * TILE, d_scores + step * 32 * 32 + 16 * half, 32, valid);
            }
            multiply_across({d_score_rows_.get(), 32, 0, TILE}, packed_keys, D / 16, blocks_of(keys), mixed_, D);
            store_rows<D, false>(to.d_q.from(start, 0), mixed_, nullptr, rows);
        }
        Operand weights = {weights_.get(), 32, TILE, stride}, d_scores = {d_scores_.get(), 32, TILE, stride};
        for (int64_t tile = 0; tile < key_tiles; tile++) {
            int64_t start = tile * 16, rows = std::min<int64_t>(16, keys - start), steps = blocks_of(queries);
            multiply_across(weights.from(tile), packed_outputs, D / 16, steps, mixed_, D);
            store_rows<D, false>(to.d_v.from(start, 0), mixed_, nullptr, rows);
            multiply_across(d_scores.from(tile), packed_queries, D / 16, steps, mixed_, D);
            store_rows<D, false>(to.d_k.from(start, 0), mixed_, nullptr, rows);
        }
    }

  private:
    typedef std::unique_ptr<bf16[], Free> Low;
    typedef std::unique_ptr<float[], Free> Full;

    // One half of weights and d_scores, bf16 (keys × 32 queries), from scores and slopes (keys × 16 queries, from `query` on).
    // The first half leaves zeros in the second.
    template <bool DROPS>
    void differentiate_softmax(
        bf16* weights, bf16* d_scores, int64_t query, const float* log_sums, int64_t rows, int64_t keys, float scale,
        Dropout dropout) {
        const bool half = query / 16 % 2;
        const __m512i numbers = _mm512_mullo_epi32(lane_numbers(), _mm512_set1_epi32((int)dropout.stride));
        const __m512 kept_factor = _mm512_set1_ps(dropout.factor());
        const __m512 zero = _mm512_setzero_ps(), factor = _mm512_set1_ps(scale * LOG2_E), scales = _mm512_set1_ps(scale);
        __m512 own = _mm512_maskz_loadu_ps(first_lanes(rows), log_sums);
        __m512 shift = _mm512_mul_ps(own, _mm512_set1_ps(LOG2_E)), sum = zero;
        auto store = [half](bf16* row, __m512 x) {
            if (half) {
                store_bf16(row + 16, x);
            } else {
                _mm512_store_si512(row, _mm512_zextsi256_si512(to_bf16(x)));
            }
        };
        for (int64_t key = 0; key < keys; key++) {
            __m512 p = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(scores_.get() + key * 16), factor, shift));
            __m512 slope = _mm512_load_ps(slopes_.get() + key * 16);
            _mm512_store_ps(scores_.get() + key * 16, p);
            if constexpr (DROPS) {
                __mmask16 stay = dropout.keeps(query, key, numbers);
                slope = _mm512_maskz_mul_ps(stay, slope, kept_factor);
                _mm512_store_ps(slopes_.get() + key * 16, slope);
                store(weights + key * 32, _mm512_maskz_mul_ps(stay, p, kept_factor));
            } else {
                store(weights + key * 32, p);
            }
            sum = _mm512_fmadd_ps(p, slope, sum);
        }
        for (int64_t key = 0; key < keys; key++) {
            __m512 p = _mm512_mul_ps(_mm512_load_ps(scores_.get() + key * 16), scales);
            store(d_scores + key * 32, _mm512_mul_ps(p, _mm512_sub_ps(_mm512_load_ps(slopes_.get() + key * 16), sum)));
        }
    }

    int64_t queries_, keys_;
    Low rows_, key_rows_, value_rows_, packed_keys_, query_columns_, output_columns_, packed_queries_, packed_outputs_;
    Full scores_, slopes_;
    Low weights_, d_scores_, d_score_rows_;
    alignas(64) float mixed_[16 * D];
};

// Calls `function(state, segment, head)` for all, in several threads, each with a `prepare()` of its own.
template <typename Prepare, typename Function>
void for_each_head(int64_t segments, int64_t heads, Prepare prepare, Function function) {
#pragma omp parallel
    {
        Tiles tiles;
        auto state = prepare();
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < segments * heads; i++) function(state, i / heads, i % heads);
    }
}

// For weights of so many keys; `index` is of all heads of all segments.
Dropout dropout_of(uint64_t seed, float probability, int64_t index, int64_t keys) {
    return {seed + 0x9e3779b97f4a7c15 * (uint64_t)index, probability, (uint32_t)(blocks_of(keys) * 32)};
}

// Calls `function` with the head dim as a constant.
template <typename Function>
void with_head_dim(int64_t head_dim, Function function) {
    switch (head_dim) {
        case 32: return function(std::integral_constant<int, 32>());
        case 64: return function(std::integral_constant<int, 64>());
        case 96: return function(std::integral_constant<int, 96>());
        case 128: return function(std::integral_constant<int, 128>());
    }
}

}  // namespace

// Segment s: queries query_start[s] and on, query_rows[s] of `q_rows`; keys and values likewise. Segments follow one another in
// both, without overlap; rows between them get zeros. Strides are in elements. `log_sums` is (heads, q_rows). Weights become 0
// with probability `dropout`, others are divided by 1 − `dropout`; which, depends on seed, segment, head, query and key alone.
extern "C" void clap_segment_attention_forward(
    bf16* q, int64_t q_stride, bf16* k, int64_t k_stride, bf16* v, int64_t v_stride, bf16* out, int64_t out_stride,
    float* log_sums, const int32_t* query_start, const int32_t* query_rows, const int32_t* key_start, const int32_t* key_rows,
    int64_t count, int64_t q_rows, int64_t k_rows, int64_t heads, int64_t head_dim, float scale, float dropout,
    int64_t seed) {
    Places queries = {query_start, query_rows, count, q_rows}, keys = {key_start, key_rows, count, k_rows};
    with_head_dim(head_dim, [&](auto constant) {
        constexpr int D = decltype(constant)::value;
        int64_t most_keys = keys.longest();
        auto prepare = [&] { return Forward<D>(most_keys); };
        for_each_head(count, heads, prepare, [&](Forward<D>& state, int64_t segment, int64_t head) {
            int64_t query = query_start[segment], key = key_start[segment], column = head * D;
            Dropout own = dropout_of(seed, dropout, segment * heads + head, key_rows[segment]);
            Rows to = {out, out_stride};
            queries.clear_gaps<D>(to.from(0, column), segment);
            state.attend(
                Rows{q, q_stride}.from(query, column), query_rows[segment], Rows{k, k_stride}.from(key, column),
                Rows{v, v_stride}.from(key, column), key_rows[segment], scale, own, to.from(query, column),
                log_sums + head * q_rows + query);
        });
    });
}

// As forward, which left `log_sums` and had the same `seed`.
extern "C" void clap_segment_attention_backward(
    bf16* q, int64_t q_stride, bf16* k, int64_t k_stride, bf16* v, int64_t v_stride, bf16* d_out, int64_t d_out_stride,
    bf16* d_q, int64_t d_q_stride, bf16* d_k, int64_t d_k_stride, bf16* d_v, int64_t d_v_stride, const float* log_sums,
    const int32_t* query_start, const int32_t* query_rows, const int32_t* key_start, const int32_t* key_rows, int64_t count,
    int64_t q_rows, int64_t k_rows, int64_t heads, int64_t head_dim, float scale, float dropout,
    int64_t seed) {
    Places queries = {query_start, query_rows, count, q_rows}, keys = {key_start, key_rows, count, k_rows};
    with_head_dim(head_dim, [&](auto constant) {
        constexpr int D = decltype(constant)::value;
        int64_t most_queries = queries.longest(), most_keys = keys.longest();
        auto prepare = [&] { return Backward<D>(most_queries, most_keys); };
        for_each_head(count, heads, prepare, [&](Backward<D>& state, int64_t segment, int64_t head) {
            int64_t query = query_start[segment], key = key_start[segment], column = head * D;
            Dropout own = dropout_of(seed, dropout, segment * heads + head, key_rows[segment]);
            Rows to_q = {d_q, d_q_stride}, to_k = {d_k, d_k_stride}, to_v = {d_v, d_v_stride};
            queries.clear_gaps<D>(to_q.from(0, column), segment);
            keys.clear_gaps<D>(to_k.from(0, column), segment);
            keys.clear_gaps<D>(to_v.from(0, column), segment);
            state.attend(
                Rows{q, q_stride}.from(query, column), query_rows[segment], Rows{k, k_stride}.from(key, column),
                Rows{v, v_stride}.from(key, column), key_rows[segment], scale, own,
                Rows{d_out, d_out_stride}.from(query, column), log_sums + head * q_rows + query,
                {to_q.from(query, column), to_k.from(key, column), to_v.from(key, column)});
        });
    });
}
