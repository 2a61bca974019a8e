import io
import itertools
import random
import struct

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.data import decoding
from clap_ds.data.batch import to_int16
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.decoding import decode_audio

SECOND = 48000


def encode(samples: np.ndarray, sample_rate: int, file_format: str, subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, sample_rate, format=file_format, subtype=subtype)
    return buffer.getvalue()


def decode(
    encoded: bytes | memoryview, num_samples: int = SECOND, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    row = torch.full((num_samples,), 7, dtype=dtype)
    decode_audio(encoded, row, sample_rate=SECOND, rng=random.Random(seed))
    return row


def tone(frequency: float, sample_rate: int, seconds: float = 1.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * sample_rate)) / sample_rate)


@pytest.mark.parametrize(
    ("file_format", "subtype", "tolerance"),
    [
        ("WAV", "FLOAT", 1e-7),
        ("FLAC", "PCM_24", 2**-22),
        ("OGG", "VORBIS", 0.1),
        ("OGG", "OPUS", 0.1),
        ("MP3", None, 0.1),
    ],
)
def test_round_trip(file_format: str, subtype: str | None, tolerance: float) -> None:
    """And a crop is a slice of the whole, from wherever it begins."""
    original = tone(440, SECOND, 3) + 0.2 * tone(1234, SECOND, 3)
    encoded = encode(original, SECOND, file_format, subtype)
    whole = decode(encoded, 3 * SECOND).numpy()
    error = (whole - original)[2000:-2000]  # lossy codecs smear the abrupt ends
    assert np.abs(error).max() <= tolerance
    assert np.linalg.norm(error) <= min(10 * tolerance, 0.1) * np.linalg.norm(original)
    for seed, content in itertools.product(range(2), (encoded, memoryview(encoded))):
        start = random.Random(seed).randint(0, 2 * SECOND)
        np.testing.assert_allclose(decode(content, seed=seed), whole[start : start + SECOND], atol=1e-5)


def riff(
    data: bytes, kind: int = 1, bits: int = 16, *, channels: int = 1, extended: bool = False, before: bytes = b"",
    size: int = -1,
) -> bytes:  # fmt: skip
    """A WAV file made by hand: `before` its data other chunks, `size` in its header where that isn't the data's."""
    frame = channels * bits // 8
    description = struct.pack("<HHIIHH", 0xFFFE if extended else kind, channels, SECOND, SECOND * frame, frame, bits)
    if extended:  # with the speakers' positions, and the kind in a GUID
        description += struct.pack("<HHIH", 22, bits, 2**channels - 1, kind)
        description += bytes.fromhex("000000001000800000aa00389b71")
    chunks = b"WAVEfmt " + struct.pack("<I", len(description)) + description + before
    chunks += b"data" + struct.pack("<I", len(data) if size < 0 else size) + data
    return b"RIFF" + struct.pack("<I", len(chunks) if size < 0 else min(size + 36, 2**32 - 1)) + chunks


RNG = np.random.default_rng(0)
NUMBERS, LARGE = RNG.integers(-(2**15), 2**15, 960), RNG.integers(-(2**23), 2**23, 960)
FLOATS = RNG.uniform(-1.5, 1.5, 960).astype(np.float32)
SHORTS, PLAIN = NUMBERS.astype("<i2").tobytes(), NUMBERS / 2**15
LIST = b"LIST" + struct.pack("<I", 26) + b"INFOISFT" + struct.pack("<I", 14) + b"Lavf59.27.100\0"
EXACT = {
    "8 bits": (riff(bytes(range(256)), bits=8), (np.arange(256) - 128) / 2**7),
    "24 bits": (riff(LARGE.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes(), bits=24), LARGE / 2**23),
    "float": (riff(FLOATS.tobytes(), 3, 32), FLOATS),
    "2 channels": (riff(SHORTS, channels=2), PLAIN.reshape(-1, 2).mean(axis=1)),
    "6 channels": (riff(SHORTS, channels=6, extended=True), PLAIN.reshape(-1, 6).mean(axis=1)),
    "odd chunk before": (riff(SHORTS, before=b"junk" + struct.pack("<I", 3) + b"odd\0"), PLAIN),
    "chunk behind": (riff(SHORTS) + LIST, PLAIN),
    "ffmpeg's pipe": (riff(SHORTS, before=LIST, size=2**32 - 1), PLAIN),
    "SoX's pipe": (riff(SHORTS, size=0x7FFFF000), PLAIN),
}


@pytest.mark.parametrize("name", EXACT)
def test_wav_files_of_every_kind_are_exact(name: str) -> None:
    encoded, samples = EXACT[name]
    np.testing.assert_allclose(decode(encoded, len(samples)), samples, rtol=1e-7, atol=1e-8)  # a mean of 6 is rounded
    rounded = np.clip(np.rint(samples * 2.0**15), -(2**15), 2**15 - 1)
    assert decode(encoded, len(samples), dtype=torch.int16).tolist() == rounded.tolist()


@pytest.mark.parametrize("sample_rate", [8000, 44100, 96000, 47999])
def test_resampling_keeps_pitch_and_loudness(sample_rate: int) -> None:
    decoded = decode(encode(tone(1000, sample_rate), sample_rate, "WAV", "FLOAT"))
    spectrum = np.abs(np.fft.rfft(decoded.numpy() * np.hanning(SECOND)))
    assert spectrum.argmax() == 1000  # one second: bins of 1 Hz
    assert decoded[5000:-5000].abs().max() == pytest.approx(0.5, rel=0.02)
    assert decode(encode(tone(1000, sample_rate, 2.5), sample_rate, "FLAC"))[-2000:].abs().max() > 0.4


@pytest.mark.parametrize(("num_samples", "repeats", "padding"), [(8, 2, 2), (6, 2, 0), (5, 1, 2), (3, 1, 0)])
def test_short_files_are_repeated_and_padded(num_samples: int, repeats: int, padding: int) -> None:
    samples = np.array([0.25, -0.5, 0.75])
    decoded = decode(encode(samples, SECOND, "WAV", "FLOAT"), num_samples=num_samples)
    assert decoded.tolist() == [*samples] * repeats + [0] * padding


@pytest.mark.parametrize("file_format", ["WAV", "FLAC"])
def test_crops_are_exact_slices_from_anywhere(file_format: str) -> None:
    encoded, starts = encode(np.arange(1000, dtype=np.int16), SECOND, file_format, "PCM_16"), set()
    for seed in range(100):
        crop = decode(encoded, num_samples=990, seed=seed, dtype=torch.int16).tolist()
        assert crop == list(range(crop[0], crop[0] + 990))
        starts.add(crop[0])
    assert starts == set(range(11))


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_S8", "PCM_24"])
@pytest.mark.parametrize("num_channels", [1, 2, 3])
def test_int16_is_float32_rounded(subtype: str, num_channels: int) -> None:
    samples = np.random.default_rng(0).integers(-(2**15), 2**15, (70_000, num_channels)).astype(np.int16)
    pairs = [[-1, 0], [0, 1], [1, 2], [-2, -1], [-(2**15), -(2**15)], [2**15 - 1, 2**15 - 1]]
    samples[:6, :2] = np.array(pairs)[:, :num_channels]
    encoded = encode(samples, SECOND, "FLAC", subtype)
    for num_samples in (SECOND, 210_007):
        expected = to_int16(decode(encoded, num_samples=num_samples))
        assert torch.equal(decode(encoded, num_samples=num_samples, dtype=torch.int16), expected)
    if subtype == "PCM_16":
        assert expected[:70_000].tolist() == np.rint(samples.mean(axis=1)).tolist()


def test_crops_of_mostly_silent_audio_are_moved_to_its_sound() -> None:
    samples = np.zeros(40 * 48, dtype=np.float32)
    samples[[70, 1500]] = 0.25, -0.5
    encoded = encode(samples, SECOND, "FLAC")
    crops = [decode(encoded, num_samples=10, seed=seed).tolist() for seed in range(50)]
    assert all(any(crop) for crop in crops)
    assert [0.0] * 5 + [-0.5] + [0.0] * 4 in crops
    assert decode(encoded, num_samples=10, dtype=torch.int16).tolist() == [2**15 * each for each in crops[0]]


FLAC = encode(tone(440, SECOND), SECOND, "FLAC")  # 36 bits from byte 21 on count its samples


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "can't be decoded"),
        (b"not audio at all" * 100, "can't be decoded"),
        (riff(SHORTS, kind=0x2000), "can't be decoded"),  # AC-3
        (encode(tone(440, 16000), 16000, "FLAC")[:8000], "can't be decoded"),
        (riff(SHORTS, size=0), "no samples"),
        (encode(np.array([0.25]), SECOND, "WAV", "FLOAT"), "a single sample"),
        (riff(SHORTS, channels=2)[:48], "a single sample"),
        (encode(np.zeros(10), SECOND, "FLAC"), "silent"),
        (encode(np.zeros((3 * SECOND, 7)), SECOND, "WAV"), "silent"),
        (encode(np.array([0.1, np.nan, 0.2]), 16000, "WAV", "FLOAT"), "NaN or infinite"),
        (encode(np.array([0.1, -np.inf]), 16000, "WAV", "FLOAT"), "NaN or infinite"),
        (encode(tone(440, SECOND), 10**9, "WAV"), "sample rate of 1000000000 Hz"),
        (FLAC[:21] + bytes([FLAC[21] & 0xF0, 0, 0, 0, 0]) + FLAC[26:], "can't be decoded"),  # as written to a pipe
        # An MP3's length stands at its start, so a part of a file still promises all of it.
        (encode(np.random.default_rng(0).uniform(-0.5, 0.5, 4 * SECOND), SECOND, "MP3")[:20000], "breaks off"),
    ],
    ids=itertools.count(),  # encoded audio may hold the time
)
def test_unusable_audio_is_refused_with_a_reason(encoded: bytes, reason: str) -> None:
    for dtype, content in ((torch.float32, encoded), (torch.int16, memoryview(encoded))):
        with pytest.raises(BrokenItemError, match=reason):
            decode(content, num_samples=4 * SECOND, dtype=dtype)


@pytest.mark.skipif(decoding.miniaudio is None, reason="there is no miniaudio for this machine")
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_flac_is_the_same_by_either_decoder(monkeypatch: pytest.MonkeyPatch, channels: int) -> None:
    encoded = encode(np.random.default_rng(0).normal(0, 0.1, (SECOND // 2, channels)), SECOND // 2, "FLAC", "PCM_16")
    rows = []
    for decoder in (decoding.miniaudio, None):
        monkeypatch.setattr(decoding, "miniaudio", decoder)
        rows.append([decode(encoded, dtype=dtype) for dtype in (torch.int16, torch.float32)])
        with pytest.raises(BrokenItemError, match="flac decoder lost sync"):
            decode(encoded[: len(encoded) * 3 // 4])
    assert all(map(torch.equal, *rows))
