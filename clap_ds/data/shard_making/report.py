"""What a finished build says: counts of each side and class, same files, what was left out, and the settings of a run."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from clap_ds.data.shard_list import HUB_TOKENIZER
from clap_ds.data.shard_making.caption_lists import Entry
from clap_ds.data.shard_making.splits import names_in
from clap_ds.data.shard_making.writing import BROKEN, BuiltShard
from clap_ds.data.shard_manifest import ShardRecord

_MOST_SHOWN = 8
SIDES = ("train", "held_out")
"""What names of shards begin with."""


def report(
    folder: Path, shards: Sequence[BuiltShard], entries: Sequence[tuple[str, Entry]], options: Namespace
) -> list[str]:
    """Lines for the terminal.

    Args:
        entries: all, with the name of their shard, "" of those that have a problem.
    """
    broken = {path for shard in shards for path, _ in shard.broken}
    sides = {side: [e for name, e in entries if name.startswith(side) and str(e.path) not in broken] for side in SIDES}
    more: dict[str, Any] = {}
    lines = []
    for side in SIDES:
        if records := [shard.record for shard in shards if shard.record and shard.name.startswith(side)]:
            lines.append(f"{side}: {amount(records)}")
            if side == "held_out":
                more["evaluation"] = {"retrieval": {"shards": f"{folder}/held_out-*.tar"}}
    for column in filter(None, (options.split_column, options.stratify_column, options.group_column)):
        train, held_out = (
            Counter(chain.from_iterable(names_in(e.more, column) for e in side)) for side in sides.values()
        )
        names = sorted(train | held_out)
        counts = _few([f"{name} {train[name]} + {held_out[name]}" for name in names])
        lines.append(f"{column} (train + held out): {counts}")
        if column == options.stratify_column and (without := [name for name in names if not held_out[name]]):
            lines.append(f"nothing is held out of {len(without)} of {len(names)}: {_few(without)}")
    if same := [f"{other} (= {entry.path})" for _, entry in entries for other in entry.others]:
        lines.append(f"{len(same)} file(s) hold the same as another, and are one item with it: {_few(same)}")
    malformed = sum(entry.malformed for _, entry in entries)
    unusable = len(broken) + sum(entry.problem is not None for _, entry in entries) - malformed
    if left_out := [f"{n} {what}" for n, what in ((malformed, "malformed rows"), (unusable, "items")) if n]:
        lines.append(f"{' and '.join(left_out)} left out, listed with reasons in {folder / BROKEN}")
    tokenizer = str(folder / "tokenizer") if options.train_tokenizer else HUB_TOKENIZER
    return [*lines, *settings_for(f"{folder}/train-*.tar", tokenizer, options.preset, more)]


def settings_for(shards: str, tokenizer: str, preset: str | None, more: dict[str, Any] | None = None) -> list[str]:
    """What a run on these shards says of them, with `more` sections, for the terminal."""
    settings: dict[str, Any] = {"data": {"source": "shards", "shards": shards, "tokenizer": tokenizer}}
    settings |= ({"model": {"preset": preset}} if preset else {}) | (more or {})
    sections = [f'"{name}": {json.dumps(section, indent=2)}' for name, section in settings.items()]
    return ['For a run\'s JSON, in "clap":', *sections]


def amount(records: Iterable[ShardRecord]) -> str:
    """How much these shards hold."""
    sizes = [(record.items, record.bytes, record.seconds) for record in records]
    items, size, seconds = map(sum, zip(*sizes, strict=True))
    each = f"{size / items / 1e3:.1f} KB an item of {seconds / items:.1f} s"
    return f"{items} items in {len(sizes)} shard(s), {size / 1e6:.1f} MB, {seconds / 3600:.2f} h, {each}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more
