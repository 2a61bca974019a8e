"""Test metrics against scikit-learn and numpy, at their extremes, and their intervals."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from clap_ds.evaluation import metrics
from clap_ds.evaluation.metrics import (
    Measure,
    evaluate_retrieval,
    evaluate_zero_shot,
    retrieval_loss,
    wilson,
)
from tests.evaluation.conftest import ALONE


def features(number: int, seed: int, dim: int = 6) -> torch.Tensor:
    return F.normalize(
        torch.randn(number, dim, generator=torch.Generator().manual_seed(seed)), dim=1
    )


def zero_shot(
    audio: torch.Tensor, classes: torch.Tensor, labels: torch.Tensor
) -> dict[str, Measure]:
    """Evaluate with labels: one class per clip, or a mask of classes."""
    is_of_class = labels if labels.ndim == 2 else F.one_hot(labels, len(classes)).bool()
    return evaluate_zero_shot(audio, classes, is_of_class, ALONE)


@pytest.mark.parametrize(
    ("proportion", "number", "low", "high"),
    [(81 / 263, 263, 0.2553, 0.3662), (1.0, 10, 0.7225, 1.0), (0.0, 10, 0.0, 0.2775)],
)
def test_wilson(proportion: float, number: int, low: float, high: float) -> None:
    """81 of 263 is Newcombe's example (Statistics in Medicine 17, 1998)."""
    assert wilson(proportion, number) == pytest.approx((low, high), abs=5e-5)


def by_sorting(scores: np.ndarray, relevant: np.ndarray) -> dict[str, float]:
    """Compute metrics by definition, sorting each row, (queries, candidates), of scores without
    ties."""
    hits = np.take_along_axis(relevant, np.argsort(-scores, axis=1), axis=1)[:, :10]
    precision = (hits * hits.cumsum(1) / np.arange(1, hits.shape[1] + 1)).sum(1) / relevant.sum(
        1
    ).clip(max=10)
    return {**{f"r{k}": hits[:, :k].any(1).mean() for k in (1, 5, 10)}, "map10": precision.mean()}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(0, 1000))
def test_retrieval_equals_a_computation_with_numpy(captions_per_clip: list[int], seed: int) -> None:
    clip_of_caption = np.repeat(np.arange(len(captions_per_clip)), captions_per_clip)
    np.random.default_rng(seed).shuffle(clip_of_caption)
    audio = features(len(captions_per_clip), seed)
    text = features(len(clip_of_caption), seed + 1)
    scores = (
        (audio.double() @ text.double().T).float().numpy()
    )  # distinct ones may be equal in fp32
    assume(all(len(np.unique(row)) == len(row) for row in (*scores, *scores.T)))
    found = evaluate_retrieval(audio, text, torch.from_numpy(clip_of_caption), ALONE)
    relevant = clip_of_caption == np.arange(len(audio))[:, None]
    both = {
        "audio_to_text": by_sorting(scores, relevant),
        "text_to_audio": by_sorting(scores.T, relevant.T),
    }
    expected = {
        f"retrieval_{way}_{name}": value
        for way, each in both.items()
        for name, value in each.items()
    }
    assert {name: measure.value for name, measure in found.items()} == pytest.approx(
        expected, abs=1e-9
    )
    assert all(
        (measure.low, measure.high) == wilson(measure.value, len(audio))
        for measure in found.values()
    )


def test_a_constant_model_scores_chance() -> None:
    clip_of_caption = torch.arange(40).repeat_interleave(2)
    for constant in (features(1, 0, dim=512), torch.full((1, 4), torch.nan)):
        found = evaluate_retrieval(
            constant.expand(40, -1), constant.expand(80, -1), clip_of_caption, ALONE
        )
        assert [measure.value for measure in found.values()] == pytest.approx(
            [each.chance for each in found.values()]
        )
        assert found["retrieval_audio_to_text_r5"].value == pytest.approx(1 - (75 * 74) / (80 * 79))


def test_chance_is_that_of_drawing_candidates_whatever_the_model_knows() -> None:
    """With 40 clips of two captions, and eight classes."""
    audio = features(40, 0, dim=64)
    found = evaluate_retrieval(
        audio, audio.repeat_interleave(2, 0), torch.arange(40).repeat_interleave(2), ALONE
    )
    assert (
        found["retrieval_audio_to_text_r5"].value == found["retrieval_text_to_audio_r1"].value == 1
    )
    assert found["retrieval_audio_to_text_r5"].chance == pytest.approx(1 - (75 * 74) / (80 * 79))
    assert found["retrieval_text_to_audio_r1"].chance == pytest.approx(1 / 40)
    top = zero_shot(audio, audio[:8], torch.arange(40) % 8)
    assert (
        top["zero_shot_top1"].chance
        == pytest.approx(1 / 8)
        != pytest.approx(top["zero_shot_top1"].value)
    )
    assert top["zero_shot_top5"].chance == pytest.approx(5 / 8)


@pytest.mark.parametrize("share", [0, 0.2])
def test_zero_shot_against_scikit_learn(share: float) -> None:
    """With one class per clip, and two classes without clips, or with several."""
    is_of_class = torch.rand(80, 9, generator=torch.Generator().manual_seed(4)) < share
    is_of_class[torch.arange(80), torch.arange(80) % 7] = True
    audio = features(80, 0)
    classes = features(9, 1)
    found = zero_shot(audio, classes, is_of_class)
    scores = (audio @ classes.T).numpy()
    best = np.argsort(-scores, axis=1)
    has_clips = is_of_class.any(0).numpy()
    for k in (1, 5):
        any_hit = np.take_along_axis(is_of_class.numpy(), best[:, :k], axis=1).any(axis=1)
        assert found[f"zero_shot_top{k}"].value == pytest.approx(any_hit.mean(), abs=1e-12)
    expected = average_precision_score(
        is_of_class.numpy()[:, has_clips], scores[:, has_clips], average="macro"
    )
    assert found["zero_shot_map"].value == pytest.approx(expected, abs=1e-9)
    number = 1 / np.mean(1 / is_of_class.numpy().sum(0)[has_clips]) * has_clips.sum()
    assert (found["zero_shot_map"].low, found["zero_shot_map"].high) == pytest.approx(
        wilson(expected, number)
    )


SCALE = torch.tensor([5.0])


@pytest.mark.parametrize("bias", [None, torch.tensor([-2.0])])
def test_the_loss_of_retrieval_is_that_of_batches_that_differ_by_one_clip(
    bias: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    audio = features(10, 0)
    text = features(10, 1)
    captions = [f"caption {number % 7}" for number in range(10)]
    text[7:] = text[:3]
    monkeypatch.setattr(metrics, "LOSS_BATCH", 4)
    expected = []
    for batch in ([0, 3, 6, 9], [1, 4, 7], [2, 5, 8]):
        is_same = torch.tensor([[captions[i] == captions[j] for j in batch] for i in batch])
        logits = SCALE * audio[batch] @ text[batch].T
        if bias is None:
            likely = [
                each.log_softmax(1) * is_same / is_same.sum(1, keepdim=True)
                for each in (logits, logits.T)
            ]
            expected += (-sum(likely).sum(1) / 2).tolist()
        else:
            expected += (-F.logsigmoid((2.0 * is_same - 1) * (logits + bias)).sum(1)).tolist()
    found = retrieval_loss(
        "softmax" if bias is None else "sigmoid", audio, text, captions, SCALE, bias
    )
    assert found.value == pytest.approx(np.mean(expected), rel=1e-5)
    assert bias is not None or found.chance == pytest.approx(
        np.log([4, 4, 4, 4, 3, 3, 3, 3, 3, 3]).mean()
    )
    margin = 1.96 * np.std(expected) / np.sqrt(10)
    assert (found.low, found.high) == pytest.approx(
        (found.value - margin, found.value + margin), rel=1e-3
    )
