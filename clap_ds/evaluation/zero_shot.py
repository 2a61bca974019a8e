"""Zero-shot classification: a class is the mean of its captions' embeddings, a clip is of the class nearest to it.

A clip may be of several classes: it then counts as right at k when any of them is among the best k. The mean average precision
ranks the clips for each class, as on AudioSet and FSD50K, and is the mean over the classes that have clips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.dist.distributed import Ranks
from clap_ds.evaluation import ranking
from clap_ds.evaluation.result import CONFIDENCE, Measure, TaskResult

TOP = (1, 5)
PLACEHOLDER = "{}"
NUM_RESAMPLES = 200


def class_captions(classes: Mapping[str, Sequence[str]], templates: Sequence[str]) -> list[list[str]]:
    """Captions of each class: every name in every template."""
    return [
        [template.replace(PLACEHOLDER, name) for name in names for template in templates] for names in classes.values()
    ]


def class_features(captions: Sequence[Sequence[str]], text_MD: Tensor) -> Tensor:
    """(classes, D), fp32 rows of length 1: the mean of each class's captions' features.

    Args:
        captions: of each class.
        text_MD: their features in the same order.
    """
    means = [rows.double().mean(0) for rows in text_MD.split([len(each) for each in captions])]
    return F.normalize(torch.stack(means), dim=-1).float()


def evaluate_zero_shot(
    audio_ND: Tensor, classes_KD: Tensor, is_of_class_NK: Tensor, ranks: Ranks, *, resample: bool
) -> TaskResult:
    """Top-k accuracies and mean average precision. A collective; the same on every rank.

    Args:
        audio_ND: features of N clips, fp32 rows of length 1.
        classes_KD: features of K classes, likewise.
        is_of_class_NK: bool; every clip is of one class at least.
        resample: find the mean average precision's interval, too (else it is 0 to 1): bootstrap over the clips.
    """
    num_clips, num_classes = is_of_class_NK.shape
    num_relevant_N = is_of_class_NK.sum(1)
    found = ranking.tally_by_similarity(audio_ND, classes_KD, _indices(is_of_class_NK), cutoff=max(TOP), ranks=ranks)
    by_chance = ranking.tally_by_chance(num_relevant_N, num_classes, max(TOP))
    measures = {
        f"zero_shot_top{k}": Measure.of_mean(
            float(found.hit_rate(k).mean()), float(by_chance.hit_rate(k).mean()), num_clips
        )
        for k in TOP
    }
    relevant_KN = is_of_class_NK.T.contiguous()
    has_clips_K = relevant_KN.any(1)
    precision_K = ranking.average_precision_by_similarity(classes_KD, audio_ND, relevant_KN, ranks=ranks)
    value = float(precision_K[has_clips_K].mean())
    spread = bootstrap(classes_KD[has_clips_K], audio_ND, relevant_KN[has_clips_K]) if resample else (-value, 1 - value)
    chance = chance_of_average_precision(relevant_KN[has_clips_K].sum(1), num_clips)
    low, high = max(0.0, value + spread[0]), min(1.0, value + spread[1])
    measures["zero_shot_map"] = Measure(value, float(chance.mean()), low, high)
    return TaskResult({"clips": num_clips, "classes": num_classes}, measures)


def chance_of_average_precision(num_relevant_K: Tensor, num_clips: int) -> Tensor:
    """(K,) float64: what `ranking.average_precision` gives where all clips are tied. A little more than their share of
    relevant ones."""
    harmonic = (1 / torch.arange(1, num_clips + 1, dtype=torch.float64)).sum().item()
    relevant = num_relevant_K.double()
    return (harmonic + (relevant - 1) / max(1, num_clips - 1) * (num_clips - harmonic)) / num_clips


def bootstrap(classes_KD: Tensor, audio_ND: Tensor, relevant_KN: Tensor) -> tuple[float, float]:
    """95 % interval of the mean average precision, as distances from its value: by drawing the clips anew with replacement.
    Always draws the same.

    The distances are from the mean of what is drawn, not from the value: a clip drawn twice ranks beside itself, which raises
    precision, by several points where classes have few clips. (In simulations of 2 to 20 clips of each of 10 to 50 classes the
    interval held the true value in 90 to 98 % of cases, and in 63 to 92 % without this.)
    """
    num_clips = len(audio_ND)
    generator = torch.Generator().manual_seed(0)
    drawn_BN = torch.randint(num_clips, (NUM_RESAMPLES, num_clips), generator=generator)
    weights_BN = torch.zeros(NUM_RESAMPLES, num_clips).scatter_add_(1, drawn_BN, torch.ones(drawn_BN.shape))
    weights_BN = weights_BN.to(audio_ND.device)
    alone = Ranks(0, 1, 0, 1)
    total_B = torch.zeros(NUM_RESAMPLES, dtype=torch.float64, device=audio_ND.device)
    number_B = torch.zeros_like(total_B)
    for rows, scores in ranking.similarity(classes_KD, audio_ND, alone):
        for order, relevant in zip(scores.argsort(dim=1, descending=True), relevant_KN[rows], strict=True):
            weights = weights_BN[:, order]
            hits = weights * relevant[order]
            num_hits_B = hits.sum(1)
            precision = hits.cumsum(1) / weights.cumsum(1).clamp(min=1)
            total_B += (hits * precision).sum(1) / num_hits_B.clamp(min=1)
            number_B += num_hits_B > 0
    means_B = total_B / number_B.clamp(min=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = (means_B.quantile(means_B.new_tensor([tail, 1 - tail])) - means_B.mean()).tolist()
    return low, high


def _indices(is_of_class_NK: Tensor) -> Tensor:
    """(N, most classes of a clip) int64: which classes each clip is of, filled up with -1."""
    clips, classes = is_of_class_NK.nonzero(as_tuple=True)
    places = ranking.members_by_group(clips, len(is_of_class_NK))
    return classes[places.clamp(min=0)].masked_fill(places < 0, -1)
