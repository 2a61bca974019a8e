// AdamW for bf16 parameters with fp32 masters, in one pass over gradient, master, moments and parameter; and sums of squares
// of bf16 gradients.
#include "memory.h"
#include "vectors.h"

namespace {

// A parameter's tensors, laid out as a row of six 64-bit integers from the caller.
struct Parameter {
    bf16* low;
    const bf16* gradient;
    float *master, *exp_avg, *exp_avg_sq;
    int64_t size;
};

// Likewise with two integers.
struct Values {
    const bf16* at;
    int64_t size;
};

struct Coefficients { float scale, rate1, beta2, rate2, bias, eps, step, keep; };

constexpr int64_t BLOCK = 1 << 14;  // elements whose squares are summed at a time; as in adamw.py
constexpr int64_t AHEAD = 512;      // elements between a prefetch and its use

// A product that the compiler doesn't fuse with a following sum. It rounds like torch's vector kernel, so results are bitwise
// equal for beta1 above 0.5.
__m512 times(__m512 a, __m512 b) { return _mm512_mul_round_ps(a, b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// Updates master and moments of the valid elements from i on; returns the new parameters.
inline __m256i sixteen(const Parameter& p, const Coefficients& c, int64_t i, __mmask16 valid) {
    const auto load = [=](const float* from) { return _mm512_maskz_loadu_ps(valid, from + i); };
    const __m512 given = from_bf16(_mm256_maskz_loadu_epi16(valid, p.gradient + i));
    const __m512 gradient = given / splat(c.scale), before = load(p.exp_avg);
    const __m512 average = fma(splat(c.rate1), gradient - before, before);
    const __m512 square = fma(times(splat(c.rate2), gradient), gradient, times(load(p.exp_avg_sq), splat(c.beta2)));
    const __m512 deviation = _mm512_sqrt_ps(square) / splat(c.bias) + splat(c.eps);
    const __m512 master = times(load(p.master), splat(c.keep)) - times(splat(c.step), average) / deviation;
    _mm512_mask_storeu_ps(p.exp_avg + i, valid, average);
    _mm512_mask_storeu_ps(p.exp_avg_sq + i, valid, square);
    _mm512_mask_storeu_ps(p.master + i, valid, master);
    return to_bf16(master);
}

void update(const Parameter& p, const Coefficients& c, int64_t begin, int64_t end) {
    const bool aligned = (uintptr_t)p.low % 64 == 0;
    for (int64_t i = begin; i < end; i += 32) {
        prefetch(p.gradient + i + AHEAD, 32);
        for (const float* each : {p.master, p.exp_avg, p.exp_avg_sq}) prefetch(each + i + AHEAD, 32);
        const __mmask32 valid = first_of_32(end - i);
        const __m256i first = sixteen(p, c, i, valid), second = sixteen(p, c, i + 16, valid >> 16);
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
        if (aligned && valid == ~0u)
            _mm512_stream_si512((__m512i*)(p.low + i), both);  // not read before the next step; avoids reading it first
        else
            _mm512_mask_storeu_epi16(p.low + i, valid, both);
    }
}

// Sum in fp64 of at most BLOCK elements, of which each lane sums 1/64 in fp32.
double sum_of_squares(const bf16* from, int64_t count) {
    __m512 sums[4] = {};
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
        prefetch(from + i + 2 * AHEAD, 64);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const __m512 x = load(from + i + 16 * k);
            sums[k] = fma(x, x, sums[k]);
        }
    }
    for (; i < count; i += 16) {
        const __m512 x = from_bf16(_mm256_maskz_loadu_epi16(first_lanes(count - i), from + i));
        sums[0] = fma(x, x, sums[0]);
    }
    double sum = 0;
    for (const __m512 each : sums)
        sum += _mm512_reduce_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(each))) +
               _mm512_reduce_add_pd(_mm512_cvtps_pd(_mm512_extractf32x8_ps(each, 1)));
    return sum;
}

}  // namespace

// One step: average += rate1 · (g − average), square = beta2 · square + rate2 · g² with g = gradient / scale;
// master = keep · master − step · average / (√square / bias + eps), and low = master rounded.
extern "C" void clap_adamw(const Parameter* parameters, int64_t count, const Coefficients* coefficients) {
#pragma omp parallel
    {
        const Coefficients c = *coefficients;
        for (int64_t n = 0; n < count; n++) {
            const Range own = share_of(divide_up(parameters[n].size, 32));
            update(parameters[n], c, 32 * own.begin, std::min(parameters[n].size, 32 * own.end));
        }
        _mm_sfence();
    }
}

// Each block's sum of squares, to be added in order, independent of the number of threads.
extern "C" void clap_sums_of_squares(const Values* tensors, int64_t count, double* sums) {
#pragma omp parallel
    for (int64_t n = 0, passed = 0; n < count; passed += divide_up(tensors[n++].size, BLOCK))
#pragma omp for schedule(dynamic) nowait
        for (int64_t start = 0; start < tensors[n].size; start += BLOCK)
            sums[passed + start / BLOCK] = sum_of_squares(tensors[n].at + start, std::min(BLOCK, tensors[n].size - start));
}
