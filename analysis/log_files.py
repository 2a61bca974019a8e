"""A log of any size, plain or gzip, in blocks that end where lines do."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from clap_ds.config.errors import UserError

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 64 << 10
"""A line (or progress bar without line ends) longer than this may be cut between blocks."""


@dataclass
class FileState:
    """What reading a file showed of it."""

    num_bytes: int = 0
    truncated_gzip: bool = False
    binary: bool = False


def blocks(path: Path, state: FileState) -> Iterator[bytes]:
    """Pieces of the (decompressed) file that end at a line's end, carriage returns counted as one; gzip and UTF-16 (which
    becomes UTF-8) are told by content.

    Raises UserError where the file can't be read.
    """
    try:
        with path.open("rb") as raw:
            head = raw.peek(2)[:2]
            stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if head == b"\x1f\x8b" else raw
            if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # what PowerShell's > writes
                encoded = codecs.EncodedFile(raw, "utf-8", "utf-16", errors="replace")
                stream = cast("IO[bytes]", encoded)
            yield from _whole_lines(stream, state)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from error


def _whole_lines(stream: IO[bytes] | gzip.GzipFile, state: FileState) -> Iterator[bytes]:
    carry = b""
    while block := _gzip_block(stream, state) if isinstance(stream, gzip.GzipFile) else stream.read(BLOCK_BYTES):
        if not state.num_bytes:
            state.binary = b"\0" in block[:8192]
        state.num_bytes += len(block)
        block = carry + block
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if len(block) - end > LONGEST_LINE:
            end = len(block) - LONGEST_LINE // 2
        carry = block[end:]
        yield block[:end]
    if carry:
        yield carry + b"\n"


def _gzip_block(stream: gzip.GzipFile, state: FileState) -> bytes:
    """About `BLOCK_BYTES` decompressed; small reads, so that all that precedes a damaged or cut end is kept."""
    block = bytearray()
    try:
        while len(block) < BLOCK_BYTES and (piece := stream.read1(BLOCK_BYTES - len(block))):
            block += piece
    except (EOFError, zlib.error, gzip.BadGzipFile):
        state.truncated_gzip = True
    return bytes(block)
