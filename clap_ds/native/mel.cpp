// Mel power spectrogram from complex spectra, in fp32.

#include "memory.h"
#include "vectors.h"

// mel[frame][band] = Σ_bin filters[band][bin] · |spectrum[frame][bin]|² over bins in [first[band], end[band]).
// spectrum: (frames, bins) complex, real and imaginary parts in turn; filters: (bands, bins).
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
