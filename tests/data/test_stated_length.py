"""Test that files which state no length, or a wrong one, are read to their end, and truncated ones
are named."""

import io

import numpy as np
import pytest
import soundfile

from clap_ds.data.decoding import BrokenItemError, open_audio
from tests.data import tars

SECONDS = 3
NUM_SAMPLES = SECONDS * 44100
ID3V1_TAG = b"TAG" + bytes(125)
ID3_TAG = b"ID3\3\0\0\0\0\2\x10" + bytes(2 * 128 + 16)
COVER_TAG = b"ID3\4\0\0\0\x03\0\0" + np.random.default_rng(2).bytes(3 * 2**14)
APE_TAG = b"APETAGEX\xd0\7\0\0\x20\0\0\0" + bytes(16)


def encode(
    file_format: str,
    subtype: str | None = None,
    rate: int = 44100,
    channels: int = 2,
    **options: str,
) -> bytes:
    """Encode noise that becomes quiet after a second, so that the first frames of an MP3 are the
    largest."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (SECONDS * rate, channels))
    noise[rate:] *= 0.01
    return tars.encode(noise, rate, file_format, subtype, **options)


def split_info_frame(mp3: bytes, samples_per_frame: int = 1152) -> tuple[int, bytes]:
    """Return the number of samples in all frames, by the frame that states their number, and the
    other frames."""
    second_frame = mp3.index(mp3[:2], 4)
    name = b"Xing" if b"Xing" in mp3[:second_frame] else b"Info"
    num_frames = int.from_bytes(mp3[mp3.index(name) + 8 :][:4], "big")
    return num_frames * samples_per_frame, mp3[second_frame:]


def read_all(encoded: bytes | str) -> tuple[int, np.ndarray]:
    """Return the number of frames as `open_audio` knows it, and those that can be read."""
    with open_audio(encoded) as file:
        return file.frames, file.read(dtype="float32", always_2d=True)


def assert_length(encoded: bytes | str, expected: int) -> None:
    num_stated, samples = read_all(encoded)
    assert num_stated == expected
    assert len(samples) == expected


def replaced(content: bytes, name: bytes, size: bytes) -> bytes:
    """Replace the bytes behind a name."""
    start = content.index(name) + len(name)
    return content[:start] + size + content[start + len(size) :]


VBR = encode("MP3", bitrate_mode="VARIABLE")
CBR = encode("MP3", bitrate_mode="CONSTANT")
VBR_SAMPLES, VBR_FRAMES = split_info_frame(VBR)


# MPEG-1, and MPEG-2 with half as many samples per frame
@pytest.mark.parametrize(("rate", "samples_per_frame"), [(44100, 1152), (22050, 576)])
def test_mp3_without_length_has_samples_of_all_frames(rate, samples_per_frame):
    """As in ffmpeg, with the encoder's delay, which nothing states: here LAME's 576 and the
    decoder's 529 samples."""
    whole = encode("MP3", rate=rate, bitrate_mode="VARIABLE")
    num_samples, frames = split_info_frame(whole, samples_per_frame)
    assert_length(frames, num_samples)
    _, samples = read_all(frames)
    expected, _ = soundfile.read(io.BytesIO(whole), dtype="float32", always_2d=True)
    np.testing.assert_allclose(samples[1105:][: len(expected)], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("start", "end"),
    [(ID3_TAG + COVER_TAG, ID3V1_TAG), (bytes(300), APE_TAG)],
    ids=["tags", "zeros"],
)
def test_mp3_with_other_bytes_around_frames_has_their_samples(tmp_path, start, end):
    (tmp_path / "a.mp3").write_bytes(start + VBR_FRAMES + end)
    assert_length(str(tmp_path / "a.mp3"), VBR_SAMPLES)


def test_joined_mp3s_are_read_to_the_last():
    assert_length(VBR_FRAMES + COVER_TAG + VBR_FRAMES, 2 * VBR_SAMPLES)
    # The frames that state lengths are frames without sound.
    assert_length(CBR + CBR, 2 * split_info_frame(CBR)[0] + 2 * 1152)


def test_mpeg_layer_2_is_read_to_its_end():
    """Frames of MPEG-1 layer II at 44.1 kHz, without samples; every other one is padded."""
    content = b""
    for number in range(210):
        index, kbps = ((2, 48), (8, 128), (13, 320))[number % 3]
        padding = number % 2
        header = bytes([0xFF, 0xFD, index << 4 | padding << 1, 0])
        content += header.ljust(144000 * kbps // 44100 + padding, b"\0")
    assert_length(content, 210 * 1152)


@pytest.mark.parametrize("fields", [bytes(4), b"\0\0\0\1" + bytes(4)], ids=["no count", "0"])
def test_mp3_whose_xing_frame_states_no_length_is_read_to_its_end(fields):
    """As in ffmpeg, the Xing frame is one without sound."""
    assert_length(replaced(VBR, b"Xing", fields), VBR_SAMPLES + 1152)


def test_mp3_with_length_keeps_it():
    """Its encoder's delay and padding are removed."""
    for content in (CBR, ID3_TAG + VBR):
        assert_length(content, NUM_SAMPLES)


def without_count(flac: bytes) -> bytes:
    """Return a FLAC as a pipe leaves it: its header states 0 samples."""
    return flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]


def test_flac_without_length_is_read_exactly():
    whole = encode("FLAC", "PCM_24")
    expected, _ = soundfile.read(io.BytesIO(whole), dtype="float32")
    with open_audio(without_count(whole)) as file:
        assert file.frames == len(expected)
        file.seek(100_000)
        np.testing.assert_array_equal(file.read(50, dtype="float32"), expected[100_000:][:50])


WAV, AIFF, CAF, RF64, AU, W64 = (
    encode(file_format, "PCM_16") for file_format in ("WAV", "AIFF", "CAF", "RF64", "AU", "W64")
)
VORBIS = encode("OGG", "VORBIS", 48000, 1)
OPUS = encode("OGG", "OPUS", 48000, 1)
FROM_A_PIPE = {
    "WAV, ffmpeg": replaced(WAV, b"data", b"\xff" * 4),
    "AIFF, sox": replaced(AIFF, b"SSND", b"\x7f\0\0\x08"),
    "CAF, ffmpeg": replaced(CAF, b"data", b"\xff" * 8),
    "CAF, sox": replaced(CAF, b"data", bytes(7) + b"\4"),
    "AU, ffmpeg": AU[:8] + b"\xff" * 4 + AU[12:],
    "W64, ffmpeg": W64[: W64.index(b"data") + 16] + b"\xff" * 8 + W64[W64.index(b"data") + 24 :],
    "WAV before a cut chunk": WAV + b"LIST" + b"\1" * 99,
}


@pytest.mark.parametrize("name", FROM_A_PIPE)
def test_file_from_a_pipe_is_read_to_its_end(name, tmp_path):
    expected, _ = soundfile.read(io.BytesIO(WAV), dtype="float32")
    (tmp_path / "a").write_bytes(FROM_A_PIPE[name])
    num_stated, samples = read_all(str(tmp_path / "a"))
    assert num_stated == len(expected)
    np.testing.assert_array_equal(samples, expected)


@pytest.mark.parametrize("content", [VORBIS, OPUS], ids=["Vorbis", "Opus"])
def test_ogg_with_padding_or_without_end_mark_is_whole(content):
    assert_length(content + bytes(200_000), SECONDS * 48000)
    # as an encoder that is stopped leaves it
    num_stated, samples = read_all(content[: content.rindex(b"OggS")])
    assert num_stated == len(samples) > 48000


CUT = {
    "VBR": VBR_FRAMES,
    "FLAC": without_count(encode("FLAC")),
    "CAF": CAF,
    "WAV": WAV,
    "AIFF": AIFF,
    "RF64": RF64,
    "W64": W64,
    "AU": AU,
    "Vorbis": VORBIS,
    "Opus": OPUS,
}


@pytest.mark.parametrize("name", CUT)
def test_truncated_file_is_refused(name):
    content = CUT[name][: int(0.97 * len(CUT[name]))]
    with pytest.raises(BrokenItemError, match="truncated"):
        read_all(content)


REFUSED = {
    "1 byte of a frame": (VBR_FRAMES + VBR_FRAMES[:1], "truncated"),
    # with the number of another stream
    "joined Oggs": (VORBIS + VORBIS.replace(VORBIS[14:18], b"next"), "several Ogg streams"),
    "no bytes": (b"", "empty"),
    "m4a": (b"\0\0\0\x20ftypM4A " + bytes(99), "ffmpeg -i"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_file_is_refused_with_reason(name):
    content, reason = REFUSED[name]
    with pytest.raises(BrokenItemError, match=reason):
        read_all(content)
