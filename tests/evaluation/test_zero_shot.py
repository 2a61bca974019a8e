"""Zero-shot classification against scikit-learn, with one class to a clip and with several."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, top_k_accuracy_score

from clap_ds.dist.distributed import Ranks
from clap_ds.evaluation.zero_shot import class_captions, class_features, evaluate_zero_shot

ALONE = Ranks(0, 1, 0, 1)


def features(number: int, seed: int, dim: int = 6) -> torch.Tensor:
    return F.normalize(torch.randn(number, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def one_hot(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    return F.one_hot(labels, num_classes).bool()


def test_one_class_to_a_clip_against_scikit_learn() -> None:
    audio, classes = features(80, 0), features(9, 1)
    labels = torch.arange(80) % 7  # two classes have no clips
    found = evaluate_zero_shot(audio, classes, one_hot(labels, 9), ALONE, resample=True)
    scores = (audio @ classes.T).numpy()
    for k in (1, 5):
        expected = top_k_accuracy_score(labels.numpy(), scores, k=k, labels=range(9))
        assert found.measures[f"zero_shot_top{k}"].value == pytest.approx(expected, abs=1e-12)
    expected = average_precision_score(one_hot(labels, 7).numpy(), scores[:, :7], average="macro")
    assert found.measures["zero_shot_map"].value == pytest.approx(expected, abs=1e-9)
    assert found.counts == {"clips": 80, "classes": 9}


def test_several_classes_to_a_clip_against_scikit_learn() -> None:
    audio, classes = features(120, 2), features(10, 3)
    is_of_class = torch.rand(120, 10, generator=torch.Generator().manual_seed(4)) < 0.2
    is_of_class[torch.arange(120), torch.arange(120) % 10] = True
    found = evaluate_zero_shot(audio, classes, is_of_class, ALONE, resample=True).measures
    scores = (audio @ classes.T).numpy()
    assert found["zero_shot_map"].value == pytest.approx(
        average_precision_score(is_of_class.numpy(), scores, average="macro"), abs=1e-9
    )
    best = np.argsort(-scores, axis=1)
    for k in (1, 5):
        any_hit = np.take_along_axis(is_of_class.numpy(), best[:, :k], axis=1).any(axis=1)
        assert found[f"zero_shot_top{k}"].value == pytest.approx(any_hit.mean(), abs=1e-12)


def test_a_constant_model_scores_chance() -> None:
    audio, classes = features(1, 0, 512).expand(90, -1), features(1, 1, 512).expand(20, -1)
    # A tie broken by order would find class 0, which most clips are of.
    labels = torch.cat((torch.zeros(71, dtype=torch.long), torch.arange(1, 20)))
    found = evaluate_zero_shot(audio, classes, one_hot(labels, 20), ALONE, resample=False).measures
    assert found["zero_shot_top1"].value == pytest.approx(1 / 20)
    assert found["zero_shot_top5"].value == pytest.approx(5 / 20)
    for measure in found.values():
        assert measure.value == pytest.approx(measure.chance, abs=1e-12)


def test_chance_of_average_precision_is_what_random_models_reach() -> None:
    is_of_class = one_hot(torch.arange(24) % 3, 3)
    reached = []
    for seed in range(60):
        found = evaluate_zero_shot(features(24, seed), features(3, seed + 500), is_of_class, ALONE, resample=False)
        reached.append(found.measures["zero_shot_map"].value)
    error = np.std(reached) / np.sqrt(len(reached))
    assert abs(np.mean(reached) - found.measures["zero_shot_map"].chance) < 4 * error


def test_the_interval_of_average_precision() -> None:
    labels = torch.arange(200) % 4
    classes = features(4, 0, 16)
    audio = F.normalize(classes[labels] + 2 * features(200, 1, 16), dim=1)
    measure = evaluate_zero_shot(audio, classes, one_hot(labels, 4), ALONE, resample=True).measures["zero_shot_map"]
    again = evaluate_zero_shot(audio, classes, one_hot(labels, 4), ALONE, resample=True).measures["zero_shot_map"]
    assert measure == again
    assert 0.5 < measure.low < measure.value < measure.high < 1
    assert measure.high - measure.low < 0.3


def test_the_interval_holds_the_value_with_few_clips_of_a_class() -> None:
    for seed in range(5):
        is_of_class = one_hot(torch.arange(60) % 26, 26)
        found = evaluate_zero_shot(features(60, seed), features(26, seed + 9), is_of_class, ALONE, resample=True)
        measure = found.measures["zero_shot_map"]
        assert 0 <= measure.low < measure.value < measure.high
        assert measure.low < measure.chance < measure.high


def test_fewer_classes_than_the_best_five() -> None:
    found = evaluate_zero_shot(features(10, 0), features(3, 1), one_hot(torch.arange(10) % 3, 3), ALONE, resample=False)
    assert found.measures["zero_shot_top5"].value == 1.0
    assert found.measures["zero_shot_top5"].chance == 1.0


def test_captions_of_a_class_are_every_name_in_every_template() -> None:
    captions = class_captions({"dog": ["dog", "barking"], "cat": ["cat"]}, ["{}", "a {} and {x}"])
    assert captions == [["dog", "a dog and {x}", "barking", "a barking and {x}"], ["cat", "a cat and {x}"]]


def test_a_class_is_the_mean_of_its_captions() -> None:
    text = features(5, 0)
    found = class_features([["a", "b", "c"], ["d", "e"]], text)
    expected = F.normalize(torch.stack([text[:3].mean(0), text[3:].mean(0)]), dim=1)
    torch.testing.assert_close(found, expected)
