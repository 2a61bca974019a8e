"""What a model says of each clip and each class, to look behind the metrics: fit for JSON.

The best rank is 1; candidates of equal score share the mean of their ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from torch import Tensor

NUM_BEST = 5


def of_pairs(names: Sequence[str], captions: Sequence[list[str]], audio_ND: Tensor, text_MD: Tensor) -> list[Any]:
    """Of each clip, its captions: their scores, ranks among all captions for the clip, and the clip's among all for them."""
    audio_ND, text_MD, places = audio_ND.cpu().double(), text_MD.cpu().double(), count()
    found = []
    for number, (name, own) in enumerate(zip(names, captions, strict=True)):
        at = [next(places) for _ in own]
        back = [_ranked(text_MD[place], audio_ND, [number])[0]["rank"] for place in at]
        rows = zip(own, _ranked(audio_ND[number], text_MD, at), back, strict=True)
        found.append({"clip": name, "captions": [{"caption": c, **forth, "rank_of_clip": b} for c, forth, b in rows]})
    return found


def of_classes(
    names: Sequence[str], classes: Sequence[str], audio_ND: Tensor, classes_KD: Tensor, is_of_class_NK: Tensor
) -> dict[str, Any]:
    """Each clip's classes, and the best, with score and rank; each class's number of clips and the share of them taken for it;
    the confusion matrix: how many clips of a class (row) were taken for which (column)."""
    audio_ND, classes_KD, clips = audio_ND.cpu().double(), classes_KD.cpu().double(), []
    confusion = [[0] * len(classes) for _ in classes]
    for name, audio_D, is_of_class_K in zip(names, audio_ND, is_of_class_NK.cpu(), strict=True):
        found = _ranked(audio_D, classes_KD, range(len(classes)))
        best = sorted(range(len(classes)), key=lambda number: found[number]["rank"])[:NUM_BEST]
        own = is_of_class_K.nonzero()[:, 0].tolist()
        of, taken_for = ({classes[number]: found[number] for number in which} for which in (own, best))
        clips.append({"clip": name, "of": of, "best": taken_for})
        for number in own:
            confusion[number][best[0]] += 1
    heard = [(number, name, sum(confusion[number])) for number, name in enumerate(classes) if any(confusion[number])]
    by_class = {name: {"clips": total, "top1": confusion[number][number] / total} for number, name, total in heard}
    return {"clips": clips, "by_class": by_class, "confusion": {"classes": [*classes], "clips": confusion}}


def _ranked(query_D: Tensor, candidates_CD: Tensor, wanted: Iterable[int]) -> list[dict[str, float]]:
    """Score and rank of some of the candidates."""
    scores_C = (candidates_CD @ query_D).float()
    own_W = scores_C[[*wanted], None]
    rank_W = 0.5 + (scores_C > own_W).sum(1) + (scores_C == own_W).sum(1) / 2
    return [{"score": score, "rank": rank} for score, rank in zip(own_W[:, 0].tolist(), rank_W.tolist(), strict=True)]
