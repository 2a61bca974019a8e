import io
import math
import random

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.config.model import load_preset
from clap_ds.data import decoding
from clap_ds.data.batch import to_int16
from clap_ds.data.build_shards.prepare import Preparation, keep_file
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
from tests.data.tars import encode

SECOND = 48000
KAISER_BEST = {
    "resampling_method": "sinc_interp_kaiser",
    "lowpass_filter_width": 64,
    "rolloff": 0.9475937167399596,
    "beta": 14.769656459379492,
}
"""torchaudio's arguments for librosa's filter, as its documentation has them."""


def decode(
    encoded: bytes, num_samples: int = SECOND, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    row = torch.full((num_samples,), 7, dtype=dtype)
    decode_audio(encoded, row, sample_rate=SECOND, rng=random.Random(seed))
    return row


def tone(frequency: float, sample_rate: int, seconds: float = 1.0) -> np.ndarray:
    time = np.arange(round(seconds * sample_rate)) / sample_rate
    return 0.5 * np.sin(2 * np.pi * frequency * time)


def resample_by_torchaudio(waveform: torch.Tensor, from_rate: int, to_rate: int) -> torch.Tensor:
    # In float32, torchaudio's taps for 44.1 kHz are off by up to 1e-5.
    transform = torchaudio.transforms.Resample(
        from_rate, to_rate, **KAISER_BEST, dtype=torch.float64
    )
    return transform(waveform.double()).float()


RNG = np.random.default_rng(0)
NOISE = RNG.normal(0, 0.3, (70_000, 6)).clip(-1, 1)
FILES = {
    "FLAC": encode(NOISE[:, 0], SECOND, "FLAC", "PCM_16"),
    "WAV of 6 channels": encode(NOISE, SECOND, "WAV", "PCM_16"),
    "FLAC of 44.1 kHz": encode(NOISE[:, :2], 44100, "FLAC", "PCM_16"),
    "MP3": encode(tone(440, SECOND, 3) + 0.2 * tone(1234, SECOND, 3), SECOND, "MP3"),
    "Ogg Vorbis": encode(NOISE[:, :2], SECOND, "OGG", "VORBIS"),
    "float": encode(1.5 * NOISE[:, :1], SECOND, "WAV", "FLOAT"),
}


@pytest.mark.parametrize("name", FILES)
def test_rows_equal_libsndfile_numpy_and_torchaudio(name):
    """The channel mean at the row's rate, cropped at random, or repeated and zero-padded."""
    encoded = FILES[name]
    samples, rate = soundfile.read(io.BytesIO(encoded), dtype="float32", always_2d=True)
    is_exact = rate == SECOND and name not in ("Ogg Vorbis", "MP3")
    for num_samples, seed in ((300, 0), (300, 1), (400_000, 0)):
        length = min(len(samples), math.ceil(num_samples * rate / SECOND))
        start = random.Random(seed).randint(0, len(samples) - length)
        mean = samples[start : start + length].astype(np.float64).mean(axis=1)
        mono = torch.from_numpy(mean.astype(np.float32)).clamp(-1, 1)
        whole = resample_by_torchaudio(mono, rate, SECOND)[:num_samples].clamp(-1, 1)
        expected = torch.zeros(num_samples)
        num_repeats = num_samples // len(whole)
        expected[: num_repeats * len(whole)] = whole.repeat(num_repeats)
        row = decode(encoded, num_samples, seed)
        # Relative to 1. Seeking in lossy files may round differently.
        tolerance = 1e-7 if is_exact else 1e-5
        torch.testing.assert_close(row, expected, rtol=0, atol=tolerance)
        row_in_16_bits = decode(encoded, num_samples, seed, torch.int16)
        assert (row_in_16_bits - to_int16(row)).abs().max() <= (0 if is_exact else 1)


def test_crop_of_mostly_silent_audio_is_about_its_sound():
    samples = np.zeros(2000, dtype=np.float32)
    samples[[70, 1500]] = 0.25, -0.5
    encoded = encode(samples, SECOND, "FLAC")
    crops = [decode(encoded, num_samples=10, seed=seed).tolist() for seed in range(20)]
    assert all(map(any, crops))
    assert [0.0] * 5 + [-0.5] + [0.0] * 4 in crops


HISS = tone(0.7 * SECOND, 2 * SECOND) * np.hanning(2 * SECOND)
UNUSABLE = {
    "text": (b"not audio at all" * 100, "can't be decoded"),
    "one sample": (encode(np.array([0.25]), SECOND, "WAV", "FLOAT"), "a single sample"),
    "NaN": (encode(np.array([0.1, np.nan, 0.2]), 16000, "WAV", "FLOAT"), "peaks at nan"),
    "integers": (encode(tone(440, 16000) * 32767, 16000, "WAV", "FLOAT"), "integers kept"),
    # hours after resampling
    "1 Hz": (encode(tone(440, SECOND), 1, "WAV"), "sample rate of 1 Hz"),
    # An MP3's length is in its header, so a truncated file still states the full length.
    "cut MP3": (encode(RNG.uniform(-0.5, 0.5, 4 * SECOND), SECOND, "MP3")[:20000], "truncated"),
    # its sound is above the Nyquist frequency of the model
    "hiss": (encode(HISS, 2 * SECOND, "WAV", "FLOAT"), "silent at 48000 Hz"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_audio_is_refused_with_reason(name):
    encoded, reason = UNUSABLE[name]
    with pytest.raises(BrokenItemError, match=reason):
        decode(encoded, num_samples=4 * SECOND)


SILENT = {
    "channels that cancel": np.outer(tone(440, SECOND), [1, 0.5, -1.5]),
    # rounded to 0 in 16 bits
    "faint": 1e-5 * tone(440, SECOND),
}
AUDIO = load_preset("micro").audio
"""Clips of one second."""


@pytest.mark.parametrize("rate", [SECOND, SECOND // 3])
@pytest.mark.parametrize("name", SILENT)
def test_silence_for_model_is_refused_by_build_and_prepare(name, rate):
    """It is judged on the mean of the channels, in 16 bits."""
    silence = encode(SILENT[name], rate, "WAV", "FLOAT")
    for convert in (keep_file, Preparation("waveform", AUDIO).convert):
        with pytest.raises(BrokenItemError, match="silent"):
            convert(silence, "wav")
    constant = encode(np.full(SECOND, 0.25), rate, "WAV", "FLOAT")
    assert keep_file(constant, "wav").content == constant


@pytest.mark.parametrize("rates", [(44100, 48000), (96000, 48000), (999, 1000)])
def test_resample_at_once_and_in_blocks_equals_torchaudio(rates):
    ratio = resampling_ratio(*rates)
    for length, block_sizes in ((1, [1]), (4321, [1000, 146, 5000])):
        waveform = torch.rand(length, generator=torch.Generator().manual_seed(0)) * 2 - 1
        expected = resample_by_torchaudio(waveform, *rates)
        resampled = [resample(waveform, ratio)]
        for size in block_sizes:
            resampled.append(torch.cat([*resample_blocks(waveform.split(size), ratio)]))
        # rounding of sums of 140 products, in another order
        for samples in resampled:
            torch.testing.assert_close(samples, expected, rtol=0, atol=8e-6)


@pytest.mark.parametrize("rate", [8000, 44100])
def test_resampled_features_equal_librosa(rate):
    """`librosa.load(path, sr=48000)` resamples by soxr's HQ, and returns ceil(frames * 48000 /
    rate) samples."""
    needs.package("soxr", "test")
    import soxr

    log_mel = LogMel(load_preset("htsat_tiny_roberta_base").audio)
    # an odd number of frames
    samples = RNG.normal(0, 0.1, 2 * rate - 1)
    # by this project, by librosa
    rows = torch.zeros(2, 2 * SECOND)
    encoded = encode(samples, rate, "WAV", "FLOAT")
    length = decode_part(encoded, rows[0], sample_rate=SECOND, rng=random.Random(0))
    assert length == math.ceil(len(samples) * SECOND / rate)
    expected = soxr.resample(samples.astype(np.float32), rate, SECOND, quality="HQ")[:length]
    rows[1, : len(expected)] = torch.from_numpy(expected)
    features_TF, expected_TF = log_mel.of_any_length(rows)
    # dB
    assert (features_TF - expected_TF).abs().mean() < 0.5


# Above 48 kHz, the ratio is rounded.
@pytest.mark.parametrize(("rate", "tolerance"), [(44099, 1e-12), (999983, 1 / 90_000)])
def test_ratio_of_odd_rate_needs_little_memory(rate, tolerance):
    ratio = resampling_ratio(rate, SECOND)
    assert ratio == pytest.approx(SECOND / rate, rel=tolerance)
    # 40 MB
    assert sum(taps.numel() for _, taps in decoding._build_filters(ratio).parts) < 10e6
