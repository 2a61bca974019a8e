import io
import itertools
import random
import struct

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.data import decoding, mpg123
from clap_ds.data.batch import to_int16
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.decoding import decode_audio
from tests import needs

SECOND = 48000


def encode(samples: np.ndarray, sample_rate: int, file_format: str, subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, sample_rate, format=file_format, subtype=subtype)
    return buffer.getvalue()


def decode(
    encoded: bytes | memoryview, num_samples: int = SECOND, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    row = torch.empty(num_samples, dtype=dtype)
    decode_audio(encoded, row, sample_rate=SECOND, rng=random.Random(seed))
    return row


def tone(frequency: float, sample_rate: int, seconds: float = 1.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * sample_rate)) / sample_rate)


FORMATS = [
    ("WAV", "FLOAT", 1e-7),
    ("FLAC", "PCM_24", 2**-22),
    ("OGG", "VORBIS", 0.1),
    ("OGG", "OPUS", 0.1),
    ("MP3", None, 0.1),
]


@pytest.mark.parametrize(("file_format", "subtype", "tolerance"), FORMATS)
def test_round_trip(file_format: str, subtype: str | None, tolerance: float) -> None:
    original = tone(440, SECOND) + 0.2 * tone(1234, SECOND)
    decoded = decode(encode(original, SECOND, file_format, subtype)).numpy()
    error = (decoded - original)[2000:-2000]  # lossy codecs smear the abrupt ends
    assert np.abs(error).max() <= tolerance
    assert np.linalg.norm(error) <= min(10 * tolerance, 0.1) * np.linalg.norm(original)


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
    "extensible": (riff(SHORTS, extended=True), PLAIN),
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


@pytest.mark.parametrize("sample_rate", [8000, 22050, 44100, 96000, 47999])
def test_resampling_keeps_pitch_and_loudness(sample_rate: int) -> None:
    decoded = decode(encode(tone(1000, sample_rate), sample_rate, "WAV", "FLOAT"))
    assert decoded.shape == (SECOND,)
    spectrum = np.abs(np.fft.rfft(decoded.numpy() * np.hanning(SECOND)))
    assert spectrum.argmax() == 1000  # one second: bins of 1 Hz
    assert decoded[5000:-5000].abs().max() == pytest.approx(0.5, rel=0.02)
    longer = decode(encode(tone(1000, sample_rate, 2.5), sample_rate, "FLAC"))
    assert longer.shape == (SECOND,)
    assert longer[-2000:].abs().max() > 0.4


@pytest.mark.parametrize(("num_samples", "repeats", "padding"), [(8, 2, 2), (6, 2, 0), (5, 1, 2), (3, 1, 0)])
def test_short_files_are_repeated_and_padded(num_samples: int, repeats: int, padding: int) -> None:
    samples = np.array([0.25, -0.5, 0.75])
    decoded = decode(encode(samples, SECOND, "WAV", "FLOAT"), num_samples=num_samples)
    assert decoded.tolist() == [*samples] * repeats + [0] * padding


@pytest.mark.parametrize("file_format", ["WAV", "FLAC"])
def test_crops_are_exact_slices_from_anywhere(file_format: str) -> None:
    ramp = np.arange(1000, dtype=np.float32) / 2**15
    encoded = encode(ramp, SECOND, file_format, "PCM_16")
    starts = set()
    for seed in range(400):
        crop = decode(encoded, num_samples=990, seed=seed).numpy() * 2**15
        starts.add(start := round(float(crop[0])))
        assert crop.tolist() == list(range(start, start + 990))
    assert starts == set(range(11))


@pytest.mark.parametrize("file_format", ["OGG", "MP3"])
def test_crops_of_lossy_files_match_the_whole(file_format: str) -> None:
    sweep = 0.5 * np.sin(2 * np.pi * 100 * np.geomspace(1, 8, 3 * SECOND) * np.arange(3 * SECOND) / SECOND)
    encoded = encode(sweep, SECOND, file_format)
    whole = decode(encoded, num_samples=3 * SECOND).numpy()
    for seed in range(3):
        crop = decode(encoded, num_samples=SECOND, seed=seed).numpy()
        start = random.Random(seed).randint(0, 2 * SECOND)
        np.testing.assert_allclose(crop, whole[start : start + SECOND], atol=1e-5)


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_S8", "PCM_24"])
@pytest.mark.parametrize("num_channels", [1, 2, 3])
def test_int16_is_float32_rounded(subtype: str, num_channels: int) -> None:
    samples = np.random.default_rng(0).integers(-(2**15), 2**15, (70_000, num_channels)).astype(np.int16)
    pairs = [[-1, 0], [0, 1], [1, 2], [-2, -1], [-(2**15), -(2**15)], [2**15 - 1, 2**15 - 1]]
    samples[:6, :2] = np.array(pairs)[:, :num_channels]
    encoded = encode(samples, SECOND, "FLAC", subtype)
    for num_samples in (SECOND, 210_007):
        expected = to_int16(decode(encoded, num_samples=num_samples))
        for content in (encoded, memoryview(encoded)):
            assert decode(content, num_samples=num_samples, dtype=torch.int16).tolist() == expected.tolist()
    if subtype == "PCM_16":
        assert expected[:70_000].tolist() == np.rint(samples.mean(axis=1)).tolist()


def test_crops_of_mostly_silent_audio_are_moved_to_its_sound() -> None:
    samples = np.zeros(40 * 48, dtype=np.float32)
    samples[[70, 1500]] = 0.25, -0.5
    encoded = encode(samples, SECOND, "FLAC")
    crops = [decode(encoded, num_samples=10, seed=seed).tolist() for seed in range(50)]
    assert all(any(crop) for crop in crops)
    assert [0.0] * 5 + [-0.5] + [0.0] * 4 in crops
    for seed, crop in enumerate(crops):
        assert decode(encoded, num_samples=10, seed=seed, dtype=torch.int16).tolist() == [2**15 * each for each in crop]


FLAC = encode(tone(440, SECOND), SECOND, "FLAC")  # 36 bits from byte 21 on count its samples


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "can't be decoded"),
        (b"not audio at all" * 100, "can't be decoded"),
        (riff(SHORTS, kind=0x2000), "can't be decoded"),  # AC-3
        (encode(tone(440, 16000), 16000, "FLAC")[:8000], "can't be decoded"),
        (encode(np.zeros(0), 16000, "WAV"), "no samples"),
        (riff(SHORTS, size=0), r"no samples, by the header of its 1964 bytes; .* pipe"),
        (encode(np.array([0.25]), SECOND, "WAV", "FLOAT"), "a single sample"),
        (riff(SHORTS, channels=2)[:48], "a single sample"),
        (encode(np.zeros(10), SECOND, "FLAC"), "silent"),
        (encode(np.zeros((3 * SECOND, 7)), SECOND, "WAV"), "silent"),
        (encode(np.array([0.1, np.nan, 0.2]), 16000, "WAV", "FLOAT"), "NaN or infinite"),
        (encode(np.array([0.1, -np.inf]), 16000, "WAV", "FLOAT"), "NaN or infinite"),
        (encode(tone(440, SECOND), 10**9, "WAV"), "sample rate of 1000000000 Hz"),
        (FLAC[:21] + bytes([FLAC[21] & 0xF0, 0, 0, 0, 0]) + FLAC[26:], "doesn't state its length"),
        # An MP3's length stands at its start, so a part of a file still promises all of it.
        (encode(np.random.default_rng(0).uniform(-0.5, 0.5, 4 * SECOND), SECOND, "MP3")[:20000], "breaks off"),
    ],
    ids=itertools.count(),  # encoded audio may hold the time
)
def test_unusable_audio_is_refused_with_a_reason(encoded: bytes, reason: str) -> None:
    for dtype in (torch.float32, torch.int16):
        with pytest.raises(BrokenItemError, match=reason):
            decode(encoded, num_samples=4 * SECOND, dtype=dtype)


@pytest.mark.skipif(decoding.miniaudio is None, reason="there is no miniaudio for this machine")
@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
@pytest.mark.parametrize("sample_rate", [SECOND, SECOND // 2])
def test_flac_is_the_same_by_either_decoder(
    monkeypatch: pytest.MonkeyPatch, channels: int, dtype: torch.dtype, sample_rate: int
) -> None:
    samples = np.random.default_rng(0).normal(0, 0.1, (sample_rate // 2, channels))
    encoded = encode(samples, sample_rate, "FLAC", "PCM_16")
    rows = []
    for decoder in (decoding.miniaudio, None):
        monkeypatch.setattr(decoding, "miniaudio", decoder)
        rows.append(torch.full((SECOND,), 7, dtype=dtype))
        decode_audio(encoded, rows[-1], sample_rate=SECOND, rng=random.Random(0))
        with pytest.raises(BrokenItemError, match="flac decoder lost sync"):
            decode_audio(encoded[: len(encoded) * 3 // 4], rows[-1].clone(), sample_rate=SECOND, rng=random.Random(0))
    assert torch.equal(*rows)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("sample_rate", [SECOND, 44100])
def test_mp3_is_the_same_by_either_decoder(monkeypatch: pytest.MonkeyPatch, channels: int, sample_rate: int) -> None:
    needs.programs("libmpg123.so.0")
    samples = np.random.default_rng(0).normal(0, 0.6, (sample_rate * 3, channels))
    encoded = encode(samples, sample_rate, "MP3")
    assert sum(map(len, mpg123.decode(encoded, len(samples), channels, 1000))) == len(samples)
    damaged = bytearray(encoded)
    damaged[len(encoded) // 2 :][:3000] = bytes(3000)
    found = []
    for is_there in (True, False):
        if not is_there:
            monkeypatch.setattr(mpg123, "_library", lambda: None)
        found.append([decode(content, 4 * SECOND) for content in (encoded, bytes(damaged))])
        assert found[-1][0].abs().max() > 1, "loud samples stay as they are"
        with pytest.raises(BrokenItemError, match="breaks off"):
            decode(encoded[: len(encoded) // 3], 4 * SECOND)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)  # libmpg123 has ways of its own for each processor
