"""Rankings against scikit-learn where nothing is tied, and against every possible order where something is."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clap_ds.evaluation import ranking
from clap_ds.evaluation.ranking import tally
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


def as_tensors(case: Case) -> tuple[Tensor, Tensor]:
    scores, relevant = case
    return torch.tensor([scores], dtype=torch.float32), torch.tensor([[i for i, r in enumerate(relevant) if r]])


@settings(max_examples=120, deadline=None)
@given(tied_cases(), st.integers(1, 7))
def test_measures_are_means_over_all_orders_of_tied_candidates(case: Case, k: int) -> None:
    in_order = [[case[1][i] for i in order] for order in orders(case[0])]
    found = tally(*as_tensors(case), cutoff=7).hit_rate(k)
    assert found.item() == pytest.approx(np.mean([any(order[:k]) for order in in_order]), abs=1e-12)
    found = tally(*as_tensors(case), cutoff=k).precision_sum()
    assert found.item() == pytest.approx(np.mean([precisions(order[:k]) for order in in_order]), abs=1e-12)
    found = ranking.average_precision(as_tensors(case)[0], torch.tensor([case[1]]))
    expected = np.mean([precisions(order) for order in in_order]) / sum(case[1])
    assert found.item() == pytest.approx(expected, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(tied_cases(), st.integers(1, 6))
def test_chance_is_what_equal_scores_give(case: Case, cutoff: int) -> None:
    scores, relevant = as_tensors(case)
    tied = tally(torch.zeros_like(scores), relevant, cutoff)
    by_chance = ranking.tally_by_chance(torch.tensor([relevant.shape[1]]), scores.shape[1], cutoff)
    assert all(map(torch.equal, tied, by_chance))


def test_what_is_no_number_ranks_last() -> None:
    scores = torch.tensor([[torch.nan, 0.1, 0.2], [torch.nan] * 3])
    found = tally(scores, torch.tensor([[0], [0]]), cutoff=3)
    assert found.hit_rate(1).tolist() == pytest.approx([0, 1 / 3])
    assert found.hit_rate(3).tolist() == pytest.approx([1, 1])
    precision = ranking.average_precision(scores, torch.tensor([[True, False, False]] * 2))
    assert precision.tolist() == pytest.approx([1 / 3, (1 + 1 / 2 + 1 / 3) / 3])


def test_sums_are_finer_than_fp32() -> None:
    queries, candidates = torch.ones(1, 3), torch.tensor([[1e8, 1.0, -1e8], [0.0, 0.5, 0.0]])
    ((_, scores),) = ranking.similarity(queries, candidates, ALONE)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[1.0, 0.5]]


def test_holds_no_more_scores_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "SCORES_HELD", 100)
    sizes = [scores.numel() for _, scores in ranking.similarity(torch.ones(41, 4), torch.ones(30, 4), ALONE)]
    assert max(sizes) <= 100
    assert sum(sizes) == 41 * 30
