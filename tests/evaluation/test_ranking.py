"""Test rankings against every order of tied candidates."""

import itertools

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


def by_definition(
    scores: list[int], relevant: list[bool], at: tuple[int, ...], cutoff: int
) -> list[float]:
    """Compute `measures` as means over every non-increasing order of the candidates."""
    found = []
    for order in itertools.permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
            hits = np.array([relevant[i] for i in order])
            precision = (hits * hits.cumsum() / np.arange(1, len(hits) + 1))[:cutoff].sum() / min(
                cutoff, sum(relevant)
            )
            found.append([*(hits[:k].any() for k in at), precision])
    return list(np.mean(found, axis=0))


@settings(max_examples=120, deadline=None)
@given(tied_cases(), st.integers(1, 7))
def test_measures_are_means_over_all_orders_of_tied_candidates(
    case: tuple[list[int], list[bool]], k: int
) -> None:
    (scores, wanted), at = case, (k, 1)
    relevant = torch.tensor([wanted])
    by_score = torch.tensor([scores], dtype=torch.float32)
    (found,), (whole,) = (
        measures(by_score, relevant, at=at, cutoff=k).tolist(),
        measures(by_score, relevant).tolist(),
    )
    assert found == pytest.approx(by_definition(scores, wanted, at, k), abs=1e-12)
    assert whole == pytest.approx(by_definition(scores, wanted, (), len(scores)), abs=1e-12)


def test_a_score_that_is_not_a_number_ranks_last() -> None:
    scores = torch.tensor([[float("nan"), -0.5, 0.5]])
    first_and_all = measures(scores, torch.tensor([[True, False, False]]), at=(1, 2))
    assert first_and_all.tolist() == [[0.0, 0.0, pytest.approx(1 / 3)]]
    assert measures(scores, torch.tensor([[False, True, False]]), at=(2,)).tolist() == [[1.0, 0.5]]
