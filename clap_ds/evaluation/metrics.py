"""Compute metrics of audio–text retrieval and zero-shot classification, with chance levels and
intervals.

Retrieval follows arXiv 2211.06687 (Clotho, AudioCaps) and DCASE's language-based audio retrieval.
Audio to text counts a hit if any of the clip's captions is among the best k; mean average precision
at 10 considers all of them. The loss uses each clip's first caption, in batches whose size doesn't
depend on the ranks. Equal captions are positives.

Zero-shot: a class's embedding is the mean of its captions'. A clip of several classes counts as a
hit if any of them is among the best k. Mean average precision ranks the clips for each class with
clips, as on AudioSet and FSD50K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from clap_ds.data.clip import Broken
from clap_ds.distributed.init import Ranks
from clap_ds.engine.loss import LOSSES
from clap_ds.evaluation import ranking
from clap_ds.metrics.intervals import Z

RECALL_AT = (1, 5, 10)
CUTOFF = 10
TOP = (1, 5)
LOSS_BATCH = 1024


@dataclass(frozen=True)
class Measure:
    """Hold a metric (0 to 1, except for the loss), its expectation for constant predictions, and
    its 95% interval."""

    value: float
    chance: float
    low: float
    high: float


@dataclass(frozen=True)
class TaskResult:
    """Hold metrics by name, and the numbers of clips, captions and classes."""

    counts: dict[str, int]
    measures: dict[str, Measure]


@dataclass(frozen=True)
class Evaluation:
    """Hold results by task (`retrieval`, `zero_shot`), and unusable items."""

    tasks: dict[str, TaskResult]
    broken: list[Broken]

    @property
    def measures(self) -> dict[str, Measure]:
        return {
            name: measure for task in self.tasks.values() for name, measure in task.measures.items()
        }

    @property
    def metrics(self) -> dict[str, float]:
        return {name: measure.value for name, measure in self.measures.items()}

    @property
    def chances(self) -> dict[str, float]:
        return {name: measure.chance for name, measure in self.measures.items()}

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        broken = found.pop("broken")
        return {
            "metrics": self.metrics,
            **found,
            "num_broken_items": len(broken),
            "broken_items": broken,
        }


def wilson(proportion: float, number: float) -> tuple[float, float]:
    """Compute Wilson's 95% interval of a proportion. It is conservative for means of other values
    from 0 to 1."""
    spread = Z * math.sqrt(proportion * (1 - proportion) / number + Z**2 / (4 * number**2))
    centre = proportion + Z**2 / (2 * number)
    scale = 1 + Z**2 / number
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _means(
    names: Sequence[str], found: Tensor, chance: Tensor, num_clips: float
) -> dict[str, Measure]:
    """Average values from 0 to 1, (Q, M) each, with intervals of a mean over `num_clips`."""
    values = zip(names, found.mean(0).tolist(), chance.mean(0).tolist(), strict=False)
    return {
        name: Measure(value, by_chance, *wilson(value, num_clips))
        for name, value, by_chance in values
    }


def evaluate_retrieval(
    audio_ND: Tensor, text_MD: Tensor, clip_of_caption_M: Tensor, ranks: Ranks
) -> dict[str, Measure]:
    """Compute recall and mean average precision in both directions from fp32 rows of length 1. A
    collective."""
    clip_N = torch.arange(len(audio_ND), device=audio_ND.device)
    measures: dict[str, Measure] = {}
    for direction, (queries, clip_of_query), (candidates, clip_of_candidate) in (
        ("audio_to_text", (audio_ND, clip_N), (text_MD, clip_of_caption_M)),
        ("text_to_audio", (text_MD, clip_of_caption_M), (audio_ND, clip_N)),
    ):

        def relevant(
            rows: slice, query: Tensor = clip_of_query, candidate: Tensor = clip_of_candidate
        ) -> Tensor:
            return query[rows, None] == candidate

        found, chance = ranking.rank_candidates(
            queries, candidates, relevant, at=RECALL_AT, cutoff=CUTOFF, ranks=ranks
        )
        names = [
            f"retrieval_{direction}_{name}"
            for name in (*(f"r{k}" for k in RECALL_AT), f"map{CUTOFF}")
        ]
        # A clip's captions are correlated, so the interval is for the number of clips.
        measures |= _means(names, found, chance, len(audio_ND))
    return measures


def retrieval_loss(
    kind: str,
    audio_ND: Tensor,
    text_ND: Tensor,
    captions: Sequence[str],
    scale: Tensor,
    bias: Tensor | None,
) -> Measure:
    """Compute the mean loss of a `clap.loss.kind` over the clips, in the fewest batches of at most
    `LOSS_BATCH`.

    Chance is the lowest loss with equal similarities of all pairs. Features are fp32 rows of length
    1.
    """
    number_of = {caption: number for number, caption in enumerate(captions)}
    caption_N = torch.tensor([number_of[caption] for caption in captions], device=audio_ND.device)
    losses = []
    chance_in_all = 0.0
    num_batches = -(-len(captions) // LOSS_BATCH)
    for first in range(num_batches):
        rows = slice(first, None, num_batches)
        positive_BB = (caption_N[rows, None] == caption_N[rows]).double()
        logits_BB = scale * audio_ND[rows].double() @ text_ND[rows].double().T
        found_B, chance = LOSSES[kind].evaluate(
            logits_BB if bias is None else logits_BB + bias, positive_BB
        )
        losses.append(found_B)
        chance_in_all += chance * len(found_B)
    loss_N = torch.cat(losses)
    value = float(loss_N.mean())
    spread = Z * float(loss_N.std(correction=0)) / math.sqrt(len(loss_N))
    return Measure(value, chance_in_all / len(loss_N), value - spread, value + spread)


def evaluate_zero_shot(
    audio_ND: Tensor, classes_KD: Tensor, is_of_class_NK: Tensor, ranks: Ranks
) -> dict[str, Measure]:
    """Compute top-k accuracies and mean average precision from fp32 rows of length 1. A collective.

    The mean's interval treats each class's precision as a proportion of its clips. (Its coverage
    was 96 to 100% in simulations of 2 to 20 clips per class and 10 to 50 classes, of equal and very
    unequal sizes.)
    """
    relevant = is_of_class_NK.__getitem__
    found, chance = ranking.rank_candidates(
        audio_ND, classes_KD, relevant, at=TOP, cutoff=1, ranks=ranks
    )
    measures = _means([f"zero_shot_top{k}" for k in TOP], found, chance, len(audio_ND))
    num_clips_K = is_of_class_NK.sum(0)
    relevant_KN = is_of_class_NK.T[num_clips_K > 0]
    classes_KD = classes_KD[num_clips_K > 0]
    found, chance = ranking.rank_candidates(
        classes_KD, audio_ND, relevant_KN.__getitem__, ranks=ranks
    )
    number = len(classes_KD) ** 2 / float((1 / num_clips_K[num_clips_K > 0]).sum())
    return measures | _means(["zero_shot_map"], found, chance, number)
