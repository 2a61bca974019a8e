"""Names of what evaluations measure, and which of two values is the better one."""

from __future__ import annotations

from clap_ds.config.schema import EvaluationSettings
from clap_ds.config.settings import RunSettings

_DIRECTIONS, _MEASURES = ("audio_to_text", "text_to_audio"), ("r1", "r5", "r10", "map10")
LOSS = "retrieval_loss"
"""The contrastive loss of held-out clips with their captions."""
TRAIN_LOSS = "train_loss"
"""Of checkpoints: the mean of the last steps, as a share of the loss at chance level."""
RETRIEVAL = (*(f"retrieval_{direction}_{measure}" for direction in _DIRECTIONS for measure in _MEASURES), LOSS)
ZERO_SHOT = ("zero_shot_top1", "zero_shot_top5", "zero_shot_map")


def names(evaluation: EvaluationSettings) -> tuple[str, ...]:
    """What an evaluation gives, the one that best tells a good model first."""
    return (*(ZERO_SHOT if evaluation.zero_shot else ()), *(RETRIEVAL if evaluation.retrieval else ()))


def best_metric(run: RunSettings) -> str | None:
    """`clap.checkpoint.best_metric`, or the first of `names`; None where nothing is evaluated."""
    return run.clap.checkpoint.best_metric or next(iter(names(run.clap.evaluation)), None)


def score(name: str, value: float) -> float:
    """The value, with its sign turned where smaller is better."""
    return -value if name in (LOSS, TRAIN_LOSS) else value
