"""Open audio files whose header states no length, or a wrong one, with the length that ffmpeg
decodes.

libsndfile trusts headers: it reads no sample beyond the stated length. It estimates that of an MP3
without a Xing frame from the first frame. Programs that write to a pipe can't go back to the
header, so they leave it without a length.
"""

import io
import os
import re
from typing import Any, BinaryIO, Literal

import soundfile

Encoded = bytes | str
"""A file's content or path."""

# kbit/s by the index in a frame's header (ISO/IEC 11172-3 and 13818-3)
_BIT_RATES = {
    "MPEG_LAYER_II": "0 32 48 56 64 80 96 112 128 160 192 224 256 320 384 0",
    "MPEG_LAYER_III": "0 32 40 48 56 64 80 96 112 128 160 192 224 256 320 0",
    "MPEG-2": "0 8 16 24 32 40 48 56 64 80 96 112 128 144 160 0",
}
_NUM_FRAMES_STATED = re.compile(rb"VBRI|(?:Xing|Info)\0\0\0[\1\3\5\7\t\v\r\x0f](?!\0{4})")
_BYTES_STATED = re.compile(rb"(?:Xing|Info)\0\0\0[\3\7\v\x0f](.{4})(.{4})", re.DOTALL)
"""Numbers of frames and of bytes."""
_CHUNKS = {b"RIFF": (12, 2, 4), b"FORM": (12, 2, 4), b"caff": (8, 1, 8)}
"""Where the chunks of a WAV, AIFF or CAF start, their alignment, and the bytes of a size."""
_SIZES = {b".snd": (8, 4, 24), b"RF64": (20, 8, 8), b"riff": (16, 8, 0)}
"""Where an AU, RF64 or W64 states a size, the bytes of that field, and bytes of the file that the
size doesn't count."""
# Most files have about ten.
_MAX_CHUNKS = 1000
# bytes of an Ogg page (RFC 3533): header, sizes of segments, segments
_MAX_PAGE_BYTES = 27 + 255 + 255 * 255
# bytes that hold the first page of each stream of an Ogg
_FIRST_PAGES_BYTES = 4096
# frames decoded at a time
_FLAC_BLOCK = 2**16
# frames; libsndfile states 2**63 - 1
_UNKNOWN = 2**62


class BrokenItemError(ValueError):
    """The reason why an item can't be used."""


class AudioFile(soundfile.SoundFile):
    """An open audio file that can have fewer frames than libsndfile states."""

    # 0: as libsndfile states
    num_frames = 0

    @property
    def frames(self) -> int:
        return self.num_frames or super().frames

    def seekable(self) -> bool:
        """Return whether soundfile can seek, which it does after each read."""
        return super().seekable() and self.frames < _UNKNOWN


def open_audio_file(encoded: Encoded) -> AudioFile:
    """Open an audio file. Raises BrokenItemError if it is truncated, and soundfile's errors.

    Truncated FLAC and MP3 files that state a length are only found by decoding them.
    """
    with _open_bytes(encoded) as file:
        start = _skip_tags(file)
        magic = file.read(4)
        if not magic:
            raise BrokenItemError("audio file is empty")
        if magic in _SIZES:
            _check_size(file, magic)
        elif magic in _CHUNKS and start == 0:
            encoded = _complete_chunks(file, magic) or encoded
        elif magic == b"OggS":
            _check_ogg(file)
        audio = AudioFile(_open_bytes(encoded) if isinstance(encoded, bytes) else encoded)
        if audio.frames >= _UNKNOWN:
            return _complete_flac(audio)
        if audio.subtype in _BIT_RATES:
            file.seek(start)
            return _complete_mpeg(file, audio)
    return audio


def _open_bytes(encoded: Encoded) -> BinaryIO:
    return io.BytesIO(encoded) if isinstance(encoded, bytes) else open(encoded, "rb")


def _skip_tags(file: BinaryIO) -> int:
    """Seek to behind a file's ID3 tags, which may hold pictures, and return that position."""
    while (header := file.read(10))[:3] == b"ID3":
        size = 0
        # four bytes of seven bits
        for seven_bits in header[6:]:
            size = size << 7 | seven_bits
        file.seek(size, os.SEEK_CUR)
    return file.seek(-len(header), os.SEEK_CUR)


def _complete_chunks(file: BinaryIO, magic: bytes) -> bytes | None:
    """Return a WAV, AIFF or CAF with the size of its samples, or None if libsndfile knows it."""
    position, alignment, size_bytes = _CHUNKS[magic]
    order: Literal["little", "big"] = "little" if magic == b"RIFF" else "big"
    file_bytes = file.seek(0, os.SEEK_END)
    for _ in range(_MAX_CHUNKS):
        file.seek(position)
        name = file.read(4)
        stated = int.from_bytes(file.read(size_bytes), order)
        if name in (b"data", b"SSND"):
            break
        position += 4 + size_bytes + stated + stated % alignment
    else:
        return None
    samples_start = file.tell()
    available = file_bytes - samples_start
    is_from_pipe = _marks_pipe(stated, size_bytes)
    if stated > available and not is_from_pipe:
        raise BrokenItemError(f"audio is truncated: found {available} of {stated} bytes of samples")
    # libsndfile reads a WAV or AIFF from a pipe to its end. 4 bytes are those of an empty CAF.
    if stated > 4 and not (is_from_pipe and magic == b"caff"):
        return None
    file.seek(0)
    content = bytearray(file.read())
    content[samples_start - size_bytes : samples_start] = available.to_bytes(size_bytes, order)
    return bytes(content)


def _marks_pipe(stated: int, size_bytes: int) -> bool:
    """Return whether programs write this size to a pipe: sox 0x7F000008 or 0x7FFFF000, ffmpeg
    0xFFFFFFFF."""
    return stated >> 8 * (size_bytes - 1) >= 0x7F


def _check_size(file: BinaryIO, magic: bytes) -> None:
    """Raise BrokenItemError for an AU, RF64 or W64 that is shorter than it states."""
    position, size_bytes, uncounted_bytes = _SIZES[magic]
    file_bytes = file.seek(0, os.SEEK_END)
    file.seek(position)
    order: Literal["little", "big"] = "big" if magic == b".snd" else "little"
    stated = int.from_bytes(file.read(size_bytes), order) + uncounted_bytes
    if file_bytes < stated and not _marks_pipe(stated, size_bytes):
        raise BrokenItemError(f"audio is truncated: found {file_bytes} of {stated} bytes")


def _check_ogg(file: BinaryIO) -> None:
    """Raise BrokenItemError for an Ogg that ends within a page, or with another stream than it
    begins with."""
    file.seek(0)
    first_pages = file.read(_FIRST_PAGES_BYTES)
    file_bytes = file.seek(0, os.SEEK_END)
    file.seek(max(0, file_bytes - _MAX_PAGE_BYTES))
    # After the sync mark and version: 9 bytes, the stream's number in 4, 8 bytes, the number of
    # segments, their sizes.
    _, sync, page = file.read().rpartition(b"OggS\0")
    if not sync:
        return
    if len(page) > 12 and page[9:13] not in first_pages:
        raise BrokenItemError(
            "audio has several Ogg streams in a row, of which only the first is read: "
            "decode and join them"
        )
    is_header_whole = len(page) > 21
    if not is_header_whole or len(page) < 22 + page[21] + sum(page[22 : 22 + page[21]]):
        raise BrokenItemError("audio is truncated: the last page of its Ogg stream is incomplete")


def _complete_flac(source: AudioFile) -> AudioFile:
    """Open a FLAC that states no length after encoding it anew, because decoded it may be too large
    for memory."""
    content = io.BytesIO()
    options: Any = {"format": "FLAC", "subtype": source.subtype, "compression_level": 0.0}
    with soundfile.SoundFile(content, "w", source.samplerate, source.channels, **options) as target:
        while len(samples := source.read(_FLAC_BLOCK, "int32", always_2d=True)):
            target.write(samples)
    content.seek(0)
    return AudioFile(content)


class _MpegFrames:
    """The frames of MPEG audio, found by their headers of 4 bytes."""

    def __init__(self, content: bytes, audio: AudioFile) -> None:
        self.content = content
        self._sample_rate = audio.samplerate
        is_mpeg_1 = audio.samplerate >= 32000
        self._bit_rates = _BIT_RATES[audio.subtype if is_mpeg_1 else "MPEG-2"].split()
        is_long = is_mpeg_1 or audio.subtype == "MPEG_LAYER_II"
        self.samples_per_frame = 1152 if is_long else 576
        # the first two bytes of all frames, which also state version and layer
        self.sync = b""

    def measure(self, position: int) -> int:
        """Return the bytes of the frame at this position, or 0 if there is none."""
        header = self.content[position : position + 3]
        if len(header) < 3 or header[:2] != self.sync:
            return 0
        bit_rate = 1000 * int(self._bit_rates[header[2] >> 4])
        if bit_rate == 0:
            return 0
        padding = header[2] >> 1 & 1
        return self.samples_per_frame // 8 * bit_rate // self._sample_rate + padding

    def skip_to_first(self) -> None:
        """Cut zeros or text before the first two frames in a row."""
        for candidate in re.finditer(rb"\xff[\xe2-\xff]", self.content):
            self.sync = candidate[0]
            position = candidate.start()
            frame_bytes = self.measure(position)
            if frame_bytes and self.measure(position + frame_bytes):
                self.content = self.content[position:]
                return

    def count(self) -> tuple[int, int]:
        """Return the number of frames, and where the last one ends."""
        num_frames = 0
        position = 0
        end = -1
        while (position := self.content.find(self.sync, position)) >= 0:
            frame_bytes = self.measure(position)
            # At the start, and behind a tag or damage, only two frames in a row are trusted.
            if frame_bytes and (position == end or self.measure(position + frame_bytes)):
                num_frames += 1
                position += frame_bytes
                end = position
            else:
                position += 1
        return num_frames, end


def _complete_mpeg(file: BinaryIO, estimated: AudioFile) -> AudioFile:
    """Open MPEG audio that states no length, with all samples that its frames hold. An encoder's
    delay isn't removed."""
    start = file.read(64)
    num_stated = _count_stated(file, start)
    if _NUM_FRAMES_STATED.search(start) and not num_stated:
        return estimated
    # A Xing frame without a length becomes one without sound. libsndfile would leave it out and
    # estimate from the next.
    content = re.sub(rb"Xing|Info", bytes(4), start) + file.read()
    frames = _MpegFrames(content, estimated)
    frames.skip_to_first()
    num_frames, end = frames.count()
    # One more is the Xing frame. None are found for a single frame, or of free format.
    if num_frames <= num_stated + 1:
        return estimated
    content = frames.content
    if end > len(content) or content[end:] in (frames.sync, frames.sync[:1]):
        raise BrokenItemError("audio is truncated: its last frame is incomplete")
    # libsndfile reads as many samples as there were if all frames were like the first one.
    padded = content.ljust((num_frames + 1) * frames.measure(0), b"\0")
    complete = AudioFile(io.BytesIO(padded))
    complete.num_frames = num_frames * frames.samples_per_frame
    return complete


def _count_stated(file: BinaryIO, start: bytes) -> int:
    """Return the number of frames that a Xing frame states, if other MPEG frames may follow those:
    `cat a.mp3 b.mp3`."""
    stated = _BYTES_STATED.search(start)
    if not stated:
        return 0
    position = file.tell()
    file.seek(position - len(start) + int.from_bytes(stated[2], "big"))
    may_follow = start[:2] in file.read()
    file.seek(position)
    return int.from_bytes(stated[1], "big") if may_follow else 0
