// Softmax attention of segments of rows over other segments of rows, forward. One (segment, head) at a time. Scores of a few
// queries with all keys fit in cache, so the softmax is a plain one. They are (queries × keys), 16 queries at a time, which
// leaves the L1 cache to keys and values.

#include <cmath>

#include "segments.h"

namespace {

// Softmax of 16 rows of scores, `stride` apart, without the division: overwrites each row's start with bf16 weights, padded by
// zeros to a multiple of 32 keys, and outputs their factors. `scale` includes log2 e. Returns ln Σ e^score. DROPS: applies
// `dropout`; the first row is that of `query`.
template <bool DROPS>
__m512 exponentiate_rows(
    float* scores, float* factors, int64_t stride, int64_t keys, float scale, Dropout dropout, int64_t query) {
    const int64_t last = (keys - 1) / 16 * 16, end = blocks_of(keys) * 32;
    const __m512 lowest = splat(-INFINITY), factor = splat(scale);
    __m512 r[16];
    for (int row = 0; row < 16; row++) {
        float* s = scores + row * stride;
        store(s + last, _mm512_mask_mov_ps(lowest, first_lanes(keys - last), load(s + last)));
        if (last + 16 < end) store(s + last + 16, lowest);
        __m512 low = load(s), high = load(s + 16);
        for (int64_t key = 32; key < end; key += 32) {
            low = _mm512_max_ps(low, load(s + key));
            high = _mm512_max_ps(high, load(s + key + 16));
        }
        r[row] = _mm512_max_ps(low, high);
    }
    const __m512 most = across(r, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); }) * factor;
    alignas(64) float shifts[16];
    store(shifts, most);
    for (int row = 0; row < 16; row++) {
        float* s = scores + row * stride;
        const __m512 shift = splat(shifts[row]);
        __m512 low_sum = splat(0), high_sum = splat(0);
        for (int64_t key = 0; key < end; key += 32) {
            __m512 low = exp2_ps(_mm512_fmsub_ps(load(s + key), factor, shift));
            __m512 high = exp2_ps(_mm512_fmsub_ps(load(s + key + 16), factor, shift));
            low_sum = low_sum + low;
            high_sum = high_sum + high;
            if constexpr (DROPS) {
                low = _mm512_maskz_mov_ps(dropout.keeps(query + row, key, lane_numbers()), low);
                high = _mm512_maskz_mov_ps(dropout.keeps(query + row, key + 16, lane_numbers()), high);
            }
            store((bf16*)s + key, low, high);  // never ahead of the reads
        }
        r[row] = low_sum + high_sum;
    }
    const __m512 sums = across(r, [](__m512 a, __m512 b) { return a + b; });
    store(factors, splat(DROPS ? dropout.factor() : 1.0f) / sums);
    return (most + log2_ps(sums)) * splat(1.0f / LOG2E);
}

template <int D>
struct Forward {
    Forward(int64_t, int64_t most_keys) : most_keys_(blocks_of(most_keys) * 32) {}

    void attend(const SegmentHead& head, const Matrix* at, float* log_sums) {
        const Matrix q = head.of_queries(at[0]), k = head.of_keys(at[1]), v = head.of_keys(at[2]);
        const Matrix out = head.of_queries(at[3], true);
        const int64_t queries = head.queries, keys = head.keys;
        log_sums += head.place();
        if (keys == 0) {
            out.clear(queries, D);
            std::fill(log_sums, log_sums + queries, 0.0f);
            return;
        }
        const int64_t stride = blocks_of(keys) * 32;
        const Operand columns = pack_columns<D>(key_columns_.get(), k, keys);
        const Operand values = pack_summed<D>(values_.get(), v, keys);
        const Operand weights = {(bf16*)scores_.get(), stride * 2, 0, 32};
        const auto exponentiate = head.dropout.probability > 0 ? exponentiate_rows<true> : exponentiate_rows<false>;
        for (int64_t start = 0; start < queries; start += 16) {
            const int64_t rows = std::min<int64_t>(16, queries - start);
            const Matrix own = q.from(start, 0);
            const Operand block = rows < 16 ? copy_padded<D>(tail_, own, rows) : Operand{own.at, own.stride, 0, 32};
            multiply<false>(block, columns, tiles_of(keys), D / 32, scores_.get(), stride);
            alignas(64) float factors[16];
            const __m512 sums = exponentiate(scores_.get(), factors, stride, keys, head.scale * LOG2E, head.dropout, start);
            _mm512_mask_storeu_ps(log_sums + start, first_lanes(rows), sums);
            multiply<false>(weights, values, D / 16, stride / 32, mixed_, D);
            store_rows<D>(out.from(start, 0), mixed_, rows, factors);
        }
    }

    const int64_t most_keys_;
    Scratch<bf16> key_columns_ = scratch<bf16>(most_keys_ * D), values_ = scratch<bf16>(most_keys_ * D);
    Scratch<float> scores_ = scratch<float>(16 * most_keys_);
    alignas(64) bf16 tail_[16 * D];
    alignas(64) float mixed_[16 * D];
};

}  // namespace

// Segment s: queries places[0][s] and on, places[1][s] of `q_rows`; keys and values likewise by places[2] and [3]. Segments
// are in order in both, without overlap; rows between them get zeros. `at`: q, k, v and the output. `log_sums` is
// (heads, q_rows). Weights become 0 with probability `dropout`, others are divided by 1 − `dropout`; the mask depends only on
// seed, segment, head, query and key.
extern "C" void clap_segment_attention_forward(
    const Matrix* at, float* log_sums, const int32_t* places, const Sizes* sizes, float scale, float dropout) {
    for_each_head<Forward>(at, log_sums, places, *sizes, scale, dropout);
}
