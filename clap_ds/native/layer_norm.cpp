// Layer normalisation of bf16 rows, forward and backward, one pass over memory each; statistics and sums are fp32.
#include "common.h"

namespace {

constexpr int MAX_VECTORS = 256;  // of 16 channels

struct Range {
    int64_t begin, end;
};

// The calling thread's share of `count` rows, by OpenMP's numbering.
Range share(int64_t count) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    return {count * thread / threads, count * (thread + 1) / threads};
}

// Threads for so many elements: below some ten microseconds of work a second one costs more than it saves.
int threads_for(int64_t elements) {
    return (int)std::min<int64_t>(omp_get_max_threads(), std::max<int64_t>(1, elements / (1 << 15)));
}

// The 16 values from `offset` on of a vector that is bf16 if `is_low`, else fp32.
__m512 load_either(const void* from, int64_t offset, bool is_low) {
    return is_low ? load_bf16((const bf16*)from + offset) : _mm512_loadu_ps((const float*)from + offset);
}

void store_either(void* to, int64_t offset, bool is_low, __m512 x) {
    if (is_low)
        store_bf16((bf16*)to + offset, x);
    else
        _mm512_storeu_ps((float*)to + offset, x);
}

// In what follows VECTORS > 0 is the row's length in vectors of 16, small enough for registers; 0: `vectors` is, in memory.

template <int VECTORS, bool ADD>
void normalize(const bf16* x, const bf16* residual, bf16* sum, const __m512* weight, const __m512* bias, bf16* y, float* mean,
               float* rstd, Range rows, int vectors, float eps) {
    const int n = VECTORS ? VECTORS : vectors;
    const int64_t channels = 16 * n;
    const float per_channel = 1.0f / (float)channels;
    __m512 row[VECTORS ? VECTORS : MAX_VECTORS];
    for (int64_t r = rows.begin; r < rows.end; r++) {
        const int64_t start = r * channels;
        __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 24
        for (int i = 0; i < n; i++) {
            __m512 value = load_bf16(x + start + 16 * i);
            if (ADD) {
                __m256i rounded = to_bf16(_mm512_add_ps(value, load_bf16(residual + start + 16 * i)));
                _mm256_storeu_si256((__m256i*)(sum + start + 16 * i), rounded);
                value = from_bf16(rounded);
            }
            row[i] = value;
            total[i % 2] = _mm512_add_ps(total[i % 2], value);
        }
        const float centre = _mm512_reduce_add_ps(_mm512_add_ps(total[0], total[1])) * per_channel;
        const __m512 centres = _mm512_set1_ps(centre);
        __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 24
        for (int i = 0; i < n; i++) {
            row[i] = _mm512_sub_ps(row[i], centres);
            squares[i % 2] = _mm512_fmadd_ps(row[i], row[i], squares[i % 2]);
        }
        const float variance = _mm512_reduce_add_ps(_mm512_add_ps(squares[0], squares[1])) * per_channel;
        const float scale = 1.0f / __builtin_sqrtf(variance + eps);
        const __m512 scales = _mm512_set1_ps(scale);
#pragma GCC unroll 24
        for (int i = 0; i < n; i++) {
            store_bf16(y + start + 16 * i, _mm512_fmadd_ps(_mm512_mul_ps(row[i], scales), weight[i], bias[i]));
        }
        mean[r] = centre;
        rstd[r] = scale;
    }
}

// Adds the rows' gradients of weight and bias to `weight_sum` and `bias_sum`.
template <int VECTORS, bool PASSED>
void differentiate(const bf16* dy, const bf16* passed, const bf16* x, const __m512* weight, const float* mean,
                   const float* rstd, bf16* dx, __m512* weight_sum, __m512* bias_sum, Range rows, int vectors) {
    const int n = VECTORS ? VECTORS : vectors;
    const int64_t channels = 16 * n;
    const float per_channel = 1.0f / (float)channels;
    __m512 normal[VECTORS ? VECTORS : MAX_VECTORS], slope[VECTORS ? VECTORS : MAX_VECTORS];
    for (int64_t r = rows.begin; r < rows.end; r++) {
        const int64_t start = r * channels;
        const __m512 scales = _mm512_set1_ps(rstd[r]), centres = _mm512_set1_ps(mean[r]);
        __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, along[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 24
        for (int i = 0; i < n; i++) {
            const __m512 gradient = load_bf16(dy + start + 16 * i);
            normal[i] = _mm512_mul_ps(_mm512_sub_ps(load_bf16(x + start + 16 * i), centres), scales);
            slope[i] = _mm512_mul_ps(gradient, weight[i]);
            total[i % 2] = _mm512_add_ps(total[i % 2], slope[i]);
            along[i % 2] = _mm512_fmadd_ps(slope[i], normal[i], along[i % 2]);
            weight_sum[i] = _mm512_fmadd_ps(gradient, normal[i], weight_sum[i]);
            bias_sum[i] = _mm512_add_ps(bias_sum[i], gradient);
        }
        const __m512 level = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_add_ps(total[0], total[1])) * per_channel);
        const __m512 tilt = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_add_ps(along[0], along[1])) * per_channel);
#pragma GCC unroll 24
        for (int i = 0; i < n; i++) {
            const __m512 rest = _mm512_fnmadd_ps(normal[i], tilt, _mm512_sub_ps(slope[i], level));
            const __m512 other = PASSED ? load_bf16(passed + start + 16 * i) : _mm512_setzero_ps();
            store_bf16(dx + start + 16 * i, _mm512_fmadd_ps(rest, scales, other));
        }
    }
}

template <bool ADD>
auto* normalize_for(int vectors) {
    switch (vectors) {
        case 6: return normalize<6, ADD>;
        case 12: return normalize<12, ADD>;
        case 24: return normalize<24, ADD>;
        default: return normalize<0, ADD>;
    }
}

template <bool PASSED>
auto* differentiate_for(int vectors) {
    switch (vectors) {
        case 6: return differentiate<6, PASSED>;
        case 12: return differentiate<12, PASSED>;
        default: return differentiate<0, PASSED>;
    }
}

}  // namespace

extern "C" {

// y (rows × channels) = normalised x · weight + bias; with `residual`, of x + residual rounded to bf16, which goes to `sum`.
// statistics: (2, rows) fp32, each row's mean and the reciprocal of its deviation. `is_low`: weight and bias are bf16, else
// fp32.
void clap_layer_norm(const bf16* x, const bf16* residual, bf16* sum, const void* weight, const void* bias, int64_t is_low,
                     bf16* y, float* statistics, int64_t rows, int64_t channels, float eps) {
    const int vectors = (int)(channels / 16);
    auto scales = scratch<__m512>(vectors), shifts = scratch<__m512>(vectors);
    for (int i = 0; i < vectors; i++) {
        scales[i] = load_either(weight, 16 * i, is_low);
        shifts[i] = load_either(bias, 16 * i, is_low);
    }
    auto* run = residual ? normalize_for<true>(vectors) : normalize_for<false>(vectors);
#pragma omp parallel num_threads(threads_for(rows * channels))
    run(x, residual, sum, scales.get(), shifts.get(), y, statistics, statistics + rows, share(rows), vectors, eps);
}

// dx (rows × channels) from dy, added to `passed` if there is that, and dweight and dbias, of weight's dtype.
// The threads' partial sums are added up in the threads' order.
void clap_layer_norm_backward(const bf16* dy, const bf16* passed, const bf16* x, const void* weight, int64_t is_low,
                              const float* statistics, bf16* dx, void* dweight, void* dbias, int64_t rows, int64_t channels) {
    const int vectors = (int)(channels / 16), threads = threads_for(rows * channels);
    auto scales = scratch<__m512>(vectors), partial = scratch<__m512>(2 * vectors * threads);
    for (int i = 0; i < vectors; i++) scales[i] = load_either(weight, 16 * i, is_low);
    auto* run = passed ? differentiate_for<true>(vectors) : differentiate_for<false>(vectors);
    int used = 1;
#pragma omp parallel num_threads(threads)
    {
        __m512* mine = partial.get() + 2 * vectors * omp_get_thread_num();
        for (int i = 0; i < 2 * vectors; i++) mine[i] = _mm512_setzero_ps();
        run(dy, passed, x, scales.get(), statistics, statistics + rows, dx, mine, mine + vectors, share(rows), vectors);
#pragma omp single nowait
        used = omp_get_num_threads();
    }
    for (int i = 0; i < vectors; i++) {
        __m512 weight_sum = _mm512_setzero_ps(), bias_sum = _mm512_setzero_ps();
        for (int t = 0; t < used; t++) {
            weight_sum = _mm512_add_ps(weight_sum, partial[2 * vectors * t + i]);
            bias_sum = _mm512_add_ps(bias_sum, partial[2 * vectors * t + vectors + i]);
        }
        store_either(dweight, 16 * i, is_low, weight_sum);
        store_either(dbias, 16 * i, is_low, bias_sum);
    }
}
}
