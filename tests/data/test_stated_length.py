"""Test that files which state no length, or a wrong one, are read to their end, and truncated ones
are named."""

import functools
import io
import random
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.config.model import load_preset
from clap_ds.data.build_shards.caption_lists import audio_files_in
from clap_ds.data.build_shards.prepare import Preparation, keep_file
from clap_ds.data.decoding import BrokenItemError, decode_audio, open_audio
from clap_ds.inference.audio_windows import read_windows

SECONDS = 3
MPEG_1 = (32000, 44100, 48000)
ID3_TAG = b"ID3\3\0\0\0\0\2\x10" + bytes(2 * 128 + 16)
COVER_TAG = b"ID3\4\0\0\0\x03\0\0" + np.random.default_rng(2).bytes(3 * 2**14)
APE_TAG = b"APETAGEX\xd0\7\0\0\x20\0\0\0" + bytes(16)
MP3_OPTIONS = {"VBR": {"bitrate_mode": "VARIABLE"}, "CBR": {"bitrate_mode": "CONSTANT"}}


def sound(sample_rate: int, channels: int) -> np.ndarray:
    """Return noise that becomes quiet after a second, so that the first frames of an MP3 are the
    largest."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (SECONDS * sample_rate, channels))
    noise[sample_rate:] *= 0.01
    return noise


@functools.cache
def encode(
    sample_rate: int, channels: int, file_format: str, subtype: str | None = None, **options: str
) -> bytes:
    buffer = io.BytesIO()
    samples = sound(sample_rate, channels)
    soundfile.write(buffer, samples, sample_rate, format=file_format, subtype=subtype, **options)
    return buffer.getvalue()


def split_info_frame(mp3: bytes) -> tuple[int, bytes]:
    """Return the number of samples in all frames, by the frame that states their number, and the
    other frames."""
    start_of_sound = mp3.index(mp3[:2], 4)
    name = b"Xing" if b"Xing" in mp3[:start_of_sound] else b"Info"
    stated = int.from_bytes(mp3[mp3.index(name) + 8 :][:4], "big")
    with soundfile.SoundFile(io.BytesIO(mp3)) as file:
        samples_per_frame = 1152 if file.samplerate in MPEG_1 else 576
    return stated * samples_per_frame, mp3[start_of_sound:]


def read_all(encoded: bytes | str) -> tuple[int, np.ndarray]:
    """Return the number of frames as `open_audio` knows it, and those that can be read."""
    with open_audio(encoded) as file:
        return file.frames, file.read(dtype="float32", always_2d=True)


def without_count(flac: bytes) -> bytes:
    """Return a FLAC as a pipe leaves it: its header states 0 samples."""
    return flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]


@pytest.mark.parametrize("mode", MP3_OPTIONS)
@pytest.mark.parametrize(
    ("sample_rate", "channels"), [(44100, 2), (48000, 1), (22050, 2), (11025, 1), (8000, 1)]
)
def test_an_mp3_that_states_no_length_has_all_samples_of_its_frames(
    sample_rate: int, channels: int, mode: str
) -> None:
    """As in ffmpeg, with the encoder's delay, which nothing states: here LAME's 576 and the
    decoder's 529 samples."""
    whole = encode(sample_rate, channels, "MP3", **MP3_OPTIONS[mode])
    num_samples, frames = split_info_frame(whole)
    stated, samples = read_all(frames)
    assert (stated, len(samples)) == (num_samples, num_samples)
    expected, _ = soundfile.read(io.BytesIO(whole), dtype="float32", always_2d=True)
    np.testing.assert_allclose(samples[1105:][: len(expected)], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "in_front", [ID3_TAG, COVER_TAG, ID3_TAG + COVER_TAG], ids=["tag", "cover", "two tags"]
)
@pytest.mark.parametrize(
    "behind", [b"TAG" + bytes(125), APE_TAG, bytes(9999)], ids=["ID3v1", "APE", "zeros"]
)
def test_tags_and_padding_do_not_count_as_sound(in_front: bytes, behind: bytes) -> None:
    num_samples, frames = split_info_frame(encode(44100, 2, "MP3"))
    stated, samples = read_all(in_front + frames + behind)
    assert (stated, len(samples)) == (num_samples, num_samples)


def test_mp3s_in_a_row_are_read_to_the_last(tmp_path: Path) -> None:
    num_samples, frames = split_info_frame(encode(44100, 2, "MP3"))
    (tmp_path / "a.mp3").write_bytes(frames + COVER_TAG + frames)
    stated, samples = read_all(str(tmp_path / "a.mp3"))
    assert (stated, len(samples)) == (2 * num_samples, 2 * num_samples)


@pytest.mark.parametrize(
    "tag", [b"", ID3_TAG, b"TAG" + bytes(125), bytes(417)], ids=["bare", "ID3", "ID3v1", "zeros"]
)
def test_mp3s_in_a_row_of_which_the_first_states_its_length_are_read_to_the_last(
    tag: bytes,
) -> None:
    """`cat a.mp3 b.mp3`: the frames that state lengths are frames without sound."""
    whole = encode(44100, 2, "MP3")
    num_samples, _ = split_info_frame(whole)
    stated, samples = read_all(whole + tag + whole)
    assert stated == 2 * num_samples + 2 * 1152
    assert len(samples) == pytest.approx(stated, abs=1152)  # behind a tag, mpg123 may lose a frame


@pytest.mark.parametrize("junk", [bytes(300), b"\xff\xe0 not a frame " * 9], ids=["zeros", "text"])
def test_an_mp3_with_bytes_before_its_first_frame_is_read_to_its_end(
    junk: bytes, tmp_path: Path
) -> None:
    num_samples, frames = split_info_frame(encode(44100, 2, "MP3", **MP3_OPTIONS["VBR"]))
    (tmp_path / "a.mp3").write_bytes(junk + frames)
    stated, samples = read_all(str(tmp_path / "a.mp3"))
    assert (stated, len(samples)) == (num_samples, num_samples)


@pytest.mark.parametrize(
    "bit_rates", [[8], [8, 8, 13, 2, 2, 2, 2], [2, 2, 2, 13, 13]], ids=["CBR", "falling", "rising"]
)
def test_mpeg_layer_2_states_no_length_and_is_read_to_its_end(bit_rates: list[int]) -> None:
    """Frames of MPEG-1 layer II at 44.1 kHz, without samples; every other one is padded."""
    kbps = {2: 48, 8: 128, 13: 320}
    frames = []
    for number in range(210):
        index = bit_rates[number % len(bit_rates)]
        is_padded = number % 2
        header = bytes([0xFF, 0xFD, index << 4 | is_padded << 1, 0])
        frames.append(header.ljust(144000 * kbps[index] // 44100 + is_padded, b"\0"))
    stated, samples = read_all(b"".join(frames))
    assert (stated, len(samples)) == (210 * 1152, 210 * 1152)


@pytest.mark.parametrize(
    "fields", [bytes(4), b"\0\0\0\1" + bytes(4)], ids=["no count", "a count of 0"]
)
def test_an_mp3_whose_xing_frame_states_no_length_is_read_to_its_end(fields: bytes) -> None:
    """As in ffmpeg, the Xing frame is one without sound."""
    whole = encode(44100, 2, "MP3", **MP3_OPTIONS["VBR"])
    num_samples, _ = split_info_frame(whole)
    stated, samples = read_all(with_size(whole, b"Xing", fields))
    assert (stated, len(samples)) == (num_samples + 1152, num_samples + 1152)


@pytest.mark.parametrize("tags", [b"", ID3_TAG], ids=["bare", "tag"])
@pytest.mark.parametrize("options", MP3_OPTIONS.values(), ids=MP3_OPTIONS)
def test_an_mp3_that_states_its_length_keeps_it(tags: bytes, options: dict[str, str]) -> None:
    """Its encoder's delay and padding are removed."""
    stated, samples = read_all(tags + encode(44100, 2, "MP3", **options))
    assert (stated, len(samples)) == (SECONDS * 44100, SECONDS * 44100)


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24"])
def test_a_flac_that_states_no_length_is_read_exactly(subtype: str) -> None:
    whole = encode(44100, 2, "FLAC", subtype)
    expected, _ = soundfile.read(io.BytesIO(whole), dtype="float32")
    with open_audio(without_count(whole)) as file:
        assert file.frames == len(expected)
        np.testing.assert_array_equal(file.read(dtype="float32"), expected)
        file.seek(100_000)
        np.testing.assert_array_equal(file.read(50, dtype="float32"), expected[100_000:][:50])


def with_size(content: bytes, name: bytes, size: bytes) -> bytes:
    place = content.index(name) + len(name)
    return content[:place] + size + content[place + len(size) :]


WAV = encode(8000, 2, "WAV", "PCM_16")
AIFF = encode(8000, 2, "AIFF", "PCM_16")
CAF = encode(8000, 2, "CAF", "PCM_16")
RF64 = encode(8000, 2, "RF64", "PCM_16")
AU = encode(8000, 2, "AU", "PCM_16")
W64 = encode(8000, 2, "W64", "PCM_16")
OGG = {subtype: encode(48000, 1, "OGG", subtype) for subtype in ("VORBIS", "OPUS")}
FROM_A_PIPE = {
    "WAV, 0": with_size(WAV, b"data", bytes(4)),
    "WAV, ffmpeg": with_size(WAV, b"data", b"\xff" * 4),
    "WAV, sox": with_size(WAV, b"data", b"\0\xf0\xff\x7f"),
    "AIFF, ffmpeg": with_size(AIFF, b"SSND", bytes(4)),
    "AIFF, sox": with_size(AIFF, b"SSND", b"\x7f\0\0\x08"),
    "CAF, ffmpeg": with_size(CAF, b"data", b"\xff" * 8),
    "CAF, sox": with_size(CAF, b"data", bytes(7) + b"\4"),
    "CAF, 0": with_size(CAF, b"data", bytes(8)),
    "AU, ffmpeg": AU[:8] + b"\xff" * 4 + AU[12:],
    "W64, ffmpeg": W64[: W64.index(b"data") + 16] + b"\xff" * 8 + W64[W64.index(b"data") + 24 :],
    "RF64 with its size": RF64,
}


@pytest.mark.parametrize("name", FROM_A_PIPE)
def test_samples_of_a_file_from_a_pipe_reach_to_its_end(name: str, tmp_path: Path) -> None:
    expected, _ = soundfile.read(io.BytesIO(WAV), dtype="float32")
    (tmp_path / "a").write_bytes(FROM_A_PIPE[name])
    for encoded in (FROM_A_PIPE[name], str(tmp_path / "a")):
        stated, samples = read_all(encoded)
        assert stated == len(expected)
        np.testing.assert_array_equal(samples, expected)


@pytest.mark.parametrize("subtype", OGG)
def test_an_ogg_with_padding_or_without_an_end_mark_is_whole(subtype: str) -> None:
    stated, samples = read_all(OGG[subtype] + bytes(200_000))
    assert (stated, len(samples)) == (SECONDS * 48000, SECONDS * 48000)
    stated, samples = read_all(
        OGG[subtype][: OGG[subtype].rindex(b"OggS")]
    )  # as an encoder that is stopped leaves it
    assert stated == len(samples) > 48000


def test_oggs_in_a_row_are_refused_because_only_the_first_is_read() -> None:
    whole = OGG["VORBIS"]
    other = whole.replace(whole[14:18], b"next")  # the number of a stream
    with pytest.raises(BrokenItemError, match="several Ogg streams"):
        read_all(whole + other)


def test_a_file_without_bytes_is_called_empty() -> None:
    with pytest.raises(BrokenItemError, match="empty"):
        read_all(b"")


CUT = {
    "VBR": split_info_frame(encode(44100, 2, "MP3", **MP3_OPTIONS["VBR"]))[1],
    "CBR": split_info_frame(encode(22050, 1, "MP3", **MP3_OPTIONS["CBR"]))[1],
    "FLAC": without_count(encode(44100, 2, "FLAC")),
    "CAF": CAF,
    "WAV": WAV,
    "RF64": encode(44100, 2, "RF64"),
    "W64": encode(44100, 2, "W64"),
    "AU": encode(44100, 2, "AU"),
    **OGG,
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("part", [0.3, 0.61, 0.97])
def test_a_truncated_file_is_named_wherever_it_is_cut(name: str, part: float) -> None:
    content = CUT[name][: int(part * len(CUT[name]))]
    with pytest.raises(BrokenItemError, match="truncated"):
        read_all(content)


@pytest.mark.parametrize("bytes_left", [1, 2, 3, 50])
def test_an_mp3_is_truncated_if_a_part_of_a_frame_is_left(bytes_left: int) -> None:
    _, frames = split_info_frame(encode(44100, 2, "MP3"))
    with pytest.raises(BrokenItemError, match="truncated"):
        read_all(frames + frames[:bytes_left])


UNSTATED = {"mp3": CUT["VBR"], "flac": CUT["FLAC"]}


@pytest.mark.parametrize("extension", UNSTATED)
def test_every_reader_knows_the_length_that_the_header_does_not_state(
    extension: str, tmp_path: Path
) -> None:
    content = UNSTATED[extension]
    path = tmp_path / f"a.{extension}"
    path.write_bytes(content)
    audio = load_preset("micro").audio
    num_samples, _ = read_all(content)
    seconds = num_samples / 44100
    assert keep_file(content, extension).seconds == seconds
    assert Preparation("waveform", audio).convert(content).seconds == pytest.approx(
        seconds, abs=1 / audio.sample_rate
    )
    rows = [row for row, _ in read_windows([path], audio, "none", 0, num_workers=0, ahead=1)]
    assert not rows[-1].error
    assert rows[-1].end_s == pytest.approx(seconds, abs=1 / audio.sample_rate)
    crops = torch.zeros(20, 44100)  # the first second is loud
    for seed, crop in enumerate(crops):
        decode_audio(content, crop, sample_rate=44100, rng=random.Random(seed))
    assert (crops.abs().amax(dim=1) < 0.1).any()


@pytest.mark.parametrize(
    "content", [b"\0\0\0\x20ftypM4A " + bytes(99), b"\xff\xf1\x50\x80" * 99], ids=["m4a", "aac"]
)
def test_audio_that_libsndfile_does_not_read_is_named_with_how_to_convert_it(
    content: bytes,
) -> None:
    with pytest.raises(BrokenItemError, match="ffmpeg -i"):
        read_all(content)


def test_folders_list_audio_that_cannot_be_read_so_that_it_is_counted(tmp_path: Path) -> None:
    names = ["a.aifc", "b.m4a", "c.mp2", "d.mp4", "e.oga", "f.spx", "g.webm"]
    for name in [*names, "captions.txt", "cover.jpg"]:
        (tmp_path / name).touch()
    assert [path.name for path in audio_files_in(tmp_path)] == names
