"""What a model says of each clip, to look behind the metrics: fit for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clap_ds.evaluation.clips import Clip

NUM_BEST = 5


def of_clips(
    clips: Sequence[Clip], own: Sequence[Sequence[int]], labels: Sequence[str], audio_ND: Tensor, labels_CD: Tensor
) -> list[dict[str, Any]]:
    """Of each clip its own labels, captions or classes, and the best, with score and rank: 1 the best, a mean of equal ones.
    With it come `at`, its `principal_axes`, and `place`, where its audio starts in the tar and how many bytes it has."""
    found, audio_ND, labels_CD = [], audio_ND.cpu().double(), labels_CD.cpu().double()
    at_N3 = principal_axes(audio_ND)
    for clip, of, audio_D, at_3 in zip(clips, own, audio_ND, at_N3.tolist(), strict=True):
        scores_C = (labels_CD @ audio_D).float()
        best = scores_C.topk(min(NUM_BEST, len(labels))).indices.tolist()
        score_W = scores_C[[*of, *best], None]
        rank_W = 0.5 + (scores_C > score_W).sum(1) + (scores_C == score_W).sum(1) / 2
        each = zip((*of, *best), score_W[:, 0].tolist(), rank_W.tolist(), strict=True)
        named = [(labels[number], {"score": score, "rank": rank}) for number, score, rank in each]
        where = {"at": [round(each, 6) for each in at_3], "place": [*clip.place]}
        found.append({"clip": clip.name, **where, "of": dict(named[: len(of)]), "best": dict(named[len(of) :])})
    return found


def principal_axes(rows_ND: Tensor) -> Tensor:
    """Of rows in fp64, D ≥ 2, their places on the first two principal axes and, third, how far off that plane they are: (N, 3).

    The squares of a column add up to N times the variance that it stands for. Of each axis the largest component is positive.
    """
    centred_ND = rows_ND - rows_ND.mean(0)
    axes_D2 = torch.linalg.eigh(centred_ND.T @ centred_ND).eigenvectors[:, -2:].flip(1)
    axes_D2 = axes_D2 * axes_D2.gather(0, axes_D2.abs().argmax(0, keepdim=True)).sign()
    at_N2 = centred_ND @ axes_D2
    return torch.cat([at_N2, (centred_ND - at_N2 @ axes_D2.T).norm(dim=1, keepdim=True)], dim=1)


def by_class(clips: Sequence[dict[str, Any]], classes: Sequence[str]) -> dict[str, Any]:
    """What `of_clips` gives; of each class that has any, their number and the share taken for it; and as what (columns, in the
    order of classes) those of each (row) were taken."""
    taken_for = Counter((name, next(iter(clip["best"]))) for clip in clips for name in clip["of"])
    rows = {name: [taken_for[name, other] for other in classes] for name in classes}
    heard = {name: sum(row) for name, row in rows.items() if any(row)}
    results = {name: {"clips": number, "top1": taken_for[name, name] / number} for name, number in heard.items()}
    return {"clips": clips, "classes": results, "confusion": rows}
