"""Retrieval against a computation with numpy alone, and at its two ends: a model that knows all and one that knows nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clap_ds.dist.distributed import Ranks
from clap_ds.evaluation.retrieval import evaluate_retrieval

ALONE = Ranks(0, 1, 0, 1)


def features(number: int, seed: int, dim: int = 6) -> torch.Tensor:
    return F.normalize(torch.randn(number, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def reference(audio: np.ndarray, text: np.ndarray, clip_of_caption: np.ndarray) -> dict[str, float]:
    """Straight from the definitions, by sorting each row; for scores without ties."""
    metrics: dict[str, float] = {}
    scores = audio @ text.T
    for direction, rows, wanted in (
        ("audio_to_text", scores, [np.flatnonzero(clip_of_caption == clip) for clip in range(len(audio))]),
        ("text_to_audio", scores.T, [np.array([clip]) for clip in clip_of_caption]),
    ):
        hits = [np.isin(np.argsort(-row), relevant) for row, relevant in zip(rows, wanted, strict=True)]
        for k in (1, 5, 10):
            metrics[f"retrieval_{direction}_r{k}"] = float(np.mean([hit[:k].any() for hit in hits]))
        precision = []
        for hit, relevant in zip(hits, wanted, strict=True):
            top = hit[:10]
            precision.append(sum(top[: i + 1].mean() for i in np.flatnonzero(top)) / min(10, len(relevant)))
        metrics[f"retrieval_{direction}_map10"] = float(np.mean(precision))
    return metrics


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(0, 1000))
def test_equals_a_computation_with_numpy(captions_per_clip: list[int], seed: int) -> None:
    clip_of_caption = torch.arange(len(captions_per_clip)).repeat_interleave(torch.tensor(captions_per_clip))
    clip_of_caption = clip_of_caption[
        torch.randperm(len(clip_of_caption), generator=torch.Generator().manual_seed(seed))
    ]
    audio, text = features(len(captions_per_clip), seed), features(len(clip_of_caption), seed + 1)
    scores = (audio.double() @ text.double().T).float()  # distinct ones may be equal in fp32
    assume(all(len(row.unique()) == len(row) for row in (*scores, *scores.T)))
    found = evaluate_retrieval(audio, text, clip_of_caption, ALONE)
    expected = reference(audio.double().numpy(), text.double().numpy(), clip_of_caption.numpy())
    assert {name: measure.value for name, measure in found.measures.items()} == pytest.approx(expected, abs=1e-9)
    assert found.counts == {"clips": len(audio), "captions": len(text)}


def test_a_perfect_model_finds_all() -> None:
    audio = torch.eye(30)
    clip_of_caption = torch.arange(30).repeat_interleave(5)
    found = evaluate_retrieval(audio, audio[clip_of_caption], clip_of_caption, ALONE)
    assert [measure.value for measure in found.measures.values()] == pytest.approx([1.0] * 8)


def test_a_constant_model_scores_chance() -> None:
    clip_of_caption = torch.arange(40).repeat_interleave(2)
    constant = features(1, 0, dim=512)
    found = evaluate_retrieval(constant.expand(40, -1), constant.expand(80, -1), clip_of_caption, ALONE).measures
    for measure in found.values():
        assert measure.value == pytest.approx(measure.chance, abs=1e-12)
    assert found["retrieval_text_to_audio_r1"].value == pytest.approx(1 / 40)
    assert found["retrieval_text_to_audio_r10"].value == pytest.approx(10 / 40)
    assert found["retrieval_text_to_audio_map10"].value == pytest.approx(sum(1 / r for r in range(1, 11)) / 40)
    assert found["retrieval_audio_to_text_r1"].value == pytest.approx(2 / 80)
    assert found["retrieval_audio_to_text_r5"].value == pytest.approx(1 - (75 * 74) / (80 * 79))


def test_a_model_of_no_numbers_scores_chance() -> None:
    clip_of_caption = torch.arange(8)
    nothing = torch.full((8, 4), torch.nan)
    found = evaluate_retrieval(nothing, nothing, clip_of_caption, ALONE).measures
    assert found["retrieval_audio_to_text_r1"].value == pytest.approx(1 / 8)


def test_the_interval_holds_the_value_and_narrows_with_clips() -> None:
    widths = []
    for number in (20, 2000):
        audio = features(number, 0, dim=3)
        text = F.normalize(audio + 0.1 * features(number, 1, dim=3), dim=1)
        for measure in evaluate_retrieval(audio, text, torch.arange(number), ALONE).measures.values():
            assert 0 <= measure.low <= measure.value <= measure.high <= 1
        widths.append(measure.high - measure.low)
    assert widths[1] < widths[0] / 3
