"""Metrics equal scikit-learn's and numpy's, also at their extremes, with their intervals."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score

from clap_ds.engine.loss import LOSSES
from clap_ds.evaluation import metrics
from clap_ds.evaluation.metrics import (
    evaluate_retrieval,
    evaluate_zero_shot,
    retrieval_loss,
    wilson,
)
from clap_ds.evaluation.ranking import measures
from tests.evaluation.conftest import ALONE


def features(number: int, seed: int, dim: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(number, dim, generator=generator), dim=1)


def test_wilson_interval_equals_published():
    """81 of 263 is Newcombe's example (Statistics in Medicine 17, 1998)."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1), abs=5e-5)


def test_retrieval_measures_both_directions():
    clip_of_caption = torch.arange(30) % 12
    audio = features(12, 0)
    text = features(30, 1)
    measured = evaluate_retrieval(audio, text, clip_of_caption, ALONE)
    scores = (audio.double() @ text.double().T).float()
    relevant = clip_of_caption == torch.arange(12)[:, None]
    expected = [
        *measures(scores, relevant, at=(1, 5, 10), cutoff=10).mean(0).tolist(),
        *measures(scores.T, relevant.T, at=(1, 5, 10), cutoff=10).mean(0).tolist(),
    ]
    names = ("r1", "r5", "r10", "map10")
    assert [*measured][:4] == [f"retrieval_audio_to_text_{name}" for name in names]
    assert [*measured][4:] == [f"retrieval_text_to_audio_{name}" for name in names]
    assert [measure.value for measure in measured.values()] == pytest.approx(expected)
    for measure in measured.values():
        assert (measure.low, measure.high) == wilson(measure.value, 12)


def test_chance_is_independent_of_model():
    audio = features(40, 0, dim=64)
    text = audio.repeat_interleave(2, 0)
    measured = evaluate_retrieval(audio, text, torch.arange(40).repeat_interleave(2), ALONE)
    r5 = measured["retrieval_audio_to_text_r5"]
    # 5 draws from 80 captions, 2 of which are a clip's
    assert (r5.value, r5.chance) == (1, pytest.approx(1 - (75 * 74) / (80 * 79)))


def test_zero_shot_equals_scikit_learn():
    """With several classes per clip, and two classes without clips."""
    generator = torch.Generator().manual_seed(4)
    is_of_class = torch.rand(80, 9, generator=generator) < 0.2
    is_of_class[:, 7:] = False
    is_of_class[torch.arange(80), torch.arange(80) % 7] = True
    audio = features(80, 0)
    classes = features(9, 1)
    measures = evaluate_zero_shot(audio, classes, is_of_class, ALONE)
    scores = (audio @ classes.T).numpy()
    labels = is_of_class.numpy()
    hits = np.take_along_axis(labels, np.argsort(-scores, axis=1), axis=1)
    top5 = hits[:, :5].any(axis=1).mean()
    assert measures["zero_shot_top5"].value == pytest.approx(top5, abs=1e-12)
    has_clips = labels.any(0)
    labels = labels[:, has_clips]
    precision = average_precision_score(labels, scores[:, has_clips], average="macro")
    measure = measures["zero_shot_map"]
    assert measure.value == pytest.approx(precision, abs=1e-9)
    # The classes' harmonic mean of clips, times their number.
    num_clips = has_clips.sum() / np.mean(1 / labels.sum(0))
    assert (measure.low, measure.high) == pytest.approx(wilson(precision, num_clips))


def test_retrieval_loss_is_of_nearly_equal_batches(monkeypatch):
    monkeypatch.setattr(metrics, "LOSS_BATCH", 4)
    scale = torch.tensor([5.0])
    bias = torch.tensor([-2.0])
    audio = features(10, 0)
    text = features(10, 1)
    # Three captions are equal to others.
    captions = [f"caption {number % 7}" for number in range(10)]
    losses: list[float] = []
    for batch in ([0, 3, 6, 9], [1, 4, 7], [2, 5, 8]):
        numbers = torch.tensor(batch) % 7
        positives = (numbers[:, None] == numbers).double()
        logits = scale * audio[batch].double() @ text[batch].double().T + bias
        losses += LOSSES["sigmoid"].evaluate(logits, positives)[0].tolist()
    measure = retrieval_loss("sigmoid", audio, text, captions, scale, bias)
    assert measure.value == pytest.approx(np.mean(losses), rel=1e-5)
    margin = 1.96 * np.std(losses) / np.sqrt(10)
    interval = (measure.value - margin, measure.value + margin)
    assert (measure.low, measure.high) == pytest.approx(interval, rel=1e-3)
