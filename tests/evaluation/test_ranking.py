"""Rankings against every possible order of tied candidates."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.evaluation import ranking
from clap_ds.evaluation.ranking import chance, measures
from tests.evaluation.conftest import ALONE

Case = tuple[list[int], list[bool]]


@st.composite
def tied_cases(draw: st.DrawFn) -> Case:
    """Scores of up to six candidates, many of them equal, and which are relevant (one at least)."""
    scores = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    relevant = draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    relevant[draw(st.integers(0, len(scores) - 1))] = True
    return scores, relevant


def orders(scores: list[int]) -> list[tuple[int, ...]]:
    """Every order of the candidates in which no score rises."""
    every = itertools.permutations(range(len(scores)))
    return [order for order in every if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))]


def precisions(relevant_in_order: list[bool]) -> float:
    hits = np.cumsum(relevant_in_order)
    return float(sum(hits[i] / (i + 1) for i, is_relevant in enumerate(relevant_in_order) if is_relevant))


@settings(max_examples=120, deadline=None)
@given(tied_cases(), st.integers(1, 7))
def test_measures_are_means_over_all_orders_of_tied_candidates(case: Case, k: int) -> None:
    scores, relevant = torch.tensor([case[0]], dtype=torch.float32), torch.tensor([case[1]])
    for each, found in (
        (case, measures(scores, relevant, at=(k, 1), cutoff=k)),
        (([0] * len(case[0]), case[1]), chance(relevant.sum(1), len(case[0]), at=(k, 1), cutoff=k)),
    ):
        in_order = [[case[1][i] for i in order] for order in orders(each[0])]
        expected = [np.mean([any(order[:most]) for order in in_order]) for most in (k, 1)]
        expected.append(np.mean([precisions(order[:k]) for order in in_order]) / min(k, sum(case[1])))
        assert found[0].tolist() == pytest.approx(expected, abs=1e-12)
    in_order = [[case[1][i] for i in order] for order in orders(case[0])]
    whole = np.mean([precisions(order) for order in in_order]) / sum(case[1])
    assert measures(scores, relevant).tolist() == [[pytest.approx(whole, abs=1e-12)]]


def test_what_is_no_number_ranks_last() -> None:
    scores = torch.tensor([[torch.nan, 0.1, 0.2], [torch.nan] * 3])
    found = measures(scores, torch.tensor([[True, False, False]] * 2), at=(1, 3))
    assert found.tolist() == [
        pytest.approx([0, 1, 1 / 3]),
        pytest.approx([1 / 3, 1, (1 + 1 / 2 + 1 / 3) / 3]),
    ]


def test_sums_are_finer_than_fp32_and_no_more_scores_are_held_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, candidates = torch.ones(1, 3), torch.tensor([[1e8, 1.0, -1e8], [0.0, 0.5, 0.0]])
    ((_, scores),) = ranking.similarity(queries, candidates, ALONE)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[1.0, 0.5]]
    monkeypatch.setattr(ranking, "SCORES_HELD", 100)
    sizes = [scores.numel() for _, scores in ranking.similarity(torch.ones(41, 4), torch.ones(30, 4), ALONE)]
    assert max(sizes) <= 100
    assert sum(sizes) == 41 * 30
