"""Rank candidates by similarity and compute hits among the best k and average precision.

With ties, each measure is its expectation over all orders of equal scores (McSherry & Najork, ECIR
2008). So constant predictions score chance.

Shape letters: Q queries, C candidates, D joint dimension, M measures, U different numbers of
relevant candidates.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from clap_ds.distributed.init import Ranks

# Most scores that a rank holds in memory (about 150 bytes each), but at least one query's.
SCORES_HELD = 2**22


def rank_candidates(
    queries_QD: Tensor,
    candidates_CD: Tensor,
    find_relevant: Callable[[slice], Tensor],
    *,
    at: Sequence[int] = (),
    cutoff: int | None = None,
    ranks: Ranks,
) -> tuple[Tensor, Tensor]:
    """Compute `measures` from dot products of fp32 features, and their chance levels, (Q, M) each.
    A collective. `find_relevant` returns, for a slice of n queries, the relevant candidates as
    (n, C) bool."""
    # Values and chances. Rows of other ranks' queries stay 0.
    result_2QM = torch.zeros(
        2, len(queries_QD), len(at) + 1, dtype=torch.float64, device=queries_QD.device
    )
    for rows, scores_QC in similarity(queries_QD, candidates_CD, ranks):
        relevant_QC = find_relevant(rows)
        result_2QM[0, rows] = measures(scores_QC, relevant_QC, at=at, cutoff=cutoff)
        # Chance is the result with all candidates tied, which depends only on the number of
        # relevant ones. int32 takes a quarter of int64's time.
        numbers_U, number_of_Q = relevant_QC.sum(1, dtype=torch.int32).unique(return_inverse=True)
        rank_C = torch.arange(len(candidates_CD), device=queries_QD.device)
        tied_UC = torch.zeros(len(numbers_U), len(rank_C), device=queries_QD.device)
        chances_UM = measures(tied_UC, rank_C < numbers_U[:, None], at=at, cutoff=cutoff)
        result_2QM[1, rows] = chances_UM[number_of_Q]
    if ranks.world_size > 1:
        dist.all_reduce(result_2QM)
    return result_2QM[0], result_2QM[1]


def measures(
    scores_QC: Tensor, relevant_QC: Tensor, *, at: Sequence[int] = (), cutoff: int | None = None
) -> Tensor:
    """Measure rankings, (Q, M) float64: for each k of `at` the probability of a relevant candidate
    among the best k, then the average precision at `cutoff` (default: all). NaN if none is
    relevant. NaN scores rank last."""
    scores_QC = scores_QC.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    num_candidates = scores_QC.shape[1]
    num_relevant_Q = relevant_QC.sum(1, dtype=torch.int32)
    cutoff = cutoff or num_candidates
    num_ranks = max([cutoff, *at])
    # One more than measured shows whether ties with the last of the best continue beyond them.
    best_QR, order_QR = scores_QC.topk(min(num_ranks + 1, num_candidates), dim=1)
    result_QM = _measure_best(
        best_QR[:, :num_ranks],
        relevant_QC.gather(1, order_QR[:, :num_ranks]),
        num_relevant_Q,
        at,
        cutoff,
    )
    continues_Q = (best_QR[:, num_ranks:] == best_QR[:, num_ranks - 1 : num_ranks]).any(1)
    # Sorting all candidates of all queries would take longer.
    all_QC, order_QC = scores_QC[continues_Q].sort(dim=1, descending=True)
    result_QM[continues_Q] = _measure_best(
        all_QC,
        relevant_QC[continues_Q].gather(1, order_QC),
        num_relevant_Q[continues_Q],
        at,
        cutoff,
    )
    return result_QM


def _measure_best(
    best_QR: Tensor, relevant_QR: Tensor, total_Q: Tensor, at: Sequence[int], cutoff: int
) -> Tensor:
    """Measure the R best scores, (Q, R), which include all their ties, by their relevance and the
    total relevant, (Q,)."""
    num_ranks = best_QR.shape[1]
    rank_R = torch.arange(num_ranks, device=best_QR.device)
    differs_Qr = best_QR[:, 1:] != best_QR[:, :-1]
    # Start and end of the tie at each rank, (Q, R): the last rank up to here at which the score
    # changes, and the next one.
    is_start_QR = F.pad(differs_Qr, (1, 0), value=True)
    start_QR = torch.where(is_start_QR, rank_R, 0).cummax(1).values
    is_end_QR = F.pad(differs_Qr, (0, 1), value=True)
    end_QR = torch.where(is_end_QR, rank_R + 1, num_ranks).flip(1).cummin(1).values.flip(1)

    # Relevant candidates above each rank, (Q, R + 1).
    num_relevant = F.pad(relevant_QR.cumsum(1), (1, 0))
    relevant_above = num_relevant.gather(1, start_QR)
    tied = (end_QR - start_QR).double()
    relevant_tied = (num_relevant.gather(1, end_QR) - relevant_above).double()
    columns = []
    for k in at:
        # The best k end within the tie at this rank.
        last = min(k, num_ranks) - 1
        drawn_Q = last + 1 - start_QR[:, last]
        missed_Q = _probability_of_none(tied[:, last], relevant_tied[:, last], drawn_Q, k)
        columns.append(torch.where(relevant_above[:, last] == 0, 1 - missed_Q, 1.0))
    # Precision at rank r, if the candidate there is relevant, which has the probability
    # relevant_tied / tied: relevant ones above the tie, expected ones before it in the tie, and
    # itself, out of r + 1.
    before_in_tie = (rank_R - start_QR) * (relevant_tied - 1) / (tied - 1).clamp(min=1)
    precision = relevant_tied / tied * (relevant_above + 1 + before_in_tie) / (rank_R + 1)
    average_Q = precision[:, :cutoff].sum(1) / total_Q.clamp(max=cutoff)
    return torch.stack([*columns, average_Q], dim=1)


def _probability_of_none(tied_Q: Tensor, relevant_Q: Tensor, drawn_Q: Tensor, most: int) -> Tensor:
    """Compute the probability, (Q,) float64, that none of `drawn_Q` (at most `most`) tied
    candidates is relevant."""
    # Draws without replacement: Π (tied - relevant - i) / (tied - i).
    probability_Q = torch.ones(len(relevant_Q), dtype=torch.float64, device=relevant_Q.device)
    for number in range(most):
        irrelevant_Q = (tied_Q - relevant_Q - number).clamp(min=0)
        with_draw_Q = probability_Q * irrelevant_Q / (tied_Q - number).clamp(min=1)
        probability_Q = torch.where(number < drawn_Q, with_draw_Q, probability_Q)
    return probability_Q


def similarity(
    queries_QD: Tensor, candidates_CD: Tensor, ranks: Ranks
) -> Iterator[tuple[slice, Tensor]]:
    """Yield this rank's blocks of the similarity matrix: row slices and fp32 scores, summed in fp64
    so that equal features have equal scores. The blocks depend only on C."""
    candidates_DC = candidates_CD.double().T
    num_rows = max(1, SCORES_HELD // max(1, len(candidates_CD)))
    for number, start in enumerate(range(0, len(queries_QD), num_rows)):
        # Blocks are interleaved over ranks.
        if number % ranks.world_size == ranks.rank:
            rows = slice(start, start + num_rows)
            yield rows, (queries_QD[rows].double() @ candidates_DC).float()
