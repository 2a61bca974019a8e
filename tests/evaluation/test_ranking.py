"""Rankings equal means over every order of tied candidates."""

from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.evaluation.ranking import measures


@st.composite
def tied_cases(draw: st.DrawFn) -> tuple[list[int], list[bool]]:
    """Draw scores of up to six candidates, many of them equal, and which are relevant (at least
    one)."""
    scores = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    relevant = draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    relevant[draw(st.integers(0, len(scores) - 1))] = True
    return scores, relevant


def measure_all_orders(
    scores: list[int], relevant: list[bool], at: tuple[int, ...], cutoff: int
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


@settings(max_examples=120, deadline=None)
@given(tied_cases(), st.integers(1, 7))
def test_measures_are_means_over_all_orders_of_ties(
    case: tuple[list[int], list[bool]], k: int
) -> None:
    scores, relevant = case
    scores_1C = torch.tensor([scores], dtype=torch.float32)
    relevant_1C = torch.tensor([relevant])
    at = (k, 1)
    (with_cutoff,) = measures(scores_1C, relevant_1C, at=at, cutoff=k).tolist()
    assert with_cutoff == pytest.approx(measure_all_orders(scores, relevant, at, k), abs=1e-12)
    (average,) = measures(scores_1C, relevant_1C).tolist()
    expected = measure_all_orders(scores, relevant, (), len(scores))
    assert average == pytest.approx(expected, abs=1e-12)


def test_nan_score_ranks_last() -> None:
    scores = torch.tensor([[float("nan"), -0.5, 0.5]])
    relevant = torch.tensor([[True, False, False]])
    # Not among the best 1 or 2, but third of three.
    expected = [[0.0, 0.0, pytest.approx(1 / 3)]]
    assert measures(scores, relevant, at=(1, 2)).tolist() == expected
