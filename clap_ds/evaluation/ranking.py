"""Rank candidates by similarity and compute hits among the best k and average precision.

With ties, each measure is its expectation over all orders of equal scores (McSherry & Najork, ECIR
2008). So constant predictions score chance.

Shape letters: Q queries, C candidates, D joint dimension, M measures, U different numbers of
relevant candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from clap_ds.distributed.init import Ranks

SCORES_HELD = 2**22
"""Most scores that a rank holds in memory (about 150 bytes each), but at least one query's."""


def rank_candidates(
    queries_QD: Tensor,
    candidates_CD: Tensor,
    relevant: Callable[[slice], Tensor],
    *,
    at: Sequence[int] = (),
    cutoff: int | None = None,
    ranks: Ranks,
) -> tuple[Tensor, Tensor]:
    """Compute `measures` from dot products of fp32 features, and their chance levels, (Q, M) each.
    A collective. `relevant` returns, for a slice of n queries, the relevant candidates as (n, C)
    bool."""
    found_2QM = torch.zeros(
        2, len(queries_QD), len(at) + 1, dtype=torch.float64, device=queries_QD.device
    )
    by_number: dict[int, Tensor] = {}
    for rows, scores in similarity(queries_QD, candidates_CD, ranks):
        relevant_QC = relevant(rows)
        found_2QM[0, rows] = measures(scores, relevant_QC, at=at, cutoff=cutoff)
        # Chance is the result with all candidates tied, which depends only on the number of
        # relevant ones.
        numbers_Q = relevant_QC.sum(1, dtype=torch.int32)  # a quarter of int64's time
        for number in {*numbers_Q.tolist()} - by_number.keys():
            tied_1C = torch.arange(len(candidates_CD), device=scores.device)[None] < number
            by_number[number] = measures(
                torch.zeros_like(scores[:1]), tied_1C, at=at, cutoff=cutoff
            )[0]
        found_2QM[1, rows] = torch.stack([by_number[number] for number in numbers_Q.tolist()])
    if ranks.world_size > 1:
        dist.all_reduce(found_2QM)
    return found_2QM[0], found_2QM[1]


def measures(
    scores_QC: Tensor, relevant_QC: Tensor, *, at: Sequence[int] = (), cutoff: int | None = None
) -> Tensor:
    """Measure rankings, (Q, M) float64: for each k of `at` the probability of a relevant candidate
    among the best k, then the average precision at `cutoff` (default: all). NaN if none is
    relevant. NaN scores rank last."""
    scores_QC = scores_QC.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    num_relevant_Q = relevant_QC.sum(1, dtype=torch.int32)
    cutoff = cutoff or scores_QC.shape[1]
    num_ranks = max([cutoff, *at])
    best, order = scores_QC.topk(min(num_ranks + 1, scores_QC.shape[1]), dim=1)
    found_QM = _measures(
        best[:, :num_ranks], relevant_QC.gather(1, order[:, :num_ranks]), num_relevant_Q, at, cutoff
    )
    # Sort all only if ties with the last of the best continue beyond them.
    goes_on_Q = (best[:, num_ranks:] == best[:, num_ranks - 1 : num_ranks]).any(1)
    best, order = scores_QC[goes_on_Q].sort(dim=1, descending=True)
    found_QM[goes_on_Q] = _measures(
        best, relevant_QC[goes_on_Q].gather(1, order), num_relevant_Q[goes_on_Q], at, cutoff
    )
    return found_QM


def _measures(
    best_QR: Tensor, relevant_QR: Tensor, total_Q: Tensor, at: Sequence[int], cutoff: int
) -> Tensor:
    """Measure the R best scores, (Q, R), which include all their ties, by their relevance and the
    total relevant, (Q,)."""
    num_ranks = best_QR.shape[1]
    rank = torch.arange(num_ranks, device=best_QR.device)
    differs = best_QR[:, 1:] != best_QR[:, :-1]
    # Start (`above`) and end of the tie at each rank, (Q, R).
    above = torch.where(F.pad(differs, (1, 0), value=True), rank, 0).cummax(1).values
    end = (
        torch.where(F.pad(differs, (0, 1), value=True), rank + 1, num_ranks)
        .flip(1)
        .cummin(1)
        .values.flip(1)
    )
    num_relevant = F.pad(relevant_QR.cumsum(1), (1, 0))
    relevant_above = num_relevant.gather(1, above)
    tied = (end - above).double()
    relevant_tied = (num_relevant.gather(1, end) - relevant_above).double()
    columns = []
    for k in at:
        last = min(k, num_ranks) - 1
        missed = _missed(tied[:, last], relevant_tied[:, last], last + 1 - above[:, last], k)
        columns.append(torch.where(relevant_above[:, last] == 0, 1 - missed, 1.0))
    before_in_tie = (rank - above) * (relevant_tied - 1) / (tied - 1).clamp(min=1)
    precision = relevant_tied / tied * (relevant_above + 1 + before_in_tie) / (rank + 1)
    average = precision[:, :cutoff].sum(1) / total_Q.clamp(max=cutoff)
    return torch.stack([*columns, average], dim=1)


def _missed(tied_Q: Tensor, relevant_Q: Tensor, drawn_Q: Tensor, most: int) -> Tensor:
    """Compute the probability, (Q,) float64, that none of `drawn_Q` (at most `most`) tied
    candidates is relevant."""
    missed = torch.ones(len(relevant_Q), dtype=torch.float64, device=relevant_Q.device)
    for number in range(most):
        others = (tied_Q - relevant_Q - number).clamp(min=0)
        missed = torch.where(
            number < drawn_Q, missed * others / (tied_Q - number).clamp(min=1), missed
        )
    return missed


def similarity(
    queries_QD: Tensor, candidates_CD: Tensor, ranks: Ranks
) -> Iterator[tuple[slice, Tensor]]:
    """Yield this rank's blocks of the similarity matrix: row slices and fp32 scores, summed in fp64
    so that equal features have equal scores. The blocks depend only on C."""
    candidates_DC = candidates_CD.double().T
    num_rows = max(1, SCORES_HELD // max(1, len(candidates_CD)))
    for number, start in enumerate(range(0, len(queries_QD), num_rows)):
        if number % ranks.world_size == ranks.rank:
            rows = slice(start, start + num_rows)
            yield rows, (queries_QD[rows].double() @ candidates_DC).float()
