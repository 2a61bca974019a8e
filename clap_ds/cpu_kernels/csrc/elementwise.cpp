// Kernels with one pass over memory: layer normalization of bf16 rows, forward and backward, with fp32 statistics and sums;
// dropout of bf16; the mel power spectrogram in fp32.
#include "memory.h"
#include "vectors.h"

namespace {

constexpr int MAX_VECTORS = 256;  // of 16 channels

// Number of threads for `elements`: below about 10 µs of work, a second one costs more than it saves.
int threads_for(int64_t elements) {
    return (int)std::min<int64_t>(omp_get_max_threads(), std::max<int64_t>(1, elements / (1 << 15)));
}

// The mean of `channels` numbers, which are given in two partial sums.
float mean_of(const __m512 (&sums)[2], int64_t channels) {
    return _mm512_reduce_add_ps(sums[0] + sums[1]) * (1.0f / (float)channels);
}

// Calls function(length, flag) with constants; `length` is the row's number of vectors of 16 if it fits in registers, else 0.
template <typename Function>
void with_length(int64_t vectors, bool flag, Function function) {
    const bool fits = vectors == 6 || vectors == 12 || vectors == 24;
    with_constant<0, 6, 12, 24>(fits ? vectors : 0, [&](auto length) {
        with_constant<0, 1>(flag, [&](auto constant) { function(length, constant); });
    });
}

}  // namespace

// y (rows × channels) = normalized x · weight + bias; with `residual`, of x + residual rounded to bf16, which goes to `sum`.
// statistics: (2, rows) fp32, each row's mean and the reciprocal of its deviation.
extern "C" void clap_layer_norm(
    const bf16* x, const bf16* residual, bf16* sum, const bf16* weight, const bf16* bias, bf16* y, float* statistics,
    int64_t rows, int64_t channels, float eps) {
    const int64_t vectors = channels / 16;
    auto scales = scratch<__m512>(vectors), shifts = scratch<__m512>(vectors);
    for (int64_t i = 0; i < vectors; i++) scales[i] = load(weight + 16 * i), shifts[i] = load(bias + 16 * i);
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

// dx (rows × channels) from dy, plus `passed` if not null, and dweight and dbias. Partial sums are added in the threads' order.
extern "C" void clap_layer_norm_backward(
    const bf16* dy, const bf16* passed, const bf16* x, const bf16* weight, const float* statistics, bf16* dx, bf16* dweight,
    bf16* dbias, int64_t rows, int64_t channels) {
    const int64_t vectors = channels / 16, threads = threads_for(rows * channels);
    auto scales = scratch<__m512>(vectors), sums = scratch<__m512>(2 * vectors * threads);
    for (int64_t i = 0; i < vectors; i++) scales[i] = load(weight + 16 * i);
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
        store((i < vectors ? dweight : dbias) + 16 * (i % vectors), sum);
    }
}

// y = x / (1 − probability) if kept, else 0. The mask is a function of the seed and the element's index, so the backward pass
// is the same call on the gradient.
extern "C" void clap_dropout(const bf16* x, bf16* y, int64_t count, int64_t seed, float probability) {
    const __m512 factor = splat(1.0f / (1.0f - probability));
#pragma omp parallel for schedule(static) if (count > 1 << 16)
    for (int64_t i = 0; i < count; i += 16) {
        const __m512i number = _mm512_add_epi32(lane_numbers(), _mm512_set1_epi32((int)i));
        const uint64_t part = (uint64_t)seed + ((uint64_t)i >> 32);  // numbers have 32 bits
        store(y + i, load(x + i) * _mm512_maskz_mov_ps(kept(part, number, probability), factor));  // keeps NaN, like torch
    }
}

// mel[frame][band] = Σ_bin filters[band][bin] · |spectrum[frame][bin]|² over bins in [first[band], end[band]).
// spectrum: (frames, bins) complex, interleaved real and imaginary parts; filters: (bands, bins).
extern "C" void clap_mel_power(const float* spectrum, const float* filters, const int32_t* first, const int32_t* end,
                               float* mel, int64_t frames, int64_t bins, int64_t bands) {
#pragma omp parallel
    {
        auto power = scratch<float>(bins + 15);
        const __m512i real = _mm512_slli_epi32(lane_numbers(), 1), imaginary = _mm512_add_epi32(real, _mm512_set1_epi32(1));
#pragma omp for schedule(static)
        for (int64_t frame = 0; frame < frames; frame++) {
            const float* row = spectrum + 2 * bins * frame;
            for (int64_t bin = 0; bin < bins; bin += 16) {
                const int64_t values = 2 * (bins - bin);
                __m512 low = _mm512_maskz_loadu_ps(first_lanes(values), row + 2 * bin);
                __m512 high = _mm512_maskz_loadu_ps(first_lanes(values - 16), row + 2 * bin + 16);
                __m512 re = _mm512_permutex2var_ps(low, real, high), im = _mm512_permutex2var_ps(low, imaginary, high);
                store(&power[bin], fma(re, re, im * im));
            }
            for (int64_t band = 0; band < bands; band++) {
                __m512 sum = splat(0);
                for (int64_t bin = first[band]; bin < end[band]; bin += 16) {
                    const __mmask16 valid = first_lanes(end[band] - bin);
                    const __m512 weights = _mm512_maskz_loadu_ps(valid, filters + band * bins + bin);
                    sum = fma(weights, _mm512_maskz_loadu_ps(valid, &power[bin]), sum);
                }
                mel[frame * bands + band] = _mm512_reduce_add_ps(sum);
            }
        }
    }
}
