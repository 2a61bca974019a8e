import io
import itertools
import math
import random

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.data.batch import to_int16
from clap_ds.data.decoding import BrokenItemError, decode_audio, resample, resample_blocks, resampling_ratio
from clap_ds.model.torchaudio_compat import torchaudio

SECOND = 48000


def encode(samples: np.ndarray, sample_rate: int, file_format: str, subtype: str | None = None) -> bytes:
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
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * sample_rate)) / sample_rate)


RNG = np.random.default_rng(0)
NOISE = RNG.normal(0, 0.3, (70_000, 6)).clip(-1, 1)
FILES = {
    **{f"FLAC of {n} channel(s)": encode(NOISE[:, :n], SECOND, "FLAC", "PCM_16") for n in (1, 2)},
    **{f"WAV of {n} channel(s)": encode(NOISE[:, :n], SECOND, "WAV", "PCM_16") for n in (1, 6)},
    **{f"FLAC of {rate} Hz": encode(NOISE[:, :2], rate, "FLAC", "PCM_16") for rate in (44100, 96000)},
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
        mono = torch.from_numpy(samples[start : start + length].astype(np.float64).mean(axis=1).astype(np.float32))
        whole = torchaudio.transforms.Resample(rate, SECOND)(mono.clamp(-1, 1))[:num_samples].clamp(-1, 1)
        repeated = whole.repeat(num_samples // len(whole))
        expected = torch.cat([repeated, torch.zeros(num_samples - len(repeated))])
        is_exact = rate == SECOND and name[:3] not in ("Ogg", "MP3")
        tolerance = 1e-7 if is_exact else 1e-5  # relative to 1; seeking in lossy files may round differently
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
    assert decode(encoded, num_samples=10, dtype=torch.int16).tolist() == [2**15 * each for each in crops[0]]


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
        (encode(np.random.default_rng(0).uniform(-0.5, 0.5, 4 * SECOND), SECOND, "MP3")[:20000], "truncated"),
    ],
    ids=itertools.count(),  # encoded audio may contain the time
)
def test_unusable_audio_is_refused_with_a_reason(encoded: bytes, reason: str) -> None:
    with pytest.raises(BrokenItemError, match=reason):
        decode(encoded, num_samples=4 * SECOND)


@pytest.mark.parametrize("rates", [(44100, 48000), (96000, 48000), (999, 1000), (1, 500)])
def test_the_samples_are_torchaudios(rates: tuple[int, int]) -> None:
    """At once and in blocks, whose sums are in another order."""
    theirs, ratio = torchaudio.transforms.Resample(*rates), resampling_ratio(*rates)
    for length, sizes in ((1, [1]), (2, [1]), (147, [146]), (4321, [1000, 146, 5000])):
        waveform = torch.rand(length, generator=torch.Generator().manual_seed(0)) * 2 - 1
        for found in (
            resample(waveform, ratio),
            *(torch.cat([*resample_blocks(waveform.split(n), ratio)]) for n in sizes),
        ):
            torch.testing.assert_close(found, theirs(waveform), rtol=0, atol=1e-6)
