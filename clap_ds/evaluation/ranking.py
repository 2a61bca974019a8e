"""Exact rankings by similarity, and what is measured on them: hits among the best k, average precision.

Candidates of equal score have no order of their own. Every measure here is its expectation over all orders they could be in
(McSherry & Najork, ECIR 2008), so that it depends on nothing but the scores, and a model that says the same of everything
scores chance. What is a query, a candidate and relevant is left to `metrics`.

Shape letters: Q queries, C candidates, R the most relevant candidates of any query, K ranks looked at, D joint dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.ranks.distributed import Ranks

SCORES_HELD = 2**22
"""Most scores a rank holds at a time, or one query's if those are more: some 20 bytes each for a tally, 150 for an average
precision over all candidates."""


class Tally(NamedTuple):
    """What the candidate at each rank is tied with. All int64, (Q, K), for ranks 1 … K of each query.

    Attributes:
        above: candidates of a higher score.
        tied: candidates of the same score, itself included.
        relevant_above, relevant_tied: how many of these are relevant.
    """

    above: Tensor
    tied: Tensor
    relevant_above: Tensor
    relevant_tied: Tensor

    def hit_rate(self, k: int) -> Tensor:
        """(Q,) float64: probability that a relevant candidate is among the best k. Beyond K (all candidates) as at K."""
        column = min(k, self.above.shape[1]) - 1
        above, tied, relevant_above, relevant_tied = (tensor[:, column].double() for tensor in self)
        drawn = column + 1 - above
        missed = (relevant_above == 0).double()
        for number in range(k):
            factor = (tied - relevant_tied - number).clamp(min=0) / (tied - number).clamp(min=1)
            missed = torch.where(number < drawn, missed * factor, missed)
        return 1 - missed

    def precision_sum(self) -> Tensor:
        """(Q,) float64: expected sum of the precisions at the ranks 1 … K that hold a relevant candidate."""
        rank = torch.arange(1, self.above.shape[1] + 1, device=self.above.device)
        above, tied, relevant_above, relevant_tied = (tensor.double() for tensor in self)
        is_relevant = relevant_tied / tied
        before_in_tie = (rank - above - 1) * (relevant_tied - 1) / (tied - 1).clamp(min=1)
        return (is_relevant * (relevant_above + 1 + before_in_tie) / rank).sum(1)


def tally(scores_QC: Tensor, relevant_QR: Tensor, cutoff: int) -> Tally:
    """The best `cutoff` ranks (or C, if fewer) of each query.

    Args:
        scores_QC: floating; NaN ranks last.
        relevant_QR: indices of each query's relevant candidates, int64, filled up with -1.
    """
    scores_QC = _nan_last(scores_QC)
    top_QK = scores_QC.topk(min(cutoff, scores_QC.shape[1]), dim=1).values
    tied_with_last_Q = (scores_QC == top_QK[:, -1:]).sum(1, keepdim=True)
    tied_QK = (top_QK[:, None, :] == top_QK[:, :, None]).sum(2)
    relevant_scores_QR = scores_QC.gather(1, relevant_QR.clamp(min=0)).masked_fill(relevant_QR < 0, torch.nan)
    return Tally(
        above=(top_QK[:, None, :] > top_QK[:, :, None]).sum(2),
        tied=torch.where(top_QK == top_QK[:, -1:], tied_with_last_Q, tied_QK),
        relevant_above=(relevant_scores_QR[:, None, :] > top_QK[:, :, None]).sum(2),
        relevant_tied=(relevant_scores_QR[:, None, :] == top_QK[:, :, None]).sum(2),
    )


def tally_by_chance(num_relevant_Q: Tensor, num_candidates: int, cutoff: int) -> Tally:
    """What `tally` gives where all candidates are tied."""
    shape = len(num_relevant_Q), min(cutoff, num_candidates)
    none = num_relevant_Q.new_zeros(shape)
    return Tally(none, none + num_candidates, none, num_relevant_Q[:, None].expand(shape))


def tally_by_similarity(
    queries_QD: Tensor, candidates_CD: Tensor, relevant_QR: Tensor, *, cutoff: int, ranks: Ranks
) -> Tally:
    """`tally` by the products of fp32 features. A collective; the same on every rank, whatever their number.

    Args:
        queries_QD, candidates_CD, relevant_QR: all of them, the same on every rank, on one device.
    """
    shape = len(queries_QD), min(cutoff, len(candidates_CD)), 4
    found_QK4 = torch.zeros(shape, dtype=torch.int64, device=queries_QD.device)
    for rows, scores in similarity(queries_QD, candidates_CD, ranks):
        found_QK4[rows] = torch.stack(tally(scores, relevant_QR[rows], cutoff), dim=-1)
    return Tally(*_sum_over_ranks(found_QK4, ranks).unbind(-1))


def average_precision_by_similarity(
    queries_QD: Tensor, candidates_CD: Tensor, relevant_QC: Tensor, *, ranks: Ranks
) -> Tensor:
    """`average_precision`, (Q,) float64, as `tally_by_similarity` finds a tally."""
    found_Q = torch.zeros(len(queries_QD), dtype=torch.float64, device=queries_QD.device)
    for rows, scores in similarity(queries_QD, candidates_CD, ranks):
        found_Q[rows] = average_precision(scores, relevant_QC[rows])
    return _sum_over_ranks(found_Q, ranks)


def average_precision(scores_QC: Tensor, relevant_QC: Tensor) -> Tensor:
    """Average precision over all candidates, (Q,) float64; NaN where none is relevant. `relevant_QC` is bool; NaN scores rank
    last."""
    negated, order = (-_nan_last(scores_QC)).sort(dim=1, stable=True)
    above, end = torch.searchsorted(negated, negated), torch.searchsorted(negated, negated, right=True)
    counts = torch.nn.functional.pad(relevant_QC.gather(1, order).long().cumsum(1), (1, 0))
    relevant_above = counts.gather(1, above)
    found = Tally(above, end - above, relevant_above, counts.gather(1, end) - relevant_above)
    return found.precision_sum() / relevant_QC.sum(1)


def members_by_group(group_of_member_M: Tensor, num_groups: int) -> Tensor:
    """(num_groups, most members of a group) int64: indices of each group's members, filled up with -1."""
    order = group_of_member_M.argsort(stable=True)
    counts_N = group_of_member_M.bincount(minlength=num_groups)
    first_N = counts_N.cumsum(0) - counts_N
    groups_M = group_of_member_M[order]
    table = group_of_member_M.new_full((num_groups, int(counts_N.max())), -1)
    table[groups_M, torch.arange(len(order), device=order.device) - first_N[groups_M]] = order
    return table


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


def _nan_last(scores: Tensor) -> Tensor:
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _sum_over_ranks(found: Tensor, ranks: Ranks) -> Tensor:
    if ranks.world_size > 1:
        dist.all_reduce(found)
    return found
