"""The clips of evaluation shards: what is said of each and where its audio lies, which a task can use, later the audio itself.

Tars are gone through once without reading audio, so that captions and classes can be checked before any work is done. Clips are
numbered over all shards in the order of files and tars, and ranks take turns, so that each is used exactly once however many
ranks and workers there are. Audio and features longer than the model's clips are cropped in their middle.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from clap_ds.config.model import AudioConfig
from clap_ds.config.sections import ZeroShotSettings
from clap_ds.data.broken import Broken, BrokenItemError
from clap_ds.data.captions import CAPTION_FORMATS, captions_of
from clap_ds.data.front_end import Kind
from clap_ds.data.items import choose_clip, read_clip
from clap_ds.data.shard_files import open_shard
from clap_ds.data.tar_items import DAMAGE, Place, list_items, words
from clap_ds.data.workers import Loader

FIELD = "clap.evaluation"
NUM_EXAMPLES = 5  # quoted in errors
_PIECE = 16  # clips that a worker process hands over at a time

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clip:
    """One item of a shard: the tar's path, the item's name in it, where the encoded audio lies, its text files by extension."""

    shard: str
    key: str
    place: Place
    described: dict[str, bytes]

    @property
    def name(self) -> str:
        return f"{self.shard}: {self.key}"


def list_clips(shards: Iterable[str], kind: Kind = "encoded") -> tuple[list[Clip], list[Broken]]:
    """The items of tars that hold audio or, of `mel`, features, in order, and what else was met."""
    clips: list[Clip] = []
    broken: list[Broken] = []

    def report(name: str, reason: str) -> None:
        broken.append(Broken(name, reason))

    for shard in shards:
        for item in list_items(shard, report):
            try:
                texts = [extension for extension in CAPTION_FORMATS if extension in item]
                described = {extension: bytes(item[extension].read(item["__file__"])) for extension in texts}
                clips.append(Clip(shard, item["__key__"], choose_clip(item, kind), described))
            except (BrokenItemError, *DAMAGE) as error:
                report(f"{shard}: {item['__key__']}", words(error))
    return clips, broken


def classes_of(described: Mapping[str, bytes], field: str) -> list[str]:
    """The classes a clip is of, by a field of its json; a BrokenItemError where that holds no class name or list of them."""
    if "json" not in described:
        raise BrokenItemError("no json")
    try:
        content = json.loads(described["json"].decode("utf-8-sig"))
    except ValueError as error:  # of JSON or of UTF-8
        raise BrokenItemError(f"json isn't valid: {error}") from None
    if not isinstance(content, dict) or field not in content:
        raise BrokenItemError(f"no {field} in its json, which has {', '.join(content) if content else 'nothing'}")
    names = [content[field]] if isinstance(content[field], str) else content[field]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise BrokenItemError(f"{field} in its json: expected a class name or a list of them, found {content[field]!r}")
    return list(dict.fromkeys(name.strip() for name in names))


@dataclass(frozen=True)
class Plan:
    """What a task uses: numbers of clips among all, the captions of each clip or, for zero-shot, of each class, and there the
    numbers of the classes that each clip is of."""

    clips: list[int]
    captions: list[list[str]]
    classes: list[list[int]] | None = None


Numbered = dict[int, Clip]
Note = Callable[[Iterable[Broken]], None]


def plan_retrieval(clips: Numbered, note: Note) -> Plan:
    """The clips that have a caption, a ValueError if none has; `note` is called with the others."""
    found = _read(clips, captions_of, note, "retrieval", "a caption")
    return Plan(list(found), list(found.values()))


def plan_zero_shot(clips: Numbered, settings: ZeroShotSettings, note: Note) -> Plan:
    """The clips that have a class; `note` is called with the others. A class has captions by every name in every template.

    Raises:
        ValueError: none has, a class that isn't among those expected, fewer than two classes, a template without {}.
    """
    field = settings.class_field
    for template in settings.templates:
        if "{}" not in template:
            expected = "expected {} where the class name goes"
            raise ValueError(f"{FIELD}.zero_shot.templates: {expected}, found {template!r}")
    wanted = f"{field!r} ({FIELD}.zero_shot.class_field) in its json"
    found = _read(clips, lambda described: classes_of(described, field), note, "zero_shot", wanted)
    examples = {name: clips[number] for number, names in reversed(found.items()) for name in names}
    classes = settings.classes or {name: [name] for name in sorted(examples)}
    _check_classes(classes, examples, field)
    templates = settings.templates
    captions = [[text.replace("{}", name) for name in names for text in templates] for names in classes.values()]
    index = {name: number for number, name in enumerate(classes)}
    return Plan(list(found), captions, [[index[name] for name in names] for names in found.values()])


def _read(
    clips: Numbered, read: Callable[[Mapping[str, bytes]], T], note: Note, task: str, wanted: str
) -> dict[int, T]:
    found: dict[int, T] = {}
    broken = []
    for number, clip in clips.items():
        try:
            found[number] = read(clip.described)
        except BrokenItemError as error:
            broken.append(Broken(clip.name, str(error)))
    note(broken)
    if not found:
        examples = "; ".join(map(str, broken[:NUM_EXAMPLES]))
        raise ValueError(f"{FIELD}.{task}.shards: none of the {len(broken)} clips with audio has {wanted}: {examples}")
    return found


def _check_classes(classes: dict[str, list[str]], found: dict[str, Clip], class_field: str) -> None:
    """`found`: a clip of each class that the shards have."""
    field = f"{FIELD}.zero_shot.classes"
    for name, names in classes.items():
        if not names or not all(each.strip() for each in names):
            raise ValueError(f"{field}: {name!r} has {'an empty name' if names else 'no name'} for captions")
    shown = ", ".join(map(repr, list(classes)[:NUM_EXAMPLES])) + ", …" * (len(classes) > NUM_EXAMPLES)
    for name in sorted(found.keys() - classes.keys()):
        where = f"the shards have {name!r} ({found[name].name})"
        raise ValueError(f"{field}: {where}, which is not among the {len(classes)} classes: {shown}")
    if len(classes) < 2:
        where = f"(by {class_field!r} in the clips' jsons)"
        raise ValueError(f"{field}: expected at least 2 classes to tell apart, found {shown} {where}")


class _ClipAudio(Dataset[Tensor | str]):
    def __init__(self, clips: list[Clip], audio: AudioConfig, kind: Kind) -> None:
        self._open_shard = lru_cache(maxsize=1)(open_shard)
        self._clips, self._audio, self._kind = clips, audio, kind

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, number: int) -> Tensor | str:
        clip, row = self._clips[number], empty_rows(1, self._audio, self._kind)[0]
        try:
            encoded = clip.place.read(self._open_shard(clip.shard))
            read_clip(encoded, row, sample_rate=self._audio.sample_rate, rng=_Middle())
            return row
        except BrokenItemError as error:
            return str(error)
        except DAMAGE as error:
            return f"its tar can't be read: {words(error)}"


class _Middle(random.Random):
    """Draws the middle of the places a crop can be at."""

    def randint(self, low: int, high: int) -> int:
        return (low + high) // 2


def empty_rows(number: int, audio: AudioConfig, kind: Kind) -> Tensor:
    """Zeros for as many clips of a kind: features (number, num_frames, mel_bins) float16 of `mel`, else waveforms (number,
    num_samples) float32."""
    if kind == "mel":
        return torch.zeros(number, *audio.feature_shape, dtype=torch.float16)
    return torch.zeros(number, audio.num_samples)


def load_audio(
    clips: list[Clip], audio: AudioConfig, *, num_workers: int, kind: Kind = "encoded"
) -> Iterator[Tensor | str]:
    """What `empty_rows` has a row for, of clips in order, or the reason why one can't be had. Read by `num_workers` processes
    (0: by this one); a ValueError where one of these was killed."""
    if not clips:
        return
    dataset, num_workers = _ClipAudio(clips, audio, kind), min(num_workers, len(clips))
    loader: Loader[Any] = Loader(dataset, num_workers=num_workers, section=FIELD, batch_size=_PIECE, collate_fn=list)
    try:
        for piece in loader:
            yield from piece
    finally:
        loader.close()
