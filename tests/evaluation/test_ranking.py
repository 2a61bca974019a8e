"""Rankings equal means over every order of tied candidates."""

from itertools import pairwise, permutations, product

import numpy as np
import pytest
import torch

from clap_ds.evaluation.ranking import measures


def measure_all_orders(
    scores: tuple[int, ...], relevant: tuple[bool, ...], at: tuple[int, ...], cutoff: int
) -> list[float]:
    """Compute `measures` as means over every non-increasing order of the candidates."""
    results = []
    for order in permutations(range(len(scores))):
        if any(scores[a] < scores[b] for a, b in pairwise(order)):
            continue
        hits = np.array([relevant[candidate] for candidate in order])
        precisions = hits * hits.cumsum() / np.arange(1, len(hits) + 1)
        average = precisions[:cutoff].sum() / min(cutoff, sum(relevant))
        results.append([*(hits[:k].any() for k in at), average])
    return list(np.mean(results, axis=0))


def test_measures_are_means_over_all_orders_of_ties():
    """Of three candidates with any ties, of which one or more are relevant."""
    for scores, relevant in product(product(range(3), repeat=3), product((False, True), repeat=3)):
        if any(relevant):
            scores_1C = torch.tensor([scores], dtype=torch.float32)
            (result,) = measures(scores_1C, torch.tensor([relevant]), at=(1, 2), cutoff=2).tolist()
            assert result == pytest.approx(measure_all_orders(scores, relevant, (1, 2), 2))


def test_nan_score_ranks_last():
    scores = torch.tensor([[float("nan"), -0.5, 0.5]])
    relevant = torch.tensor([[True, False, False]])
    # Not among the best 1 or 2, but third of three.
    expected = [[0.0, 0.0, pytest.approx(1 / 3)]]
    assert measures(scores, relevant, at=(1, 2)).tolist() == expected
