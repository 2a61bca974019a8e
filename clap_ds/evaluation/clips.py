"""List the clips of evaluation shards, plan tasks on them and load their audio.

Audio and features longer than the model's clips are center-cropped, or used whole with feature
fusion.
"""

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
    SkippedSample,
    captions_of,
    choose_clip,
    read_clip,
    values_by_name,
)
from clap_ds.data.decoding import BrokenItemError
from clap_ds.data.shard_io import Kind, open_shard
from clap_ds.data.shard_manifest import DAMAGE, TarMember, describe_error, list_items
from clap_ds.data.workers import Loader
from clap_ds.evaluation.embedding import class_captions
from clap_ds.utils.errors import did_you_mean

# The section that errors name.
FIELD = "clap.evaluation"
# Clips that an error quotes.
NUM_EXAMPLES = 5
# Clips per transfer from a worker process.
_PIECE = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clip:
    """An item of a shard.

    Attributes:
        shard: the tar's path or URL.
        key: the item's name in it.
        place: the item's encoded audio in it.
        described: the item's text files by extension.
    """

    shard: str
    key: str
    place: TarMember
    described: dict[str, bytes]

    @property
    def name(self) -> str:
        return f"{self.shard}: {self.key}"


def list_clips(
    shards: Iterable[str], kind: Kind = "encoded"
) -> tuple[list[Clip], list[SkippedSample]]:
    """List the items with audio (`mel`: features) in tars, in order, and the unusable ones."""
    clips: list[Clip] = []
    broken: list[SkippedSample] = []

    def report(name: str, reason: str) -> None:
        broken.append(SkippedSample(name, reason))

    for shard in shards:
        for item in list_items(shard, report):
            key = item["__key__"]
            try:
                described = {
                    extension: item[extension].read(item["__file__"])
                    for extension in CAPTION_FORMATS
                    if extension in item
                }
                # Only the place of the audio is kept: all clips may not fit in memory.
                clips.append(Clip(shard, key, choose_clip(item, kind), described))
            except (BrokenItemError, OSError) as error:
                report(f"{shard}: {key}", str(error))
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
    # Names without duplicates, in order.
    return list(dict.fromkeys(name.strip() for name in names))


@dataclass(frozen=True)
class Plan:
    """A task's clips and captions.

    Attributes:
        clips: indices into all clips.
        captions: captions of each clip or, for zero-shot, of each class.
        classes: for zero-shot, the classes of each clip.
    """

    clips: list[int]
    captions: list[list[str]]
    classes: list[list[int]] | None = None


def plan_retrieval(
    clips: dict[int, Clip], settings: RetrievalSettings
) -> tuple[Plan, list[SkippedSample]]:
    """Select the clips with captions. Raises ValueError for none."""
    expected = f"{FIELD}.retrieval.shards: expected clips with captions"
    read = partial(captions_of, key=settings.caption_key)
    captions_by_clip, broken = _read_each(clips, read, expected)
    return Plan(list(captions_by_clip), list(captions_by_clip.values())), broken


def plan_zero_shot(
    clips: dict[int, Clip], settings: ZeroShotSettings
) -> tuple[Plan, list[SkippedSample]]:
    """Select the clips with classes. Raises ValueError for no clips, an unknown class, or fewer
    than two classes."""
    field = settings.class_key
    section = f"{FIELD}.zero_shot"
    names_by_clip, broken = _read_each(
        clips,
        partial(classes_of, field=field),
        f"{section}.shards: expected clips with {field!r} ({section}.class_key) in a json",
    )
    # The first clip of each class, which errors name.
    examples: dict[str, Clip] = {}
    for index, names in names_by_clip.items():
        for name in names:
            examples.setdefault(name, clips[index])
    # By default a class has one caption, its name.
    classes = settings.classes or {name: [in_words(name)] for name in sorted(examples)}
    for name in sorted(examples):
        if name not in classes:
            raise ValueError(
                f"{section}.classes: the shards have {name!r}"
                f" ({examples[name].name}){did_you_mean(name, classes)}"
            )
    if len(classes) < 2:
        raise ValueError(f"{section}.classes: expected at least 2 classes, found {list(classes)}")
    numbers = {name: number for number, name in enumerate(classes)}
    classes_by_clip = [[*map(numbers.__getitem__, names)] for names in names_by_clip.values()]
    captions = class_captions(classes, settings.templates)
    return Plan(list(names_by_clip), captions, classes_by_clip), broken


def _read_each(
    clips: dict[int, Clip], read: Callable[[Mapping[str, bytes]], T], expected: str
) -> tuple[dict[int, T], list[SkippedSample]]:
    """Return what `read` returns for clips' texts, by index, and the clips for which it raises
    BrokenItemError. Raises ValueError with `expected` if it does for all."""
    values: dict[int, T] = {}
    broken = []
    for index, clip in clips.items():
        try:
            values[index] = read(clip.described)
        except BrokenItemError as error:
            broken.append(SkippedSample(clip.name, str(error)))
    if not values:
        examples = "; ".join(map(str, broken[:NUM_EXAMPLES])) or "none with audio"
        raise ValueError(f"{expected}, found none among {len(clips)}: {examples}")
    return values, broken


class _ClipAudio(Dataset[Tensor | str]):
    """The audio of clips by index, or the reason why it is unusable."""

    def __init__(self, clips: list[Clip], audio: AudioConfig, kind: Kind) -> None:
        # Clips are in the order of shards.
        self._open_shard = lru_cache(maxsize=1)(open_shard)
        self._clips = clips
        self._audio = audio
        self._kind = kind

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, number: int) -> Tensor | str:
        clip = self._clips[number]
        # `read_clip` fills the row.
        row = empty_row(self._audio, self._kind)
        try:
            encoded = clip.place.read(self._open_shard(clip.shard))
            read_clip(encoded, row, audio=self._audio, rng=CenterCropRng())
            return row
        # An error in a worker would end the evaluation.
        except DAMAGE as error:
            return describe_error(error)


class CenterCropRng(random.Random):
    """Random numbers that are the middle of each range, to center crops."""

    def randint(self, low: int, high: int) -> int:
        return (low + high) // 2


def empty_row(audio: AudioConfig, kind: Kind) -> Tensor:
    """Return zeros for a clip: (num_frames, mel_bins) float16 for `mel`; else float32,
    (num_samples,) or, with feature fusion, (4, num_frames, mel_bins)."""
    if kind == "mel":
        return torch.zeros(audio.feature_shape, dtype=torch.float16)
    return torch.zeros(audio.clip_shape)


def load_audio(
    clips: list[Clip], audio: AudioConfig, *, num_workers: int, kind: Kind = "encoded"
) -> Iterator[Tensor | str]:
    """Yield clips in order, shaped like `empty_row`, or the reason why one is unusable, from
    `num_workers` processes (0: this one). Raises ValueError if one was killed."""
    loader: Loader[Any] = Loader(
        _ClipAudio(clips, audio, kind),
        num_workers=min(num_workers, len(clips)),
        section=FIELD,
        batch_size=_PIECE,
        collate_fn=list,
    )
    try:
        for piece in loader:
            yield from piece
    finally:
        # Workers would outlive an error.
        loader.close()
