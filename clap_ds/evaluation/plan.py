"""Which clips a task uses and what it holds them against: checked before any is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from clap_ds.config.sections import ZeroShotSettings
from clap_ds.data.items import BrokenItemError
from clap_ds.data.shard_reader import Broken
from clap_ds.evaluation.clips import Clip, classes_of
from clap_ds.evaluation.zero_shot import PLACEHOLDER, class_captions

FIELD = "clap.evaluation"
NUM_EXAMPLES = 5  # quoted in errors

Numbered = list[tuple[int, Clip]]
"""Clips of a task, with their numbers among all."""


@dataclass(frozen=True)
class RetrievalPlan:
    """The clips of retrieval, by their numbers among all, and the captions of each."""

    clips: list[int]
    captions: list[list[str]]


@dataclass(frozen=True)
class ZeroShotPlan:
    """The clips of zero-shot classification, by their numbers among all; the classes of each; the captions of each class."""

    clips: list[int]
    classes_of_clip: list[list[int]]
    captions: list[list[str]]


def plan_retrieval(clips: Numbered, note: Callable[[Iterable[Broken]], None]) -> RetrievalPlan:
    """The clips that have a caption; `note` is told of the others.

    Raises:
        ValueError: none has.
    """
    numbers, captions, broken = [], [], []
    for number, clip in clips:
        if isinstance(clip.captions, BrokenItemError):
            broken.append(Broken(clip.name, str(clip.captions)))
        else:
            numbers.append(number)
            captions.append(clip.captions)
    note(broken)
    if not numbers:
        raise ValueError(_nothing_usable(f"{FIELD}.retrieval.shards", "a caption", clips, broken))
    return RetrievalPlan(numbers, captions)


def plan_zero_shot(
    clips: Numbered, settings: ZeroShotSettings, note: Callable[[Iterable[Broken]], None]
) -> ZeroShotPlan:
    """The clips that have a class; `note` is told of the others.

    Raises:
        ValueError: none has, a class that isn't among those expected, fewer than two classes, a template without {}.
    """
    _check_templates(settings.templates)
    labelled, broken = [], []
    for number, clip in clips:
        try:
            labelled.append((number, clip, classes_of(clip, settings.class_field)))
        except BrokenItemError as error:
            broken.append(Broken(clip.name, str(error)))
    note(broken)
    if not labelled:
        fields = Counter(field for _, clip in clips if isinstance(clip.content, dict) for field in clip.content)
        wanted = f"{settings.class_field!r} ({FIELD}.zero_shot.class_field) in its json"
        instead = f" (found there: {', '.join(map(repr, fields))})" if fields else ""
        raise ValueError(_nothing_usable(f"{FIELD}.zero_shot.shards", wanted + instead, clips, broken))
    found = sorted({name for _, _, names in labelled for name in names})
    classes = settings.classes or {name: [name] for name in found}
    _check_classes(classes, {name: clip for _, clip, names in reversed(labelled) for name in names}, settings)
    index = {name: number for number, name in enumerate(classes)}
    return ZeroShotPlan(
        [number for number, _, _ in labelled],
        [[index[name] for name in names] for _, _, names in labelled],
        class_captions(classes, settings.templates),
    )


def _nothing_usable(field: str, wanted: str, clips: Numbered, broken: list[Broken]) -> str:
    examples = "; ".join(map(str, broken[:NUM_EXAMPLES]))
    return f"{field}: none of the {len(clips)} clips with audio has {wanted}" + (f": {examples}" if examples else "")


def _check_templates(templates: list[str]) -> None:
    for template in templates:
        if PLACEHOLDER not in template:
            raise ValueError(
                f"{FIELD}.zero_shot.templates: expected {PLACEHOLDER} where the class name goes, found {template!r}"
            )


def _check_classes(classes: dict[str, list[str]], found: dict[str, Clip], settings: ZeroShotSettings) -> None:
    """Args: found: a clip of each class that the shards have."""
    field = f"{FIELD}.zero_shot.classes"
    for name, names in classes.items():
        if not names or not all(each.strip() for each in names):
            raise ValueError(f"{field}: {name!r} has {'an empty name' if names else 'no name'} for captions")
    unknown = sorted(name for name in found if name not in classes)
    if unknown:
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(
            f"{field}: the shards have {unknown[0]!r} ({found[unknown[0]].name}){others}, which is not among the"
            f" {len(classes)} classes: {_some(list(classes))}"
        )
    if len(classes) < 2:
        raise ValueError(
            f"{field}: expected at least 2 classes to tell apart, found {_some(list(classes))}"
            f" (by {settings.class_field!r} in the clips' jsons)"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:NUM_EXAMPLES]))
    return f"{shown} and {len(names) - NUM_EXAMPLES} more" if len(names) > NUM_EXAMPLES else shown
