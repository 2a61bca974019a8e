"""The clips of evaluation shards: what is said of each and where its audio lies, which a task can use, later the audio itself.

Audio and features longer than the model's clips are cropped in their middle, or with feature fusion heard whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from clap_ds.config.errors import did_you_mean
from clap_ds.config.files import parse_json
from clap_ds.config.model import AudioConfig
from clap_ds.config.schema import ZeroShotSettings
from clap_ds.data.broken import Broken, BrokenItemError
from clap_ds.data.captions import CAPTION_FORMATS, captions_of, in_words
from clap_ds.data.front_end import Kind
from clap_ds.data.samples import choose_clip, read_clip
from clap_ds.data.shard_io import open_shard
from clap_ds.data.tar_samples import DAMAGE, Place, list_items, words
from clap_ds.data.workers import Loader
from clap_ds.evaluation.embedding import class_captions

FIELD = "clap.evaluation"
NUM_EXAMPLES = 5  # quoted in errors
_PIECE = 16  # clips that a worker process hands over at a time

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clip:
    """One item of a shard: the tar's path, its name there, where the encoded audio lies, its text files by extension."""

    shard: str
    key: str
    place: Place
    described: dict[str, bytes]

    @property
    def name(self) -> str:
        return f"{self.shard}: {self.key}"


def list_clips(shards: Iterable[str], kind: Kind = "encoded") -> tuple[list[Clip], list[Broken]]:
    """List the items of tars that hold audio or, of `mel`, features, in order, and what else was met."""
    clips: list[Clip] = []
    broken: list[Broken] = []

    def report(name: str, reason: str) -> None:
        broken.append(Broken(name, reason))

    for shard in shards:
        for item in list_items(shard, report):
            try:
                texts = [extension for extension in CAPTION_FORMATS if extension in item]
                described = {extension: item[extension].read(item["__file__"]) for extension in texts}
                clips.append(Clip(shard, item["__key__"], choose_clip(item, kind), described))
            except (BrokenItemError, *DAMAGE) as error:
                report(f"{shard}: {item['__key__']}", words(error))
    return clips, broken


def classes_of(described: Mapping[str, bytes], field: str) -> list[str]:
    """Read a clip's classes in a field of its json; a BrokenItemError where that holds no class name or list of them."""
    try:
        content = parse_json(described.get("json", b""))
    except ValueError as error:  # of JSON or of UTF-8
        raise BrokenItemError(f"json isn't there or isn't valid: {error}") from None
    value = content.get(field) if isinstance(content, dict) else None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name.strip() for name in names):
        found = f"{value!r} among {', '.join(content) if isinstance(content, dict) else 'no fields'}"
        raise BrokenItemError(f"{field} in its json: expected a class name or a list of them, found {found}")
    return list(dict.fromkeys(name.strip() for name in names))


@dataclass(frozen=True)
class Plan:
    """What a task uses: numbers of clips among all, and their captions; for zero-shot those of classes, and each clip's
    classes."""

    clips: list[int]
    captions: list[list[str]]
    classes: list[list[int]] | None = None
    names: tuple[str, ...] = ()


def plan_retrieval(clips: dict[int, Clip]) -> tuple[Plan, list[Broken]]:
    """Choose the clips that have a caption; a ValueError if none has."""
    found, broken = _read(clips, captions_of, f"{FIELD}.retrieval.shards: expected clips with captions")
    return Plan(list(found), list(found.values())), broken


def plan_zero_shot(clips: dict[int, Clip], settings: ZeroShotSettings) -> tuple[Plan, list[Broken]]:
    """Choose the clips that have a class; a ValueError if none has, one isn't expected, or there are fewer than two."""
    field = settings.class_key
    wanted = f"{FIELD}.zero_shot.shards: expected clips with {field!r} ({FIELD}.zero_shot.class_key) in a json"
    found, broken = _read(clips, partial(classes_of, field=field), wanted)
    examples = {name: clips[number] for number, names in reversed(found.items()) for name in names}
    classes = settings.classes or {name: [in_words(name)] for name in sorted(examples)}
    for unknown in sorted(examples.keys() - classes.keys()):
        where = f"the shards have {unknown!r} ({examples[unknown].name})"
        raise ValueError(f"{FIELD}.zero_shot.classes: {where}{did_you_mean(unknown, classes)}")
    if len(classes) < 2:
        raise ValueError(f"{FIELD}.zero_shot.classes: expected at least 2 classes to tell apart, found {list(classes)}")
    captions = class_captions(classes, settings.templates)
    index = {name: number for number, name in enumerate(classes)}
    of_each = [[index[name] for name in names] for names in found.values()]
    return Plan(list(found), captions, of_each, (*classes,)), broken


def _read(
    clips: dict[int, Clip], read: Callable[[Mapping[str, bytes]], T], expected: str
) -> tuple[dict[int, T], list[Broken]]:
    found, broken = dict[int, T](), []
    for number, clip in clips.items():
        try:
            found[number] = read(clip.described)
        except BrokenItemError as error:
            broken.append(Broken(clip.name, str(error)))
    if not found:
        examples = "; ".join(map(str, broken[:NUM_EXAMPLES])) or "none with audio"
        raise ValueError(f"{expected}, found none among {len(clips)}: {examples}")
    return found, broken


class _ClipAudio(Dataset[Tensor | str]):
    def __init__(self, clips: list[Clip], audio: AudioConfig, kind: Kind) -> None:
        self._open_shard = lru_cache(maxsize=1)(open_shard)
        self._clips, self._audio, self._kind = clips, audio, kind

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, number: int) -> Tensor | str:
        clip, row = self._clips[number], empty_row(self._audio, self._kind)
        try:
            encoded = clip.place.read(self._open_shard(clip.shard))
            read_clip(encoded, row, audio=self._audio, rng=Middle())
            return row
        except BrokenItemError as error:
            return str(error)
        except DAMAGE as error:
            return f"its tar can't be read: {words(error)}"


class Middle(random.Random):
    """Draws the middle of the places a crop can be at."""

    def randint(self, low: int, high: int) -> int:
        return (low + high) // 2


def empty_row(audio: AudioConfig, kind: Kind) -> Tensor:
    """Make zeros for a clip: of `mel` features (num_frames, mel_bins) float16, else float32 a waveform (num_samples,) or, with
    feature fusion, features (4, num_frames, mel_bins)."""
    return torch.zeros(audio.feature_shape, dtype=torch.float16) if kind == "mel" else torch.zeros(audio.clip_shape)


def load_audio(
    clips: list[Clip], audio: AudioConfig, *, num_workers: int, kind: Kind = "encoded"
) -> Iterator[Tensor | str]:
    """Load clips in order, shaped as `empty_row`, or the reason why one can't be had, by `num_workers` processes (0: this one).
    A ValueError where one of these was killed."""
    if not clips:
        return
    dataset, num_workers = _ClipAudio(clips, audio, kind), min(num_workers, len(clips))
    loader: Loader[Any] = Loader(dataset, num_workers=num_workers, section=FIELD, batch_size=_PIECE, collate_fn=list)
    try:
        for piece in loader:
            yield from piece
    finally:
        loader.close()
