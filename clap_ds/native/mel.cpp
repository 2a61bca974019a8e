// Mel power spectrogram from complex spectra, in fp32.

#include "common.h"

// mel[frame][band] = Σ_bin filters[band][bin] · |spectrum[frame][bin]|², with bins outside of [first[band], end[band]) left out.
// spectrum: (frames, bins) complex, real and imaginary parts in turn; filters: (bands, bins).
extern "C" void clap_mel_power(const float* spectrum, const float* filters, const int32_t* first, const int32_t* end, float* mel,
                               int64_t frames, int64_t bins, int64_t bands) {
#pragma omp parallel
    {
        auto power = scratch<float>(bins + 15);
        const __m512i real = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i imaginary = _mm512_add_epi32(real, _mm512_set1_epi32(1));
#pragma omp for schedule(static)
        for (int64_t frame = 0; frame < frames; frame++) {
            const float* row = spectrum + 2 * bins * frame;
            for (int64_t bin = 0; bin < bins; bin += 16) {
                const int64_t values = 2 * std::min<int64_t>(16, bins - bin);
                const uint32_t valid = values == 32 ? ~0u : (1u << values) - 1;
                __m512 low = _mm512_maskz_loadu_ps((__mmask16)valid, row + 2 * bin);
                __m512 high = _mm512_maskz_loadu_ps((__mmask16)(valid >> 16), row + 2 * bin + 16);
                __m512 re = _mm512_permutex2var_ps(low, real, high), im = _mm512_permutex2var_ps(low, imaginary, high);
                _mm512_storeu_ps(&power[bin], _mm512_fmadd_ps(re, re, _mm512_mul_ps(im, im)));
            }
            for (int64_t band = 0; band < bands; band++) {
                __m512 sum = _mm512_setzero_ps();
                for (int64_t bin = first[band]; bin < end[band]; bin += 16) {
                    const int64_t values = std::min<int64_t>(16, end[band] - bin);
                    const __mmask16 valid = (__mmask16)((1u << values) - 1);
                    __m512 weights = _mm512_maskz_loadu_ps(valid, filters + band * bins + bin);
                    sum = _mm512_fmadd_ps(weights, _mm512_maskz_loadu_ps(valid, &power[bin]), sum);
                }
                mel[frame * bands + band] = _mm512_reduce_add_ps(sum);
            }
        }
    }
}
