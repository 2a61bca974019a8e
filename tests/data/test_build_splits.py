"""Test held-out splits: a fraction of items, or by a column."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.errors import UserError
from clap_ds.data.build_shards.build import Numbered, divide
from clap_ds.data.build_shards.caption_lists import Entry


def entries(values: list[Any], column: str = "speaker") -> list[Entry]:
    return [Entry(Path(str(n)), ["x"], {column: value}, size=100) for n, value in enumerate(values)]


def divided(items: list[Entry], **options: Any) -> dict[str, Numbered]:
    unsaid = {"split_column": None, "fold_column": None, "seed": 0, "shards": None, "shard_mb": 1, "held_out": 0.2}
    return divide(items, Namespace(**(unsaid | options)))


def sides(items: list[Entry], share: float = 0.2, **options: Any) -> dict[str, set[int]]:
    """Return the item numbers of each split, checking that each occurs once."""
    shards = divided(items, held_out=share, **options)
    assert sorted(int(str(entry.path)) for group in shards.values() for _, entry in group) == list(range(len(items)))
    of_side = {
        side: [n for name in shards if name.startswith(side) for n, _ in shards[name]] for side in ("train", "held_out")
    }
    return {side: set(numbers) for side, numbers in of_side.items()}


def test_a_share_is_drawn_anew_for_each_seed_alone() -> None:
    items = entries(list(range(40)))
    found = sides(items, seed=0)
    assert len(found["held_out"]) == 8
    assert found == sides(items, seed=0) != sides(items, seed=3)
    assert sides(items, 0)["held_out"] == set()


def test_a_column_says_what_is_held_out() -> None:
    """By common names; identical files are held out if any of them is."""
    said = ["train", "Training", "held_out", "valid", "val", "validation", "Test", "dev", ["train", "test"]]
    assert sides(entries(said, "split"), 0, split_column="split") == {"train": {0, 1}, "held_out": set(range(2, 9))}


def test_a_fold_is_held_out() -> None:
    """Compared as text, also in a JSONL; a sound of two folds is held out with either."""
    items = entries(["1", "2", 1, [2, 1], "11"], "fold")
    found = sides(items, 0, fold_column="fold", held_out_fold="1")
    assert found == {"train": {1, 4}, "held_out": {0, 2, 3}}
    with pytest.raises(UserError, match="found 1, 11, 2"):
        divided(items, held_out=0, fold_column="fold", held_out_fold="3")


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (["a"], {}, r"all 1 item\(s\) would be held out"),
        (["train", "development"], {"split_column": "speaker"}, "found development"),
        (["a"], {"fold_column": "who", "held_out_fold": "1"}, "its columns: speaker"),
        (["a", "b"], {"shards": 2}, "--shards 2 exceeds the 1 items"),
    ],
)
def test_divisions_that_cannot_be(values: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        divided(entries(values), **options)
