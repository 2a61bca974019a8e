"""Assign items to training and held-out shards, by a column or at random by items or groups."""

from __future__ import annotations

import random
from argparse import Namespace
from collections import defaultdict

from clap_ds.config.errors import UserError
from clap_ds.data.build_shards.caption_lists import Entry, values_of

TRAIN = ("train", "training")
HELD_OUT = ("held_out", "valid", "val", "validation", "test", "dev", "eval")
SIDES = f"{TRAIN[0]} or {HELD_OUT[0]} (also {', '.join(HELD_OUT[1:])})"

Numbered = list[tuple[int, Entry]]
"""Entries with their numbers in the list."""


def check_columns(entries: list[Entry], options: Namespace) -> None:
    """Raise UserError if the column that assigns an entry is empty or has an unexpected value."""
    column = options.split_column or options.group_column or options.fold_column
    for entry in entries if column else ():
        said = names_in(entry, column)
        odd = [name for name in said if options.split_column and name.lower() not in TRAIN + HELD_OUT]
        if not entry.problem and (odd or not said):
            found = f"found {odd[0]!r}" if odd else f"found none; its columns: {', '.join(entry.more) or 'none'}"
            expected = SIDES if options.split_column else "a value"
            raise UserError(f"{entry.path}: expected {expected} in its column {column!r}, {found}")


def names_in(entry: Entry, column: str) -> list[str]:
    return [name for value in values_of(entry.more, column) if (name := str(value).strip())]


def divide(entries: list[Entry], options: Namespace) -> dict[str, Numbered]:
    """Shuffle entries and assign them to shards (by file name). Raises UserError for a split or shard without items."""
    order = list(range(len(entries)))
    random.Random(options.seed).shuffle(order)
    chosen = held_out(entries, order, options)
    shards = {}
    for side in ("held_out", "train"):
        items = [(number, entries[number]) for number in order if (number in chosen) == (side == "held_out")]
        num_shards = min(len(items), max(1, round(sum(entry.size for _, entry in items) / (options.shard_mb * 1e6))))
        if options.shards and side == "train":
            num_shards = options.shards
        if num_shards > len(items):
            raise UserError(f"--shards {num_shards} exceeds the {len(items)} items for training")
        for k in range(num_shards):
            first, end = (each * len(items) // num_shards for each in (k, k + 1))
            shards[f"{side}-{k:0{max(5, len(str(num_shards)))}d}.tar"] = items[first:end]
    return shards


def held_out(entries: list[Entry], order: list[int], options: Namespace) -> set[int]:
    """Return the indices of the held-out entries, by a column or as a fraction of them in the given order."""
    if column := options.split_column:
        chosen = {n for n in order if any(name.lower() in HELD_OUT for name in names_in(entries[n], column))}
    elif column := options.fold_column:
        chosen = {n for n in order if options.held_out_fold in names_in(entries[n], column)}
        if not chosen:
            there = ", ".join(sorted({name for entry in entries for name in names_in(entry, column)})[:20])
            raise UserError(f"--held_out_fold {options.held_out_fold}: no such value in {column!r}; found {there}")
    else:
        number, groups = round(options.held_out * len(entries)), _groups(entries, order, options.group_column)
        chosen = _drawn(groups, max(1, number)) if options.held_out else set()
    if len(chosen) == len(entries) and options.held_out != 1:
        raise UserError(f"all {len(entries)} item(s) would be held out, with none left for training")
    return chosen


def _drawn(groups: list[list[int]], number: int) -> set[int]:
    """Draw whole groups until about `number` members are chosen, but at least the smallest group."""
    chosen: set[int] = set()
    for group in groups:
        if 2 * (number - len(chosen)) > len(group):
            chosen.update(group)
    return chosen or {*min(groups, key=len)}


def _groups(entries: list[Entry], order: list[int], column: str | None) -> list[list[int]]:
    groups: dict[object, list[int]] = defaultdict(list)
    for number in order:
        groups[names_in(entries[number], column)[0] if column else number].append(number)
    return list(groups.values())
