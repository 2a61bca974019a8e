"""List the clips of evaluation shards, plan tasks on them and load their audio.

Audio and features longer than the model's clips are center-cropped, or used whole with feature
fusion.
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

from clap_ds.config.model import AudioConfig
from clap_ds.config.schema import RetrievalSettings, ZeroShotSettings
from clap_ds.data.build_shards.caption_lists import in_words
from clap_ds.data.clip import (
    CAPTION_FORMATS,
    Broken,
    captions_of,
    choose_clip,
    read_clip,
    values_by_name,
)
from clap_ds.data.decoding import BrokenItemError
from clap_ds.data.shard_io import Kind, open_shard
from clap_ds.data.shard_manifest import DAMAGE, Place, list_items, words
from clap_ds.data.workers import Loader
from clap_ds.evaluation.embedding import class_captions
from clap_ds.utils.errors import did_you_mean

FIELD = "clap.evaluation"
NUM_EXAMPLES = 5  # quoted in errors
_PIECE = 16  # clips per transfer from a worker process

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clip:
    """Locate an item: its tar, its name there, the place of its encoded audio, and its text files
    by extension."""

    shard: str
    key: str
    place: Place
    described: dict[str, bytes]

    @property
    def name(self) -> str:
        return f"{self.shard}: {self.key}"


def list_clips(shards: Iterable[str], kind: Kind = "encoded") -> tuple[list[Clip], list[Broken]]:
    """List the items with audio (`mel`: features) in tars, in order, and the unusable ones."""
    clips: list[Clip] = []
    broken: list[Broken] = []

    def report(name: str, reason: str) -> None:
        broken.append(Broken(name, reason))

    for shard in shards:
        for item in list_items(shard, report):
            try:
                texts = [extension for extension in CAPTION_FORMATS if extension in item]
                described = {
                    extension: item[extension].read(item["__file__"]) for extension in texts
                }
                clips.append(Clip(shard, item["__key__"], choose_clip(item, kind), described))
            except (BrokenItemError, OSError) as error:
                report(f"{shard}: {item['__key__']}", str(error))
    return clips, broken


def classes_of(described: Mapping[str, bytes], field: str) -> list[str]:
    """Return a clip's classes from a field of its json. Raises BrokenItemError if it holds no class
    name or list of them."""
    value = values_by_name(described, field).get(field)
    names = [value] if isinstance(value, str) else value
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(name, str) and name.strip() for name in names)
    ):
        raise BrokenItemError(
            f"{field} in its json: expected a class name or a list of them, found {value!r}"
        )
    return list(dict.fromkeys(name.strip() for name in names))


@dataclass(frozen=True)
class Plan:
    """Hold a task's clips (indices into all) with their captions or, for zero-shot, captions of
    classes and the clips' classes."""

    clips: list[int]
    captions: list[list[str]]
    classes: list[list[int]] | None = None


def plan_retrieval(
    clips: dict[int, Clip], settings: RetrievalSettings
) -> tuple[Plan, list[Broken]]:
    """Select the clips with captions. Raises ValueError for none."""
    read = partial(captions_of, key=settings.caption_key)
    found, broken = _read(clips, read, f"{FIELD}.retrieval.shards: expected clips with captions")
    return Plan(list(found), list(found.values())), broken


def plan_zero_shot(clips: dict[int, Clip], settings: ZeroShotSettings) -> tuple[Plan, list[Broken]]:
    """Select the clips with classes. Raises ValueError for no clips, an unknown class, or fewer
    than two classes."""
    field = settings.class_key
    wanted = f"{FIELD}.zero_shot.shards: expected clips with {field!r} ({FIELD}.zero_shot.class_key) in a json"
    found, broken = _read(clips, partial(classes_of, field=field), wanted)
    examples = {name: clips[number] for number, names in reversed(found.items()) for name in names}
    classes = settings.classes or {name: [in_words(name)] for name in sorted(examples)}
    for unknown in sorted(examples.keys() - classes.keys()):
        where = f"the shards have {unknown!r} ({examples[unknown].name})"
        raise ValueError(f"{FIELD}.zero_shot.classes: {where}{did_you_mean(unknown, classes)}")
    if len(classes) < 2:
        raise ValueError(
            f"{FIELD}.zero_shot.classes: expected at least 2 classes, found {list(classes)}"
        )
    captions = class_captions(classes, settings.templates)
    index = {name: number for number, name in enumerate(classes)}
    of_each = [[index[name] for name in names] for names in found.values()]
    return Plan(list(found), captions, of_each), broken


def _read(
    clips: dict[int, Clip], read: Callable[[Mapping[str, bytes]], T], expected: str
) -> tuple[dict[int, T], list[Broken]]:
    found = dict[int, T]()
    broken = []
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
        self._clips = clips
        self._audio = audio
        self._kind = kind

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, number: int) -> Tensor | str:
        clip = self._clips[number]
        row = empty_row(self._audio, self._kind)
        try:
            encoded = clip.place.read(self._open_shard(clip.shard))
            read_clip(encoded, row, audio=self._audio, rng=Middle())
            return row
        except DAMAGE as error:
            return words(error)


class Middle(random.Random):
    """Return the middle of each range, to center crops."""

    def randint(self, low: int, high: int) -> int:
        return (low + high) // 2


def empty_row(audio: AudioConfig, kind: Kind) -> Tensor:
    """Return zeros for a clip: (num_frames, mel_bins) float16 for `mel`; else float32,
    (num_samples,) or, with feature fusion, (4, num_frames, mel_bins)."""
    return (
        torch.zeros(audio.feature_shape, dtype=torch.float16)
        if kind == "mel"
        else torch.zeros(audio.clip_shape)
    )


def load_audio(
    clips: list[Clip], audio: AudioConfig, *, num_workers: int, kind: Kind = "encoded"
) -> Iterator[Tensor | str]:
    """Yield clips in order, shaped like `empty_row`, or the reason why one is unusable, from
    `num_workers` processes (0: this one). Raises ValueError if one was killed."""
    dataset = _ClipAudio(clips, audio, kind)
    num_workers = min(num_workers, len(clips))
    loader: Loader[Any] = Loader(
        dataset, num_workers=num_workers, section=FIELD, batch_size=_PIECE, collate_fn=list
    )
    try:
        for piece in loader:
            yield from piece
    finally:
        loader.close()
