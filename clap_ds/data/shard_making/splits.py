"""Which items are for training and which are held out: by a column, or a share drawn at random by items, groups or classes."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, defaultdict
from itertools import chain

from clap_ds.config.errors import UserError
from clap_ds.data.shard_making.caption_lists import DIVIDING_OPTIONS, Entry, Row, values_of

TRAIN = ("train", "training")
HELD_OUT = ("held_out", "held-out", "heldout", "valid", "val", "validation", "test", "dev", "eval", "evaluation")
SIDES = f"{TRAIN[0]} or {HELD_OUT[0]} (also {', '.join(HELD_OUT[3:])})"


def problem_with(row: Row, options: Namespace) -> str | None:
    """Why a row can't be given to either side: a column that decides this is empty, or says something else."""
    for column in filter(None, (getattr(options, option) for option in DIVIDING_OPTIONS)):
        if not names_in(row, column):
            return f"nothing in its column {column!r}"
    for value in names_in(row, options.split_column) if options.split_column else ():
        if value.lower() not in TRAIN + HELD_OUT:
            return f"{value!r} in its column {options.split_column!r}, expected {SIDES}"
    return None


def names_in(row: Row, column: str) -> list[str]:
    """What a column says, as text."""
    return [name for value in values_of(row, column) if (name := str(value).strip())]


def held_out(entries: list[Entry], order: list[int], options: Namespace) -> set[int]:
    """Numbers of the entries that are held out.

    With `split_column` those that it says are, of files that are the same where it says so of one. Otherwise about the share
    `held_out`: entries that share a value of `group_column` stay together, and the share is that of each class in
    `stratify_column`, in which a class keeps one group for training, and gives up one if it has two.

    Args:
        order: all numbers, in the order in which they are drawn.

    Raises:
        UserError: nothing is left for training, or nothing can be held out.
    """
    if column := options.split_column:
        chosen = {n for n in order if any(name.lower() in HELD_OUT for name in names_in(entries[n].more, column))}
        if len(chosen) == len(entries):
            raise UserError(f"--split_column {column}: found no item for training, which says {TRAIN[0]}")
        return chosen
    chosen = _drawn(entries, order, options) if options.held_out else set()
    if options.held_out and not chosen:
        of = f" of one {options.group_column}" if options.group_column else ""
        raise UserError(
            f"--held_out: nothing can be held out of {len(entries)} item(s){of}, and leave some for training"
        )
    return chosen


def _drawn(entries: list[Entry], order: list[int], options: Namespace) -> set[int]:
    groups = _groups(entries, order, options.group_column)
    column = options.stratify_column
    classes = [names_in(entry.more, column) if column else [""] for entry in entries]
    sizes = [Counter(chain.from_iterable(classes[n] for n in group)) for group in groups]  # a group's items, by class
    items, left = (
        Counter(chain.from_iterable(classes)),
        Counter(chain.from_iterable(sizes)),
    )  # all items; groups to train on
    held: Counter[str] = Counter()
    chosen: set[int] = set()

    def hold_out(number: int) -> None:
        chosen.update(groups[number])
        held.update(sizes[number])
        left.subtract(sizes[number].keys())

    def can_be_spared(number: int) -> bool:
        return all(left[name] > 1 for name in sizes[number])

    for number, size in enumerate(sizes):
        wanted = {name: max(1, round(options.held_out * items[name])) - held[name] for name in size}
        num_fitting = sum(min(n, max(0, wanted[name])) for name, n in size.items())
        if 2 * num_fitting > size.total() and can_be_spared(number):
            hold_out(number)
    for name in sorted(items):  # classes whose groups are all larger than what is wanted
        able = [number for number, size in enumerate(sizes) if name in size and can_be_spared(number)]
        if able and not held[name]:
            hold_out(min(able, key=lambda number: sizes[number].total()))
    return chosen


def _groups(entries: list[Entry], order: list[int], column: str | None) -> list[list[int]]:
    """Numbers of entries, together where they share a value of the column, or each shares one with a third."""
    if column is None:
        return [[number] for number in order]
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    names = [names_in(entry.more, column) for entry in entries]
    for first, *others in names:
        for other in others:
            parent[root(other)] = root(first)
    groups: dict[str, list[int]] = defaultdict(list)
    for number in order:
        groups[root(names[number][0])].append(number)
    return list(groups.values())
