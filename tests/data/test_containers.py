"""Audio files as programs and people leave them: odd encodings and headers."""

import random
import struct

import numpy as np
import pytest
import torch

from clap_ds.data.broken import BrokenItemError
from clap_ds.data.decoding import decode_audio
from tests.data.test_decoding import encode, tone

RATE = 48000
RNG = np.random.default_rng(0)


def decode(encoded: bytes, num_samples: int, dtype: torch.dtype = torch.float32) -> np.ndarray:
    row = torch.empty(num_samples, dtype=dtype)
    decode_audio(encoded, row, sample_rate=RATE, rng=random.Random(0))
    return row.numpy()


def riff(
    data: bytes,
    kind: int = 1,
    bits: int = 16,
    *,
    channels: int = 1,
    extended: bool = False,
    before: bytes = b"",
    size: int = -1,
) -> bytes:
    """A WAV file made by hand: `before` its data other chunks, `size` in its header where that isn't the data's."""
    frame = channels * bits // 8
    description = struct.pack("<HHIIHH", 0xFFFE if extended else kind, channels, RATE, RATE * frame, frame, bits)
    if extended:  # with the speakers' positions, and the kind in a GUID
        description += struct.pack("<HHI", 22, bits, 2**channels - 1)
        description += struct.pack("<H", kind) + bytes.fromhex("000000001000800000aa00389b71")
    chunks = b"WAVEfmt " + struct.pack("<I", len(description)) + description + before
    chunks += b"data" + struct.pack("<I", len(data) if size < 0 else size) + data
    return b"RIFF" + struct.pack("<I", len(chunks) if size < 0 else min(size + 36, 2**32 - 1)) + chunks


def mu_law(codes: np.ndarray) -> np.ndarray:
    """ITU-T G.711's table 2, in 16 bits."""
    exponent, mantissa = (~codes >> 4) & 7, ~codes & 15
    magnitude = ((2 * mantissa + 33) << (exponent + 2)) - 132
    return np.where(codes & 128, magnitude, -magnitude) / 2**15


def a_law(codes: np.ndarray) -> np.ndarray:
    """ITU-T G.711's table 1, in 16 bits."""
    codes = codes ^ 0x55
    exponent, mantissa = (codes >> 4) & 7, codes & 15
    magnitude = np.where(exponent == 0, 2 * mantissa + 1, (2 * mantissa + 33) << np.maximum(exponent - 1, 0)) << 3
    return np.where(codes & 128, magnitude, -magnitude) / 2**15


NUMBERS = RNG.integers(-(2**15), 2**15, 960)
LARGE = RNG.integers(-(2**23), 2**23, 960)
FLOATS = RNG.uniform(-1.5, 1.5, 960).astype(np.float32)
CODES = np.arange(256)
SHORTS, PLAIN = NUMBERS.astype("<i2").tobytes(), NUMBERS / 2**15
LIST = b"LIST" + struct.pack("<I", 26) + b"INFOISFT" + struct.pack("<I", 14) + b"Lavf59.27.100\0"
EXACT = {
    "8 bits": (riff(CODES.astype(np.uint8).tobytes(), bits=8), (CODES - 128) / 2**7),
    "24 bits": (riff(LARGE.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes(), bits=24), LARGE / 2**23),
    "float": (riff(FLOATS.tobytes(), 3, 32), FLOATS),
    "double": (riff(FLOATS.astype(float).tobytes(), 3, 64), FLOATS),
    "A-law": (riff(CODES.astype(np.uint8).tobytes(), 6, 8), a_law(CODES)),
    "mu-law": (riff(CODES.astype(np.uint8).tobytes(), 7, 8), mu_law(CODES)),
    "extensible": (riff(SHORTS, extended=True), PLAIN),
    "extensible float": (riff(FLOATS.tobytes(), 3, 32, extended=True), FLOATS),
    "2 channels": (riff(SHORTS, channels=2), PLAIN.reshape(-1, 2).mean(axis=1)),
    "6 channels": (riff(SHORTS, channels=6, extended=True), PLAIN.reshape(-1, 6).mean(axis=1)),
    "LIST before": (riff(SHORTS, before=LIST), PLAIN),
    "bext before": (riff(SHORTS, before=b"bext" + struct.pack("<I", 602) + bytes(602)), PLAIN),
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
    assert decode(encoded, len(samples), torch.int16).tolist() == rounded.tolist()


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "can't be decoded"),
        (riff(SHORTS)[:20], "can't be decoded"),
        (riff(b""), "no samples"),
        (riff(SHORTS, size=0), r"no samples, by the header of its 1964 bytes; .* pipe"),
        (riff(SHORTS, channels=2)[:48], "a single sample"),
        (riff(SHORTS, kind=0x2000), "can't be decoded"),  # AC-3
    ],
    ids=("empty file", "cut in its header", "no data", "no length", "cut in its data", "unknown kind"),
)
def test_wav_files_of_no_use_are_refused_with_a_reason(encoded: bytes, reason: str) -> None:
    with pytest.raises(BrokenItemError, match=reason):
        decode(encoded, 480)


@pytest.mark.parametrize(
    ("channels", "tolerance"), [(1, 0.05), (2, 0.05), (6, 0.2)]
)  # the sixth keeps only low frequencies
def test_opus(channels: int, tolerance: float) -> None:
    sound = tone(440, RATE) + 0.2 * tone(1234, RATE)
    decoded = decode(encode(np.stack([sound] * channels, axis=1), RATE, "OGG", "OPUS"), RATE)
    middle = slice(4800, -4800)
    assert np.linalg.norm((decoded - sound)[middle]) < tolerance * np.linalg.norm(sound[middle])


@pytest.mark.parametrize("num_bytes", [10, 1_000_000])
def test_pictures_and_tags_in_mp3_files_are_passed_over(num_bytes: int) -> None:
    plain = encode(tone(440, RATE), RATE, "MP3")
    picture = b"\0image/jpeg\0\3\0" + RNG.bytes(num_bytes)
    frame = b"APIC" + struct.pack(">IH", len(picture), 0) + picture
    size = bytes(len(frame) >> shift & 127 for shift in (21, 14, 7, 0))
    tagged = b"ID3\3\0\0" + size + frame + plain + b"TAG".ljust(128, b"x")
    assert decode(tagged, RATE).tolist() == decode(plain, RATE).tolist()
