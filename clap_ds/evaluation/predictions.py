"""Collect a model's predictions per clip, JSON-serializable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from clap_ds.evaluation.clips import Clip

NUM_BEST = 5


def of_clips(
    clips: Sequence[Clip], own: Sequence[Sequence[int]], labels: Sequence[str], audio_ND: Tensor, labels_CD: Tensor
) -> list[dict[str, Any]]:
    """List each clip's own and best labels (captions or classes), with score and rank (1: best; ties: mean rank)."""
    found, audio_ND, labels_CD = [], audio_ND.cpu().double(), labels_CD.cpu().double()
    for clip, of, audio_D in zip(clips, own, audio_ND, strict=True):
        scores_C = (labels_CD @ audio_D).float()
        best = scores_C.topk(min(NUM_BEST, len(labels))).indices.tolist()
        score_W = scores_C[[*of, *best], None]
        rank_W = 0.5 + (scores_C > score_W).sum(1) + (scores_C == score_W).sum(1) / 2
        each = zip((*of, *best), score_W[:, 0].tolist(), rank_W.tolist(), strict=True)
        named = [(labels[number], {"score": score, "rank": rank}) for number, score, rank in each]
        found.append({"clip": clip.name, "of": dict(named[: len(of)]), "best": dict(named[len(of) :])})
    return found


def by_class(clips: Sequence[dict[str, Any]], classes: Sequence[str]) -> dict[str, Any]:
    """Add to `of_clips`' result, for each class with clips, their number and top-1 accuracy, and the confusion matrix
    (rows: true classes; columns: predictions)."""
    taken_for = Counter((name, next(iter(clip["best"]))) for clip in clips for name in clip["of"])
    rows = {name: [taken_for[name, other] for other in classes] for name in classes}
    heard = {name: sum(row) for name, row in rows.items() if any(row)}
    results = {name: {"clips": number, "top1": taken_for[name, name] / number} for name, number in heard.items()}
    return {"clips": clips, "classes": results, "confusion": rows}
