"""How high relevant candidates rank by similarity: hits among the best k, and average precision.

Candidates of equal score have no order of their own. Every measure here is its expectation over all orders they could be in
(McSherry & Najork, ECIR 2008), so that it depends on nothing but the scores, and a model that says the same of everything
scores chance. What is a query, a candidate and relevant is left to `metrics`.

Shape letters: Q queries, C candidates, K ranks looked at, D joint dimension, M measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from clap_ds.ranks.distributed import Ranks

SCORES_HELD = 2**22
"""Most scores a rank holds at a time, or one query's if those are more: some 150 bytes each."""


def rank_candidates(
    queries_QD: Tensor,
    candidates_CD: Tensor,
    relevant: Callable[[slice], Tensor],
    *,
    at: Sequence[int] = (),
    cutoff: int | None = None,
    ranks: Ranks,
) -> tuple[Tensor, Tensor]:
    """`measures` by the products of fp32 features, and their chance levels, (Q, M) each. A collective; the same on every rank,
    whatever their number.

    Args:
        queries_QD, candidates_CD: all of them, the same on every rank, on one device.
        relevant: of some queries, (their number, C) bool: which candidates are relevant.
        at, cutoff: as in `measures`.
    """
    found_2QM = torch.zeros(2, len(queries_QD), len(at) + 1, dtype=torch.float64, device=queries_QD.device)
    for rows, scores in similarity(queries_QD, candidates_CD, ranks):
        relevant_QC = relevant(rows)
        found_2QM[0, rows] = measures(scores, relevant_QC, at=at, cutoff=cutoff)
        found_2QM[1, rows] = chance(_count(relevant_QC), len(candidates_CD), at=at, cutoff=cutoff)
    if ranks.world_size > 1:
        dist.all_reduce(found_2QM)
    return found_2QM[0], found_2QM[1]


def measures(scores_QC: Tensor, relevant_QC: Tensor, *, at: Sequence[int] = (), cutoff: int | None = None) -> Tensor:
    """(Q, M) float64: for each k of `at` the probability that a relevant candidate is among the best k (or all of fewer); last
    the average precision of the best `cutoff`, of all by default. NaN where none is relevant. NaN scores rank last."""
    scores_QC = scores_QC.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    num_candidates = scores_QC.shape[1]
    num_ranks = min(max(cutoff or num_candidates, *at, 1), num_candidates)
    best, order = scores_QC.topk(min(num_ranks + 1, num_candidates), dim=1)
    ties_beyond_Q = (best[:, num_ranks:] == best[:, num_ranks - 1, None]).any(1)
    best, order = best[:, :num_ranks], order[:, :num_ranks]
    rank = torch.arange(num_ranks, device=best.device)
    differs = best[:, 1:] != best[:, :-1]
    # Of the candidates that the one at each rank is tied with, (Q, K): how many are above, and how many reach to where.
    above = torch.where(F.pad(differs, (1, 0), value=True), rank, 0).cummax(1).values
    end = torch.where(F.pad(differs, (0, 1), value=True), rank + 1, num_ranks).flip(1).cummin(1).values.flip(1)
    num_relevant = F.pad(relevant_QC.gather(1, order).cumsum(1), (1, 0))
    relevant_above = num_relevant.gather(1, above)
    tied, relevant_tied = end - above, num_relevant.gather(1, end) - relevant_above
    if ties_beyond_Q.any():  # what ties with the last goes on beyond the best
        is_last = (best == best[:, -1:]) & ties_beyond_Q[:, None]
        ties_last = scores_QC == best[:, -1:]
        tied = torch.where(is_last, _count(ties_last)[:, None], tied)
        relevant_tied = torch.where(is_last, _count(ties_last & relevant_QC)[:, None], relevant_tied)
    tied, relevant_tied = tied.double(), relevant_tied.double()
    columns = []
    for k in at:
        last = min(k, num_ranks) - 1
        missed = _missed(tied[:, last], relevant_tied[:, last], last + 1 - above[:, last], k)
        columns.append(torch.where(relevant_above[:, last] == 0, 1 - missed, 1.0))
    before_in_tie = (rank - above) * (relevant_tied - 1) / (tied - 1).clamp(min=1)
    precision = relevant_tied / tied * (relevant_above + 1 + before_in_tie) / (rank + 1)
    cutoff = cutoff or num_ranks
    average = precision[:, :cutoff].sum(1) / _count(relevant_QC).clamp(max=cutoff)
    return torch.stack([*columns, average], dim=1)


def _count(marked_QC: Tensor) -> Tensor:
    """(Q,) int32, which takes a quarter of int64's time."""
    return marked_QC.sum(1, dtype=torch.int32)


def _missed(tied_Q: Tensor, relevant_Q: Tensor, drawn_Q: Tensor, most: int) -> Tensor:
    """(Q,) float64: the probability that none of so many candidates, at most `most`, drawn from those tied is relevant."""
    missed = torch.ones(len(relevant_Q), dtype=torch.float64, device=relevant_Q.device)
    for number in range(most):
        others = (tied_Q - relevant_Q - number).clamp(min=0).double()
        missed = torch.where(number < drawn_Q, missed * others / (tied_Q - number).clamp(min=1), missed)
    return missed


def chance(num_relevant_Q: Tensor, num_candidates: int, *, at: Sequence[int] = (), cutoff: int | None = None) -> Tensor:
    """What `measures` gives where all candidates are tied, by how many are relevant.

    One stands at rank r with probability R/C, and each of the r - 1 above is relevant, too, with (R - 1)/(C - 1).
    """
    tied_Q = torch.full_like(num_relevant_Q, num_candidates)
    columns = [1 - _missed(tied_Q, num_relevant_Q, tied_Q.clamp(max=k), k) for k in at]
    cutoff = cutoff or num_candidates
    num_ranks = min(cutoff, num_candidates)
    harmonic = float((1 / torch.arange(1, num_ranks + 1, dtype=torch.float64)).sum())
    relevant_Q = num_relevant_Q.double()
    beside_Q = (relevant_Q - 1) / max(num_candidates - 1, 1)
    precision_Q = relevant_Q / num_candidates * (harmonic + beside_Q * (num_ranks - harmonic))
    return torch.stack([*columns, precision_Q / relevant_Q.clamp(max=cutoff)], dim=1)


def similarity(queries_QD: Tensor, candidates_CD: Tensor, ranks: Ranks) -> Iterator[tuple[slice, Tensor]]:
    """This rank's share of the rows of the similarity matrix, some at a time: which, and their scores in fp32.

    Summed in fp64, so that equal features have equal scores and no setting of the device's changes a rank. How the rows are cut
    depends on C alone.
    """
    candidates_DC = candidates_CD.double().T
    num_rows = max(1, SCORES_HELD // max(1, len(candidates_CD)))
    for number, start in enumerate(range(0, len(queries_QD), num_rows)):
        if number % ranks.world_size == ranks.rank:
            rows = slice(start, start + num_rows)
            yield rows, (queries_QD[rows].double() @ candidates_DC).float()
