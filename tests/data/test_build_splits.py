"""Test held-out splits: a fraction of items, or by a column."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from clap_ds.data.build_shards.build import NumberedEntries, divide
from clap_ds.data.build_shards.caption_lists import Entry
from clap_ds.utils.errors import UserError


def entries(values: list[Any], column: str = "speaker") -> list[Entry]:
    return [Entry(Path(str(n)), ["x"], {column: value}, size=100) for n, value in enumerate(values)]


def divided(items: list[Entry], **options: Any) -> dict[str, NumberedEntries]:
    unsaid = {
        "split_column": None,
        "fold_column": None,
        "seed": 0,
        "shards": None,
        "shard_mb": 1,
        "held_out": 0,
    }
    return divide(items, Namespace(**(unsaid | options)))


def held_out(items: list[Entry], **options: Any) -> set[int]:
    """Return the numbers of held-out items, checking that each item is in one shard."""
    shards = divided(items, **options)
    assert sorted(int(str(entry.path)) for group in shards.values() for _, entry in group) == list(
        range(len(items))
    )
    return {number for name in shards if name.startswith("held_out") for number, _ in shards[name]}


def test_a_share_is_drawn_anew_for_each_seed_alone() -> None:
    items = entries(list(range(40)))
    found = held_out(items, held_out=0.2)
    assert len(found) == 8
    assert found == held_out(items, held_out=0.2) != held_out(items, held_out=0.2, seed=3)
    assert held_out(items) == set()


def test_a_column_says_what_is_held_out() -> None:
    """By common names, or a fold compared as text. A sound in both sets is held out."""
    said = [
        "train",
        "Training",
        "held_out",
        "valid",
        "val",
        "validation",
        "Test",
        "dev",
        "eval",
        ["train", "test"],
    ]
    assert held_out(entries(said, "split"), split_column="split") == set(range(2, 10))
    folds = entries(["1", "2", 1, [2, 1], "11"], "fold")
    assert held_out(folds, fold_column="fold", held_out_fold="1") == {0, 2, 3}
    with pytest.raises(UserError, match="found 1, 11, 2"):
        divided(folds, fold_column="fold", held_out_fold="3")


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (["a"], {"held_out": 0.2}, r"all 1 item\(s\) would be held out"),
        (["train", "development"], {"split_column": "speaker"}, "found development"),
        (["a"], {"fold_column": "who", "held_out_fold": "1"}, "its columns: speaker"),
        (["a", "b"], {"shards": 3}, "--shards 3 exceeds the 2 items"),
    ],
)
def test_divisions_that_cannot_be(values: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        divided(entries(values), **options)
