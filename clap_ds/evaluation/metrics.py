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

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clap_ds.data.clip import SkippedSample
from clap_ds.distributed.init import Ranks
from clap_ds.engine.loss import LOSSES
from clap_ds.evaluation import ranking
from clap_ds.metrics.intervals import Z

# The k of recall at k in retrieval.
RECALL_AT = (1, 5, 10)
# Ranks of retrieval's mean average precision.
CUTOFF = 10
# The k of top-k accuracy in zero-shot classification.
TOP = (1, 5)
# Most clips in a batch of the loss, which grows with its size.
LOSS_BATCH = 1024


@dataclass(frozen=True)
class Measure:
    """A metric: a value from 0 to 1, except for the loss, its expectation for constant predictions,
    and its 95% interval."""

    value: float
    chance: float
    low: float
    high: float


@dataclass(frozen=True)
class TaskResult:
    """Metrics by name, and the numbers of clips, captions and classes."""

    counts: dict[str, int]
    measures: dict[str, Measure]


@dataclass(frozen=True)
class Evaluation:
    """Results by task (`retrieval`, `zero_shot`), and unusable items."""

    tasks: dict[str, TaskResult]
    broken: list[SkippedSample]

    @property
    def measures(self) -> dict[str, Measure]:
        """Measures of all tasks, whose names differ."""
        measures: dict[str, Measure] = {}
        for task in self.tasks.values():
            measures |= task.measures
        return measures

    @property
    def metrics(self) -> dict[str, float]:
        return {name: measure.value for name, measure in self.measures.items()}

    @property
    def chances(self) -> dict[str, float]:
        return {name: measure.chance for name, measure in self.measures.items()}

    def to_dict(self) -> dict[str, Any]:
        content = asdict(self)
        return {
            "metrics": self.metrics,
            "tasks": content["tasks"],
            "num_broken_items": len(self.broken),
            "broken_items": content["broken"],
        }


def wilson(proportion: float, number: float) -> tuple[float, float]:
    """Compute Wilson's 95% interval of a proportion. It is conservative for means of other values
    from 0 to 1."""
    # (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n)
    spread = Z * math.sqrt(proportion * (1 - proportion) / number + Z**2 / (4 * number**2))
    centre = proportion + Z**2 / (2 * number)
    scale = 1 + Z**2 / number
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _average(
    names: Sequence[str], values_QM: Tensor, chances_QM: Tensor, num_clips: float
) -> dict[str, Measure]:
    """Average values from 0 to 1, (Q, M) each, with intervals of a mean over `num_clips`."""
    # Further columns have no name.
    columns = zip(names, values_QM.mean(0).tolist(), chances_QM.mean(0).tolist(), strict=False)
    return {
        name: Measure(value, chance, *wilson(value, num_clips)) for name, value, chance in columns
    }


def evaluate_retrieval(
    audio_ND: Tensor, text_MD: Tensor, clip_of_caption_M: Tensor, ranks: Ranks
) -> dict[str, Measure]:
    """Compute recall and mean average precision in both directions from fp32 rows of length 1. A
    collective."""
    clip_N = torch.arange(len(audio_ND), device=audio_ND.device)
    rank = partial(ranking.rank_candidates, at=RECALL_AT, cutoff=CUTOFF, ranks=ranks)
    results = {
        "audio_to_text": rank(
            audio_ND, text_MD, lambda rows: clip_N[rows, None] == clip_of_caption_M
        ),
        "text_to_audio": rank(
            text_MD, audio_ND, lambda rows: clip_of_caption_M[rows, None] == clip_N
        ),
    }
    measures: dict[str, Measure] = {}
    for direction, (values_QM, chances_QM) in results.items():
        names = [f"retrieval_{direction}_r{k}" for k in RECALL_AT]
        names.append(f"retrieval_{direction}_map{CUTOFF}")
        # A clip's captions are correlated, so the interval is for the number of clips.
        measures |= _average(names, values_QM, chances_QM, len(audio_ND))
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
    # Equal captions get equal numbers, so that they are positives.
    number_of = {caption: number for number, caption in enumerate(captions)}
    caption_N = torch.tensor([number_of[caption] for caption in captions], device=audio_ND.device)
    losses = []
    chance_sum = 0.0
    num_batches = -(-len(captions) // LOSS_BATCH)
    for start in range(num_batches):
        # Sizes of the batches differ by at most one clip.
        rows = slice(start, None, num_batches)
        positive_BB = (caption_N[rows, None] == caption_N[rows]).double()
        logits_BB = scale * audio_ND[rows].double() @ text_ND[rows].double().T
        if bias is not None:
            logits_BB += bias
        loss_B, chance = LOSSES[kind].evaluate(logits_BB, positive_BB)
        losses.append(loss_B)
        chance_sum += chance * len(loss_B)
    loss_N = torch.cat(losses)
    value = float(loss_N.mean())
    # Half of the 95% interval of a mean: z σ / √N.
    spread = Z * float(loss_N.std(correction=0)) / math.sqrt(len(loss_N))
    return Measure(value, chance_sum / len(loss_N), value - spread, value + spread)


def evaluate_zero_shot(
    audio_ND: Tensor, classes_KD: Tensor, is_of_class_NK: Tensor, ranks: Ranks
) -> dict[str, Measure]:
    """Compute top-k accuracies and mean average precision from fp32 rows of length 1. A collective.

    The mean's interval treats each class's precision as a proportion of its clips. (Its coverage
    was 96 to 100% in simulations of 2 to 20 clips per class and 10 to 50 classes, of equal and very
    unequal sizes.)
    """
    accuracies_NM, chances_NM = ranking.rank_candidates(
        audio_ND, classes_KD, is_of_class_NK.__getitem__, at=TOP, cutoff=1, ranks=ranks
    )
    names = [f"zero_shot_top{k}" for k in TOP]
    measures = _average(names, accuracies_NM, chances_NM, len(audio_ND))
    # Classes with clips, whose number is K from here on.
    num_clips_K = is_of_class_NK.sum(0)
    has_clips_K = num_clips_K > 0
    num_clips_K = num_clips_K[has_clips_K]
    relevant_KN = is_of_class_NK.T[has_clips_K]
    precisions_KM, chances_KM = ranking.rank_candidates(
        classes_KD[has_clips_K], audio_ND, relevant_KN.__getitem__, ranks=ranks
    )
    # Var(mean) = Σ p(1 - p)/n_k / K², so the mean is one of K² / Σ 1/n_k clips.
    number = len(num_clips_K) ** 2 / float((1 / num_clips_K).sum())
    return measures | _average(["zero_shot_map"], precisions_KM, chances_KM, number)
