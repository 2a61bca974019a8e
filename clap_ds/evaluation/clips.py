"""The clips of evaluation shards: first what is said of each and where its audio lies, later the audio itself.

Tars are gone through once without reading audio, so that captions and classes can be checked before any work is done. Clips are
numbered over all shards in the order of files and tars, and ranks take turns, so that each is used exactly once however many
ranks and workers there are. Audio longer than the model's clips is cropped in its middle.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import fsspec
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from webdataset.tariterators import group_by_keys

from clap_ds.config.model import AudioConfig
from clap_ds.data.items import AUDIO_FORMATS, CAPTION_FORMATS, BrokenItemError, captions_of, decode_audio
from clap_ds.data.shard_files import again, is_remote, open_shard
from clap_ds.data.shard_reader import Broken
from clap_ds.data.workers import leave_signals_to_rank

_DAMAGE = (tarfile.TarError, EOFError, zlib.error)
_PIECE = 16  # clips that a worker process hands over at a time
_READ_AHEAD = 2**16  # bytes of a remote tar fetched for a header


@dataclass(frozen=True, slots=True)
class Clip:
    """One item of a shard. What can't be used says why.

    Attributes:
        shard, key: the tar's path and the item's name in it.
        start, size: bytes of the tar (uncompressed) that hold the encoded audio.
        captions: all of them, or the reason why there are none.
        content: of its json, or the reason why there is none.
    """

    shard: str
    key: str
    start: int
    size: int
    captions: list[str] | BrokenItemError
    content: Any | BrokenItemError

    @property
    def name(self) -> str:
        return f"{self.shard}: {self.key}"


def list_clips(shards: Iterable[str]) -> tuple[list[Clip], list[Broken]]:
    """The items of tars that hold audio, in order, and what else was met."""
    clips: list[Clip] = []
    broken: list[Broken] = []
    for shard in shards:
        try:
            found, damage = again(lambda: _list(shard)) if is_remote(shard) else _list(shard)  # noqa: B023
        except OSError as error:
            found, damage = [], [Broken(shard, f"tar can't be read: {error.strerror or error}")]
        clips += found
        broken += damage
    return clips, broken


def _list(shard: str) -> tuple[list[Clip], list[Broken]]:
    clips: list[Clip] = []
    broken: list[Broken] = []

    def report(error: Exception) -> bool:
        broken.append(Broken(shard, f"tar can't be read: {error.args[0] if error.args else error!r}"))
        return True

    try:
        with ExitStack() as stack:
            for item in group_by_keys(_members(_open(shard, stack), shard, report), handler=report):
                audio = [item[extension] for extension in AUDIO_FORMATS if extension in item]
                if audio:
                    captions, content = _captions(item), _content(item)
                    clips.append(Clip(shard, item["__key__"], audio[0].offset_data, audio[0].size, captions, content))
                else:
                    reason = f"no audio ({', '.join(AUDIO_FORMATS)}) among its files"
                    broken.append(Broken(f"{shard}: {item['__key__']}", reason))
    except _DAMAGE as error:
        report(error)
    return clips, broken


def _members(tar: tarfile.TarFile, shard: str, report: Callable[[Exception], bool]) -> Iterator[dict[str, Any]]:
    """The files of a tar, as webdataset groups them: descriptions by their content, the others by their place."""
    endings = tuple(f".{extension}" for extension in CAPTION_FORMATS)
    try:
        for member in tar:
            if member.isfile():
                content = tar.extractfile(member) if member.name.lower().endswith(endings) else None
                yield {"fname": member.name, "data": member if content is None else content.read(), "__url__": shard}
        # tarfile takes damage, or a cut between two members, for the end.
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            report(EOFError("no end-of-archive mark; what can be read of it is used"))
    except _DAMAGE as error:
        report(error)


def _open(shard: str, stack: ExitStack) -> tarfile.TarFile:
    """A tar whose members can be read in any order, `stack` to close it."""
    if is_remote(shard):
        stream = stack.enter_context(fsspec.open(shard, "rb", block_size=_READ_AHEAD, expand=False).open())
    else:
        stream = stack.enter_context(open_shard(shard))
    return stack.enter_context(tarfile.open(fileobj=stream, mode="r:*"))


def _captions(described: Mapping[str, bytes]) -> list[str] | BrokenItemError:
    try:
        return captions_of(described)
    except BrokenItemError as error:
        return error


def _content(described: Mapping[str, bytes]) -> Any | BrokenItemError:
    if "json" not in described:
        return BrokenItemError("no json")
    try:
        return json.loads(described["json"].decode("utf-8-sig"))
    except ValueError as error:  # of JSON or of UTF-8
        return BrokenItemError(f"json isn't valid: {error}")


def classes_of(clip: Clip, field: str) -> list[str]:
    """The classes a clip is of, by its json.

    Raises:
        BrokenItemError: no such field, or neither a class name nor a list of them.
    """
    if isinstance(clip.content, BrokenItemError):
        raise clip.content
    if not isinstance(clip.content, dict) or field not in clip.content:
        raise BrokenItemError(f"no {field} in its json")
    found = clip.content[field]
    names = [found] if isinstance(found, str) else found
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise BrokenItemError(f"{field} in its json: expected a class name or a list of them, found {found!r}")
    return list(dict.fromkeys(name.strip() for name in names))


class ClipAudio(Dataset[Tensor | str]):
    """Waveforms of clips, (num_samples,) float32, or the reason why one can't be had. Keeps the shard last read open."""

    def __init__(self, clips: list[Clip], audio: AudioConfig) -> None:
        self._clips = clips
        self._audio = audio
        self._opened = ""
        self._tar: Any = None
        self._stack = ExitStack()

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, number: int) -> Tensor | str:
        clip = self._clips[number]
        try:
            encoded = again(lambda: self._read(clip), self.close) if is_remote(clip.shard) else self._read(clip)
            if len(encoded) < clip.size:
                return "its tar ends within its audio"
            return decode_audio(
                encoded, sample_rate=self._audio.sample_rate, num_samples=self._audio.num_samples, rng=_Middle()
            )
        except BrokenItemError as error:
            return str(error)
        except (OSError, *_DAMAGE) as error:
            return f"its tar can't be read: {error}"

    def _read(self, clip: Clip) -> bytes:
        if self._opened != clip.shard:
            self.close()
            self._tar = _open(clip.shard, self._stack)
            self._opened = clip.shard
        self._tar.fileobj.seek(clip.start)
        content: bytes = self._tar.fileobj.read(clip.size)
        return content

    def close(self) -> None:
        self._opened = ""
        self._stack.close()


class _Middle(random.Random):
    """Draws the middle of the places a crop can be at."""

    def randint(self, low: int, high: int) -> int:
        return (low + high) // 2


class LoadingError(ValueError):
    """A decoding process is gone."""


def load_audio(clips: list[Clip], audio: AudioConfig, *, num_workers: int) -> Iterator[Tensor | str]:
    """Waveforms of clips in order, or the reason why one can't be had.

    Args:
        num_workers: processes that decode; 0: this one.

    Raises:
        LoadingError: one of these processes was killed.
    """
    if not clips:
        return
    dataset = ClipAudio(clips, audio)
    loader = DataLoader(
        dataset,
        batch_size=_PIECE,
        collate_fn=list,
        num_workers=min(num_workers, len(clips)),
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # leaves the global one as it is
    )
    handler = signal.getsignal(signal.SIGCHLD)
    pieces = iter(loader)
    if handler is not None and threading.current_thread() is threading.main_thread():
        # torch's handler would raise a worker's death wherever the training process is; `next` finds it too.
        signal.signal(signal.SIGCHLD, handler)
    try:
        while (piece := next(pieces, None)) is not None:
            yield from piece
    except Exception as error:  # of several kinds, depending on what a process's end leaves undone
        for process in getattr(pieces, "_workers", []):
            process.join(timeout=1)  # its end may show a little later than what it left undone
            if process.exitcode:
                raise LoadingError(f"a decoding process ended with {process.exitcode}: {error}") from error
        raise
    finally:
        dataset.close()


def _start_worker(worker: int) -> None:
    leave_signals_to_rank()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
