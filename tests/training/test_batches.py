"""Items that meet themselves in a global batch, and captions that have an equal one there."""

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from clap_ds.data.batch import Batch
from clap_ds.ranks.distributed import Ranks
from clap_ds.record.directory import RunDirectory
from clap_ds.training import batches
from clap_ds.training.batches import too_few_items, with_captions_compared
from tests.rank_pool import RankPool
from tests.training.reference_steps import settings


@pytest.mark.parametrize(("micro_batch", "items", "is_said"), [(5, 10, False), (6, 10, True), (6, None, False)])
def test_a_global_batch_larger_than_the_data(micro_batch: int, items: int | None, is_said: bool) -> None:
    sizes = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 2}
    session: Any = SimpleNamespace(run=settings(train={"samples": 99, "accumulation": "cached"}, **sizes))
    session.ranks, session.batches = Ranks(0, 1, 0, 1), SimpleNamespace(statistics=lambda: {"num_samples": items})
    assert ("12 pairs, the data 10 items" in str(too_few_items(session))) == is_said


WORDS = ([5, 5, 6, 7, 8, 9], [5, 10, 11, 12, 13, 14])
"""Of each rank's captions, which come three at a time. Of each rank's first three, and of both ranks', have equals:"""


def compare(folder: str, accumulation: str, loss: dict[str, str]) -> str:
    """What it prints, of one global batch of two micro-batches, or of two of one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train = {"samples": 99, "accumulation": accumulation}
    session: Any = SimpleNamespace(run=settings(train=train, loss=loss, gradient_accumulation_steps=2))
    session.ranks, session.record = Ranks(rank, world_size, rank, world_size), RunDirectory(Path(folder))
    own = [Batch(torch.zeros(3, 4), ids, torch.ones_like(ids)) for ids in torch.tensor(WORDS[rank]).view(2, 3, 1)]
    measured = mock.patch.object(batches, "MEASURED", 1 if accumulation == "cached" else 2)
    with contextlib.redirect_stdout(io.StringIO()) as printed, measured:
        given = list(with_captions_compared(iter(own), session))
    assert all(ours is theirs for ours, theirs in zip(given, own, strict=True))
    return printed.getvalue()


@pytest.mark.parametrize(
    ("accumulation", "loss", "is_warned"),
    [("cached", {}, True), ("independent", {"kind": "sigmoid"}, True), ("cached", {"same_caption": "positive"}, False)],
)
def test_the_share_of_equal_captions_is_noted_and_warned_of_once(
    two_ranks: RankPool, tmp_path: Path, accumulation: str, loss: dict[str, str], is_warned: bool
) -> None:
    printed = "".join(two_ranks.run(compare, str(tmp_path), accumulation, loss))
    assert RunDirectory(tmp_path).summary()["equal_captions_share"] == 3 / 12
    assert printed.count("warning: 25.0 % of the captions") == is_warned
