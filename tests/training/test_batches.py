"""Items that meet themselves in a global batch, and captions that have an equal one there."""

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.data.batch import Batch
from clap_ds.ranks.distributed import Ranks
from clap_ds.record.directory import RunDirectory
from clap_ds.training.batches import too_few_items, with_captions_compared
from clap_ds.training.schedule import Schedule
from tests.rank_pool import RankPool
from tests.training.reference_steps import CPU, settings


def session(folder: Path, rank: int = 0, world_size: int = 1, **changes: Any) -> Any:
    """As much of one as is looked at."""
    ranks, run = Ranks(rank, world_size, rank, world_size), settings(**{"train": {"samples": 10**6}, **changes})
    return SimpleNamespace(run=run, ranks=ranks, device=CPU, record=RunDirectory(folder))


def plan(of: Any) -> Schedule:
    return Schedule.of(of.run, world_size=of.ranks.world_size, epoch_samples=None)


@pytest.mark.parametrize(("micro_batch", "together", "expected"), [(5, 2, None), (6, 2, "12 pairs, the data 10 items")])
def test_a_global_batch_larger_than_the_data(
    tmp_path: Path, micro_batch: int, together: int, expected: str | None
) -> None:
    train = {"samples": 99, "accumulation": "cached", "batch_ramp": {"0": 1, "50": together}}
    of = session(tmp_path, train=train, train_micro_batch_size_per_gpu=micro_batch)
    for known, says in (({"num_samples": 10}, expected), ({"num_samples": None}, None), ({}, None)):
        of.batches = SimpleNamespace(statistics=known.copy)
        found = too_few_items(of)
        assert (found is None) == (says is None)
        assert (says or "") in (found or "")


WORDS = ([5, 5, 6, 7, 8, 9], [5, 10, 11, 12, 13, 14])
"""Of each rank's captions, which come three at a time. Of each rank's first three, and of both ranks', have equals:"""


def compare(folder: str, accumulation: str, loss: dict[str, str]) -> str:
    """What it prints."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train = {"samples": 6 * world_size, "accumulation": accumulation}
    of = session(Path(folder), rank, world_size, train=train, loss=loss, gradient_accumulation_steps=2)
    words = torch.tensor(WORDS[rank])
    batches = [Batch(torch.zeros(3, 4), ids, torch.ones_like(ids)) for ids in words.view(2, 3, 1)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        given = list(with_captions_compared(iter(batches), of, plan(of), 0))
    assert all(ours is theirs for ours, theirs in zip(given, batches, strict=True))
    return printed.getvalue()


@pytest.mark.parametrize(
    ("accumulation", "loss", "remedy"),
    [
        ("cached", {}, 'clap.loss.same_caption "positive" and clap.loss.kind "sigmoid"'),
        ("independent", {"kind": "sigmoid"}, 'clap.loss.same_caption "positive"\n'),
        ("cached", {"kind": "sigmoid", "same_caption": "positive"}, None),
    ],
)
def test_the_share_of_equal_captions_is_noted_and_warned_of_once(
    two_ranks: RankPool,
    tmp_path: Path,
    accumulation: str,
    loss: dict[str, str],
    remedy: str | None,
) -> None:
    printed = "".join(two_ranks.run(compare, str(tmp_path), accumulation, loss))
    assert RunDirectory(tmp_path).summary()["equal_captions_share"] == 3 / 12
    assert printed.count("warning: 25.0 % of the captions") == (remedy is not None)
    assert (remedy or "") in printed
