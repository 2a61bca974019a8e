// Layer normalisation of bf16 rows, forward and backward, one pass over memory each; statistics and sums are fp32.
#include "memory.h"
#include "vectors.h"

namespace {

constexpr int MAX_VECTORS = 256;  // of 16 channels

// Threads for so many elements: below some ten microseconds of work a second one costs more than it saves.
int threads_for(int64_t elements) {
    return (int)std::min<int64_t>(omp_get_max_threads(), std::max<int64_t>(1, elements / (1 << 15)));
}

// The 16 values from `offset` on of a vector that is bf16 if `is_low`, else fp32.
__m512 load_either(const void* from, int64_t offset, bool is_low) {
    return is_low ? load((const bf16*)from + offset) : load((const float*)from + offset);
}

void store_either(void* to, int64_t offset, bool is_low, __m512 x) {
    is_low ? store((bf16*)to + offset, x) : store((float*)to + offset, x);
}

// The mean of `channels` numbers, which are given in two partial sums.
float mean_of(const __m512 (&sums)[2], int64_t channels) {
    return _mm512_reduce_add_ps(sums[0] + sums[1]) * (1.0f / (float)channels);
}

// Calls function(length, flag) with constants; `length` is the row's in vectors of 16 where that is small enough for registers,
// else 0.
template <typename Function>
void with_length(int64_t vectors, bool flag, Function function) {
    const bool fits = vectors == 6 || vectors == 12 || vectors == 24;
    with_constant<0, 6, 12, 24>(fits ? vectors : 0, [&](auto length) {
        with_constant<0, 1>(flag, [&](auto constant) { function(length, constant); });
    });
}

}  // namespace

// y (rows × channels) = normalised x · weight + bias; with `residual`, of x + residual rounded to bf16, which goes to `sum`.
// statistics: (2, rows) fp32, each row's mean and the reciprocal of its deviation. `is_low`: weight and bias are bf16, else
// fp32.
extern "C" void clap_layer_norm(
    const bf16* x, const bf16* residual, bf16* sum, const void* weight, const void* bias, int64_t is_low, bf16* y,
    float* statistics, int64_t rows, int64_t channels, float eps) {
    const int64_t vectors = channels / 16;
    auto scales = scratch<__m512>(vectors), shifts = scratch<__m512>(vectors);
    for (int64_t i = 0; i < vectors; i++) {
        scales[i] = load_either(weight, 16 * i, is_low);
        shifts[i] = load_either(bias, 16 * i, is_low);
    }
    with_length(vectors, residual, [=, weight = &scales[0], bias = &shifts[0]](auto length, auto add) {
#pragma omp parallel num_threads(threads_for(rows * channels))
        {
            const int64_t n = length ? length : vectors;
            __m512 row[length ? length : MAX_VECTORS];
            const Range own = share_of(rows);
            for (int64_t r = own.begin; r < own.end; r++) {
                const int64_t start = r * channels;
                __m512 total[2] = {}, squares[2] = {};
#pragma GCC unroll 24
                for (int64_t i = 0; i < n; i++) {
                    row[i] = load(x + start + 16 * i);
                    if (add) {
                        const __m256i rounded = to_bf16(row[i] + load(residual + start + 16 * i));
                        _mm256_storeu_si256((__m256i*)(sum + start + 16 * i), rounded);
                        row[i] = from_bf16(rounded);
                    }
                    total[i % 2] = total[i % 2] + row[i];
                }
                const float mean = mean_of(total, channels);
#pragma GCC unroll 24
                for (int64_t i = 0; i < n; i++) {
                    row[i] = row[i] - splat(mean);
                    squares[i % 2] = fma(row[i], row[i], squares[i % 2]);
                }
                const float scale = 1.0f / __builtin_sqrtf(mean_of(squares, channels) + eps);
#pragma GCC unroll 24
                for (int64_t i = 0; i < n; i++) store(y + start + 16 * i, fma(row[i] * splat(scale), weight[i], bias[i]));
                statistics[r] = mean;
                statistics[rows + r] = scale;
            }
        }
    });
}

// dx (rows × channels) from dy, added to `passed` if there is that, and dweight and dbias, of weight's dtype.
// The threads' partial sums are added up in the threads' order.
extern "C" void clap_layer_norm_backward(
    const bf16* dy, const bf16* passed, const bf16* x, const void* weight, int64_t is_low, const float* statistics, bf16* dx,
    void* dweight, void* dbias, int64_t rows, int64_t channels) {
    const int64_t vectors = channels / 16, threads = threads_for(rows * channels);
    auto scales = scratch<__m512>(vectors), sums = scratch<__m512>(2 * vectors * threads);
    for (int64_t i = 0; i < vectors; i++) scales[i] = load_either(weight, 16 * i, is_low);
    std::fill_n(&sums[0], 2 * vectors * threads, splat(0));
    with_length(vectors, passed, [=, weight = &scales[0], sums = &sums[0]](auto length, auto adds) {
#pragma omp parallel num_threads(threads)
        {
            const int64_t n = length ? length : vectors;
            __m512 normal[length ? length : MAX_VECTORS], slope[length ? length : MAX_VECTORS];
            __m512 *weight_sum = sums + 2 * vectors * omp_get_thread_num(), *bias_sum = weight_sum + vectors;
            const Range own = share_of(rows);
            for (int64_t r = own.begin; r < own.end; r++) {
                const int64_t start = r * channels;
                const __m512 mean = splat(statistics[r]), scale = splat(statistics[rows + r]);
                __m512 total[2] = {}, along[2] = {};
#pragma GCC unroll 24
                for (int64_t i = 0; i < n; i++) {
                    const __m512 gradient = load(dy + start + 16 * i);
                    normal[i] = (load(x + start + 16 * i) - mean) * scale;
                    slope[i] = gradient * weight[i];
                    total[i % 2] = total[i % 2] + slope[i];
                    along[i % 2] = fma(slope[i], normal[i], along[i % 2]);
                    weight_sum[i] = fma(gradient, normal[i], weight_sum[i]);
                    bias_sum[i] = bias_sum[i] + gradient;
                }
                const __m512 level = splat(mean_of(total, channels)), tilt = splat(mean_of(along, channels));
#pragma GCC unroll 24
                for (int64_t i = 0; i < n; i++) {
                    const __m512 rest = _mm512_fnmadd_ps(normal[i], tilt, slope[i] - level);
                    store(dx + start + 16 * i, fma(rest, scale, adds ? load(passed + start + 16 * i) : splat(0)));
                }
            }
        }
    });
    for (int64_t i = 0; i < 2 * vectors; i++) {
        __m512 sum = splat(0);
        for (int64_t t = 0; t < threads; t++) sum = sum + sums[2 * vectors * t + i];
        store_either(i < vectors ? dweight : dbias, 16 * (i % vectors), is_low, sum);
    }
}
