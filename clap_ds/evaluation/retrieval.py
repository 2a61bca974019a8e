"""Audio–text retrieval: clips rank captions, captions rank clips.

Recall at k from audio to text counts a clip as found when any of its captions is among the best k; its mean average precision
at 10 asks for all of them. From text to audio each caption looks for its one clip. (As on Clotho and AudioCaps in arXiv
2211.06687 and DCASE's language-based audio retrieval.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from clap_ds.dist.distributed import Ranks
from clap_ds.evaluation import ranking
from clap_ds.evaluation.ranking import Tally
from clap_ds.evaluation.result import Measure, TaskResult

RECALL_AT = (1, 5, 10)
CUTOFF = 10


def evaluate_retrieval(audio_ND: Tensor, text_MD: Tensor, clip_of_caption_M: Tensor, ranks: Ranks) -> TaskResult:
    """Both directions. A collective; the same on every rank.

    Args:
        audio_ND: features of N clips, fp32 rows of length 1.
        text_MD: features of M captions, likewise.
        clip_of_caption_M: the clip each caption belongs to, int64; every clip has one at least.
    """
    captions_NR = ranking.members_by_group(clip_of_caption_M, len(audio_ND))
    num_captions_N = (captions_NR >= 0).sum(1)
    to_text = ranking.tally_by_similarity(audio_ND, text_MD, captions_NR, cutoff=CUTOFF, ranks=ranks)
    to_audio = ranking.tally_by_similarity(text_MD, audio_ND, clip_of_caption_M[:, None], cutoff=CUTOFF, ranks=ranks)
    one_M = torch.ones_like(clip_of_caption_M)
    measures = {
        **_measures("audio_to_text", to_text, num_captions_N, num_candidates=len(text_MD), num_clips=len(audio_ND)),
        **_measures("text_to_audio", to_audio, one_M, num_candidates=len(audio_ND), num_clips=len(audio_ND)),
    }
    return TaskResult({"clips": len(audio_ND), "captions": len(text_MD)}, measures)


def _measures(
    direction: str, found: Tally, num_relevant_Q: Tensor, *, num_candidates: int, num_clips: int
) -> dict[str, Measure]:
    by_chance = ranking.tally_by_chance(num_relevant_Q, num_candidates, CUTOFF)
    # Captions of one clip are found or missed together: their interval is that of as many clips.
    return {
        f"retrieval_{direction}_{name}": Measure.of_mean(float(value), float(chance), num_clips)
        for (name, value), chance in zip(
            _means(found, num_relevant_Q).items(), _means(by_chance, num_relevant_Q).values(), strict=True
        )
    }


def _means(found: Tally, num_relevant_Q: Tensor) -> dict[str, Tensor]:
    average_precision_Q = found.precision_sum() / num_relevant_Q.clamp(max=CUTOFF)
    return {**{f"r{k}": found.hit_rate(k).mean() for k in RECALL_AT}, f"map{CUTOFF}": average_precision_Q.mean()}
