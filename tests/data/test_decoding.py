import io
import itertools
import math
import random

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.config.model import load_preset
from clap_ds.data import decoding
from clap_ds.data.batch import to_int16
from clap_ds.data.decoding import (
    BrokenItemError,
    decode_audio,
    decode_part,
    resample,
    resample_blocks,
    resampling_ratio,
)
from clap_ds.model.mel import LogMel
from clap_ds.model.torchaudio_compat import torchaudio
from tests import needs

SECOND = 48000
KAISER_BEST = {
    "resampling_method": "sinc_interp_kaiser",
    "lowpass_filter_width": 64,
    "rolloff": 0.9475937167399596,
    "beta": 14.769656459379492,
}
"""torchaudio's arguments for librosa's filter, as its documentation has them."""


def encode(
    samples: np.ndarray, sample_rate: int, file_format: str, subtype: str | None = None
) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, sample_rate, format=file_format, subtype=subtype)
    return buffer.getvalue()


def decode(
    encoded: bytes, num_samples: int = SECOND, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    row = torch.full((num_samples,), 7, dtype=dtype)
    decode_audio(encoded, row, sample_rate=SECOND, rng=random.Random(seed))
    return row


def tone(frequency: float, sample_rate: int, seconds: float = 1.0) -> np.ndarray:
    return 0.5 * np.sin(
        2 * np.pi * frequency * np.arange(round(seconds * sample_rate)) / sample_rate
    )


def torchaudio_resampled(waveform: torch.Tensor, from_rate: int, to_rate: int) -> torch.Tensor:
    # In float32, torchaudio's taps for 44.1 kHz are off by up to 1e-5.
    transform = torchaudio.transforms.Resample(
        from_rate, to_rate, **KAISER_BEST, dtype=torch.float64
    )
    return transform(waveform.double()).float()


RNG = np.random.default_rng(0)
NOISE = RNG.normal(0, 0.3, (70_000, 6)).clip(-1, 1)
FILES = {
    **{f"FLAC of {n} channel(s)": encode(NOISE[:, :n], SECOND, "FLAC", "PCM_16") for n in (1, 2)},
    **{f"WAV of {n} channel(s)": encode(NOISE[:, :n], SECOND, "WAV", "PCM_16") for n in (1, 6)},
    **{
        f"FLAC of {rate} Hz": encode(NOISE[:, :2], rate, "FLAC", "PCM_16")
        for rate in (44100, 96000)
    },
    "FLAC of 24 bits": encode(NOISE, SECOND, "FLAC", "PCM_24"),
    "MP3": encode(tone(440, SECOND, 3) + 0.2 * tone(1234, SECOND, 3), SECOND, "MP3"),
    "Ogg Vorbis": encode(NOISE[:, :2], SECOND, "OGG", "VORBIS"),
    "float": encode(1.5 * NOISE[:, :1], SECOND, "WAV", "FLOAT"),
    "8 bits": encode(NOISE[:, :1], SECOND, "WAV", "PCM_U8"),
}


@pytest.mark.parametrize("name", FILES)
def test_rows_are_what_libsndfile_numpy_and_torchaudio_make(name: str) -> None:
    """The channel mean at the row's rate, cropped at random, or repeated and zero-padded."""
    encoded = FILES[name]
    samples, rate = soundfile.read(io.BytesIO(encoded), dtype="float32", always_2d=True)
    for num_samples, seed in ((300, 0), (300, 1), (2500, 0), (400_000, 0)):
        length = min(len(samples), math.ceil(num_samples * rate / SECOND))
        start = random.Random(seed).randint(0, len(samples) - length)
        mono = torch.from_numpy(
            samples[start : start + length].astype(np.float64).mean(axis=1).astype(np.float32)
        )
        whole = torchaudio_resampled(mono.clamp(-1, 1), rate, SECOND)[:num_samples].clamp(-1, 1)
        repeated = whole.repeat(num_samples // len(whole))
        expected = torch.cat([repeated, torch.zeros(num_samples - len(repeated))])
        is_exact = rate == SECOND and name[:3] not in ("Ogg", "MP3")
        tolerance = (
            1e-7 if is_exact else 1e-5
        )  # relative to 1; seeking in lossy files may round differently
        found = decode(encoded, num_samples, seed)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        in_16_bits = decode(encoded, num_samples, seed, torch.int16)
        assert torch.equal(in_16_bits, to_int16(found)) or not is_exact
        assert (in_16_bits - to_int16(found)).abs().max() <= 1


def test_crops_of_mostly_silent_audio_are_moved_to_its_sound() -> None:
    samples = np.zeros(40 * 48, dtype=np.float32)
    samples[[70, 1500]] = 0.25, -0.5
    encoded = encode(samples, SECOND, "FLAC")
    crops = [decode(encoded, num_samples=10, seed=seed).tolist() for seed in range(50)]
    assert all(any(crop) for crop in crops)
    assert [0.0] * 5 + [-0.5] + [0.0] * 4 in crops
    assert decode(encoded, num_samples=10, dtype=torch.int16).tolist() == [
        2**15 * each for each in crops[0]
    ]


@pytest.mark.parametrize("rate", [SECOND, 2 * SECOND])
def test_samples_beyond_full_scale_are_clipped(rate: int) -> None:
    loud = tone(440, rate) / np.abs(tone(440, rate)).max() * 1.6
    found = decode(encode(loud, rate, "WAV", "FLOAT"), num_samples=SECOND)
    expected = decode(encode(loud.clip(-1, 1), rate, "WAV", "FLOAT"), num_samples=SECOND)
    assert found.abs().max() == 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"not audio at all" * 100, "can't be decoded"),
        (encode(tone(440, 16000), 16000, "FLAC")[:8000], "can't be decoded"),
        (encode(np.array([0.25]), SECOND, "WAV", "FLOAT"), "a single sample"),
        (encode(np.zeros(10), SECOND, "FLAC"), "silent"),
        (encode(np.array([0.1, np.nan, 0.2]), 16000, "WAV", "FLOAT"), "peaks at nan"),
        (encode(tone(440, 16000) * 32767, 16000, "WAV", "FLOAT"), "integers kept"),
        (encode(tone(440, SECOND), 1, "WAV"), "sample rate of 1 Hz"),  # hours after resampling
        # An MP3's length is in its header, so a truncated file still states the full length.
        (
            encode(np.random.default_rng(0).uniform(-0.5, 0.5, 4 * SECOND), SECOND, "MP3")[:20000],
            "truncated",
        ),
    ],
    ids=itertools.count(),  # encoded audio may contain the time
)
def test_unusable_audio_is_refused_with_a_reason(encoded: bytes, reason: str) -> None:
    with pytest.raises(BrokenItemError, match=reason):
        decode(encoded, num_samples=4 * SECOND)


@pytest.mark.parametrize("rates", [(44100, 48000), (96000, 48000), (999, 1000), (1, 48)])
def test_resampled_samples_are_those_of_torchaudios_kaiser_filter(rates: tuple[int, int]) -> None:
    """At once and in blocks, whose sums are in another order."""
    ratio = resampling_ratio(*rates)
    for length, sizes in ((1, [1]), (2, [1]), (147, [146]), (4321, [1000, 146, 5000])):
        waveform = torch.rand(length, generator=torch.Generator().manual_seed(0)) * 2 - 1
        expected = torchaudio_resampled(waveform, *rates)
        for found in (
            resample(waveform, ratio),
            *(torch.cat([*resample_blocks(waveform.split(n), ratio)]) for n in sizes),
        ):
            torch.testing.assert_close(
                found, expected, rtol=0, atol=8e-6
            )  # rounding of sums of 140 products


def speech_like(sample_rate: int, seconds: int) -> np.ndarray:
    """Return syllables of a voice of 100 to 140 Hz with all its harmonics, over quiet noise."""
    times = np.arange(sample_rate * seconds) / sample_rate
    phase = 2 * np.pi * np.cumsum(120 + 20 * np.sin(6 * np.pi * times)) / sample_rate
    voice = sum(np.sin(k * phase) / k for k in range(1, int(0.45 * sample_rate / 140)))
    syllables = np.sin(5 * np.pi * times).clip(0, None)
    return 0.1 * voice * syllables + RNG.normal(0, 0.003, len(times))


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 24000, 44100])
def test_files_of_other_rates_have_the_features_and_length_that_librosa_gives_them(
    rate: int,
) -> None:
    """`librosa.load(path, sr=48000)` resamples by soxr's HQ, and returns ceil(frames * 48000 /
    rate) samples."""
    needs.package("soxr", "test")
    import soxr

    log_mel = LogMel(load_preset("htsat_tiny_roberta_base").audio)
    sounds = {
        "noise": RNG.normal(0, 0.1, 2 * rate),
        "tones": sum(tone(frequency, rate, 2) for frequency in (220, 997, 0.42 * rate)) / 3,
        "speech": speech_like(rate, 2)[:-1],  # an odd number of frames
    }
    for name, samples in sounds.items():
        row = torch.zeros(2 * SECOND)
        length = decode_part(
            encode(samples, rate, "WAV", "FLOAT"), row, sample_rate=SECOND, rng=random.Random(0)
        )
        assert length == math.ceil(len(samples) * SECOND / rate), name
        expected = torch.zeros(2 * SECOND)
        theirs = torch.from_numpy(
            soxr.resample(samples.astype(np.float32), rate, SECOND, quality="HQ")
        )[:length]
        expected[: len(theirs)] = theirs
        ours_TF, theirs_TF = log_mel.of_any_length(torch.stack([row, expected]))
        assert (ours_TF - theirs_TF).abs().mean() < 0.5, name  # dB


@pytest.mark.parametrize("rate", [1001, 11024, 12345, 44099, 47999])
def test_rates_without_a_common_divisor_are_exact_and_need_little_memory(rate: int) -> None:
    ratio = resampling_ratio(rate, SECOND)
    assert ratio == pytest.approx(SECOND / rate, rel=1e-12)
    num_taps = sum(taps.numel() for _, taps in decoding._build_filters(ratio).parts)
    assert num_taps < 10e6  # 40 MB
    times = torch.arange(3 * rate, dtype=torch.float64) / rate
    found = resample(torch.sin(2 * torch.pi * 300 * times).float(), ratio)
    assert len(found) == 3 * SECOND
    expected = torch.sin(
        2 * torch.pi * 300 * torch.arange(3 * SECOND, dtype=torch.float64) / SECOND
    ).float()
    inside = slice(SECOND // 2, -SECOND // 2)  # sounds end in silence
    torch.testing.assert_close(found[inside], expected[inside], rtol=0, atol=1e-4)


@pytest.mark.parametrize("rate", [95999, 191999, 999983])
def test_ratios_of_odd_rates_above_48_khz_are_close_and_need_little_memory(rate: int) -> None:
    ratio = resampling_ratio(rate, SECOND)
    assert ratio == pytest.approx(SECOND / rate, rel=1 / 90_000)
    assert sum(taps.numel() for _, taps in decoding._build_filters(ratio).parts) < 10e6
