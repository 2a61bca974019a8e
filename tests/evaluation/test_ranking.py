"""Rankings against scikit-learn where nothing is tied, and against every possible order where something is."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clap_ds.evaluation import ranking
from clap_ds.evaluation.ranking import tally
from tests.evaluation.conftest import ALONE, on_ranks, ranks_here
from tests.ranks import RankPool

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


def padded_indices(relevant: Tensor) -> Tensor:
    rows = [row.nonzero()[:, 0].tolist() for row in relevant]
    most = max(map(len, rows))
    return torch.tensor([row + [-1] * (most - len(row)) for row in rows])


def test_what_is_no_number_ranks_last() -> None:
    scores = torch.tensor([[torch.nan, 0.1, 0.2], [torch.nan] * 3])
    found = tally(scores, torch.tensor([[0], [0]]), cutoff=3)
    assert found.hit_rate(1).tolist() == pytest.approx([0, 1 / 3])
    assert found.hit_rate(3).tolist() == pytest.approx([1, 1])
    precision = ranking.average_precision(scores, torch.tensor([[True, False, False]] * 2))
    assert precision.tolist() == pytest.approx([1 / 3, (1 + 1 / 2 + 1 / 3) / 3])


def rank_features(scores_held: int, on_several: bool) -> tuple[list[Tensor], Tensor]:
    """Rank the same features in chunks of at most so many scores."""
    ranks, generator = ranks_here() if on_several else ALONE, torch.Generator().manual_seed(3)
    queries, candidates = torch.randn(37, 8, generator=generator), torch.randn(23, 8, generator=generator)
    candidates[5] = candidates[6]  # a tie
    relevant = torch.rand(37, 23, generator=generator) < 0.2
    relevant[:, 6] = True
    with mock.patch.object(ranking, "SCORES_HELD", scores_held):
        found = ranking.tally_by_similarity(queries, candidates, padded_indices(relevant), cutoff=10, ranks=ranks)
        return list(found), ranking.average_precision_by_similarity(queries, candidates, relevant, ranks=ranks)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_finds_the_same(eight_processes: RankPool, tmp_path: Path, world_size: int) -> None:
    expected_tally, expected_precision = rank_features(2**20, False)
    for found_tally, found_precision in on_ranks(eight_processes, world_size, tmp_path, rank_features, 50, True):
        assert all(map(torch.equal, found_tally, expected_tally))
        assert torch.equal(found_precision, expected_precision)


def test_equal_features_are_tied() -> None:
    feature = torch.nn.functional.normalize(torch.randn(1, 512, generator=torch.Generator().manual_seed(0)))
    candidates = feature.repeat(1003, 1)
    found = ranking.tally_by_similarity(feature, candidates, torch.tensor([[1002]]), cutoff=1, ranks=ALONE)
    assert found.tied.item() == 1003


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


def test_members_by_group() -> None:
    assert ranking.members_by_group(torch.tensor([1, 0, 1, 2]), 3).tolist() == [[1, -1], [0, 2], [3, -1]]
