"""Names of evaluation metrics, and which direction is better."""

from __future__ import annotations

from clap_ds.config.schema import CheckpointSettings, EvaluationSettings

_DIRECTIONS = ("audio_to_text", "text_to_audio")
_MEASURES = ("r1", "r5", "r10", "map10")
LOSS = "retrieval_loss"
"""Contrastive loss of held-out clips and captions."""
RETRIEVAL = (
    *(f"retrieval_{direction}_{measure}" for direction in _DIRECTIONS for measure in _MEASURES),
    LOSS,
)
ZERO_SHOT = ("zero_shot_top1", "zero_shot_top5", "zero_shot_map")


def names(evaluation: EvaluationSettings) -> tuple[str, ...]:
    """Return an evaluation's metrics, the most informative first."""
    return (
        *(ZERO_SHOT if evaluation.zero_shot else ()),
        *(RETRIEVAL if evaluation.retrieval else ()),
    )


def best_metric(checkpoint: CheckpointSettings, evaluation: EvaluationSettings) -> str | None:
    """Return `clap.checkpoint.best_metric` or the first of `names`, or None if nothing is
    evaluated."""
    return checkpoint.best_metric or next(iter(names(evaluation)), None)


def score(name: str, value: float) -> float:
    """Return the value, negated if smaller is better."""
    return -value if name == LOSS else value
