"""Test held-out splits: a fraction of items, or by a column."""

from argparse import Namespace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from clap_ds.data.build_shards.build import NumberedEntries, divide
from clap_ds.data.build_shards.caption_lists import Entry
from clap_ds.utils.errors import UserError

DEFAULTS = {
    "split_column": None,
    "fold_column": None,
    "part": None,
    "seed": 0,
    "shards": None,
    "shard_mb": 1,
    "held_out": 0,
}


def divide_values(values: list[Any], **options: Any) -> dict[str, NumberedEntries]:
    """Divide entries whose column `label` has these values."""
    entries = [
        Entry(Path(str(number)), ["x"], {"label": value}, size=100)
        for number, value in enumerate(values)
    ]
    return divide(entries, Namespace(**(DEFAULTS | options)))


def held_out(values: list[Any], **options: Any) -> set[int]:
    """Return the numbers of held-out items, checking that each item is in one shard."""
    shards = divide_values(values, **options)
    numbers = [number for number, _ in chain(*shards.values())]
    assert sorted(numbers) == list(range(len(values)))
    of_split = chain(*(items for name, items in shards.items() if name.startswith("held_out")))
    return {number for number, _ in of_split}


def test_held_out_fraction_depends_on_seed():
    values = list(range(40))
    numbers = held_out(values, held_out=0.2)
    assert len(numbers) == 8
    assert numbers != held_out(values, held_out=0.2, seed=3)


def test_split_column_by_common_names_holds_out():
    names = ["train", "Training", "held_out", "valid", "val", "validation", "Test", "dev", "eval"]
    # equal audio in both sets
    values = [*names, ["train", "test"]]
    assert held_out(values, split_column="label") == set(range(2, 10))


def test_fold_column_compares_as_text():
    folds = ["1", "2", 1, [2, 1], "11"]
    assert held_out(folds, fold_column="label", held_out_fold="1") == {0, 2, 3}
    with pytest.raises(UserError, match="found 1, 11, 2"):
        divide_values(folds, fold_column="label", held_out_fold="3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 1e-9}, r"all 1 item\(s\) would be held out"),
        ({"split_column": "label"}, "found development"),
        ({"fold_column": "who", "held_out_fold": "1"}, "its columns: label"),
        ({"shards": 3}, "--shards 3 exceeds the 1 items"),
    ],
)
def test_divide_with_impossible_options_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        divide_values(["development"], **options)
