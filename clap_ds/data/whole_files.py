"""Whether all of an audio file is there, by what its header promises: one rule for all that decode."""

from __future__ import annotations

import os
from typing import BinaryIO, Literal

from clap_ds.data.broken import BrokenItemError

_ORDERS: dict[bytes, Literal["little", "big"]] = {b"RIFF": "little", b"RF64": "little", b"RIFX": "big", b"FORM": "big"}
_OF_A_STREAM = 0x7FFF0000  # sizes from here on stand in WAVs written to a pipe: sox 0x7FFFF000, ffmpeg 0xFFFFFFFF
_MOST_CHUNKS = 1000  # looked at; files have some ten
_LONGEST_PAGE = 27 + 255 + 255 * 255  # bytes of an Ogg page (RFC 3533)
_IS_LAST = 4  # flag of a page, the end of its stream


def check_whole(file: BinaryIO) -> None:
    """Raise BrokenItemError for a WAV or AIFF that ends within its samples, or an Ogg without the last page of a stream.

    Of FLAC and MP3 only decoding shows it. Sizes as programs write them to a pipe, 0 or huge, promise nothing.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(4)
    if start == b"OggS":
        file.seek(max(0, size - _LONGEST_PAGE))
        tail = file.read()
        page = tail[max(0, tail.rfind(b"OggS\0")) :]
        is_there = len(page) > 26 and len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
        if not (is_there and page[5] & _IS_LAST):
            raise BrokenItemError("audio breaks off: the last page of its Ogg stream isn't there")
    elif start in _ORDERS:
        place, stated = _samples(file, _ORDERS[start])
        if size < place + stated:
            raise BrokenItemError(f"audio breaks off: {size - place} of {stated} bytes of samples are there")


def _samples(file: BinaryIO, order: Literal["little", "big"]) -> tuple[int, int]:
    """Find where the samples begin, and how many bytes the header promises; 0 where it doesn't."""
    place, of_64_bits = 12, 0
    for _ in range(_MOST_CHUNKS):
        file.seek(place)
        name, size = file.read(4), int.from_bytes(file.read(4), order)
        place += 8
        if name == b"ds64":
            of_64_bits = int.from_bytes(file.read(16)[8:], order, signed=True)
        elif name in (b"data", b"SSND"):
            return place, size if size < _OF_A_STREAM else of_64_bits
        place += size + size % 2
    return 0, 0
