// Softmax attention of segments of rows over other segments of rows, backward. Scores are (keys × queries), so that they are
// left operands for the gradients of values and keys, and sums over keys are column sums. If a segment has no queries or no
// keys, gradients are 0.

#include "segments.h"

namespace {

template <int D>
struct Backward {
    Backward(int64_t most_queries, int64_t most_keys)
        : most_queries_(blocks_of(most_queries) * 32), most_keys_(blocks_of(most_keys) * 32) {}

    void attend(const SegmentHead& head, const Matrix* at, const float* log_sums) {
        const Matrix q = head.of_queries(at[0]), k = head.of_keys(at[1]), v = head.of_keys(at[2]);
        const Matrix d_out = head.of_queries(at[3]), d_q = head.of_queries(at[4], true);
        const Matrix d_k = head.of_keys(at[5], true), d_v = head.of_keys(at[6], true);
        const int64_t queries = head.queries, keys = head.keys;
        const Operand key_rows = copy_padded<D>(key_rows_.get(), k, keys);
        const Operand value_rows = copy_padded<D>(value_rows_.get(), v, keys);
        const Operand query_columns = pack_columns<D>(query_columns_.get(), q, queries);
        const Operand output_columns = pack_columns<D>(output_columns_.get(), d_out, queries);
        const auto differentiate = head.dropout.probability > 0 ? &Backward::differentiate_softmax<true>
                                                           : &Backward::differentiate_softmax<false>;
        for (int64_t tile = 0; tile < tiles_of(queries); tile++) {
            multiply<true>(key_rows, query_columns.from(tile), tiles_of(keys), D / 32, scores_.get(), 16);
            multiply<true>(value_rows, output_columns.from(tile), tiles_of(keys), D / 32, slopes_.get(), 16);
            (this->*differentiate)(16 * tile, log_sums + head.place(), head);
        }
        // Separate, so that the loop above fits in the L1 cache.
        store_query_gradients(pack_summed<D>(packed_.get(), {key_rows_.get(), D}, keys), queries, keys, d_q);
        store_key_gradients(weights_.get(), pack_summed<D>(packed_.get(), d_out, queries), queries, keys, d_v);
        store_key_gradients(d_scores_.get(), pack_summed<D>(packed_.get(), q, queries), queries, keys, d_k);
    }

    // One half of weights and d_scores, bf16 (keys × 32 queries), from scores and slopes (keys × 16 queries, from `query` on).
    // The first half leaves zeros in the second.
    template <bool DROPS>
    void differentiate_softmax(int64_t query, const float* log_sums, const SegmentHead& head) {
        const int64_t keys = head.keys;
        const Dropout dropout = head.dropout;
        const bool second = query / 16 % 2;
        bf16 *weights = &weights_[query / 32 * step_of(keys)], *d_scores = &d_scores_[query / 32 * step_of(keys)];
        const __m512i numbers = _mm512_mullo_epi32(lane_numbers(), _mm512_set1_epi32((int)dropout.stride));
        const __m512 kept_factor = splat(dropout.factor()), factor = splat(head.scale * LOG2E);
        const __m512 shift = _mm512_maskz_loadu_ps(first_lanes(head.queries - query), log_sums + query) * splat(LOG2E);
        __m512 sum = splat(0);
        const auto store_half = [=](bf16* row, __m512 x) { second ? store(row + 16, x) : store(row, x, splat(0)); };
        for (int64_t key = 0; key < keys; key++) {
            const __m512 p = exp2_ps(_mm512_fmsub_ps(load(&scores_[key * 16]), factor, shift));
            __m512 weight = p, slope = load(&slopes_[key * 16]);
            if constexpr (DROPS) {
                const __mmask16 stay = dropout.keeps(query, key, numbers);
                weight = _mm512_maskz_mul_ps(stay, p, kept_factor);
                slope = _mm512_maskz_mul_ps(stay, slope, kept_factor);
                store(&slopes_[key * 16], slope);
            }
            store(&scores_[key * 16], p);
            store_half(weights + key * 32, weight);
            sum = fma(p, slope, sum);
        }
        for (int64_t key = 0; key < keys; key++) {
            const __m512 p = load(&scores_[key * 16]) * splat(head.scale);
            store_half(d_scores + key * 32, p * (load(&slopes_[key * 16]) - sum));
        }
    }

    void store_query_gradients(Operand packed_keys, int64_t queries, int64_t keys, Matrix to) {
        for (int64_t start = 0; start < queries; start += 16) {
            const bf16* d_scores = &d_scores_[start / 32 * step_of(keys) + start % 32];
            for (int64_t key = 0; key < keys; key += 32)
                pack_rows_as_a(&d_score_rows_[key * 16], d_scores + key * 32, 32, (int)std::min<int64_t>(32, keys - key));
            multiply<false>({d_score_rows_.get(), 32, 0, TILE}, packed_keys, D / 16, blocks_of(keys), mixed_, D);
            store_rows<D>(to.from(start, 0), mixed_, std::min<int64_t>(16, queries - start));
        }
    }

    // For weights and values or d_scores and keys.
    void store_key_gradients(const bf16* left, Operand packed, int64_t queries, int64_t keys, Matrix to) {
        const Operand rows = {left, 32, TILE, step_of(keys)};
        for (int64_t start = 0; start < keys; start += 16) {
            multiply<false>(rows.from(start / 16), packed, D / 16, blocks_of(queries), mixed_, D);
            store_rows<D>(to.from(start, 0), mixed_, std::min<int64_t>(16, keys - start));
        }
    }

    // Elements of weights or d_scores for 32 queries.
    static int64_t step_of(int64_t keys) { return blocks_of(keys) * 32 * 32; }

    const int64_t most_queries_, most_keys_;
    Scratch<bf16> key_rows_ = scratch<bf16>(most_keys_ * D), value_rows_ = scratch<bf16>(most_keys_ * D);
    Scratch<bf16> query_columns_ = scratch<bf16>(most_queries_ * D), output_columns_ = scratch<bf16>(most_queries_ * D);
    Scratch<bf16> packed_ = scratch<bf16>(std::max(most_queries_, most_keys_) * D);
    Scratch<float> scores_ = scratch<float>(most_keys_ * 16), slopes_ = scratch<float>(most_keys_ * 16);
    Scratch<bf16> weights_ = scratch<bf16>(most_keys_ * most_queries_), d_scores_ = scratch<bf16>(most_keys_ * most_queries_);
    Scratch<bf16> d_score_rows_ = scratch<bf16>(most_keys_ * 16);
    alignas(64) float mixed_[16 * D];
};

}  // namespace

// Like forward, with its `log_sums` and seed. `at`: q, k, v, and the gradients of the output, q, k and v.
extern "C" void clap_segment_attention_backward(
    const Matrix* at, const float* log_sums, const int32_t* places, const Sizes* sizes, float scale, float dropout) {
    for_each_head<Backward>(at, log_sums, places, *sizes, scale, dropout);
}
