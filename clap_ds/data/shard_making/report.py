"""What a finished build says: counts of each side and class, same files, what was left out, and the settings of a run."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from clap_ds.config.model import load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.data.shard_list import HUB_TOKENIZER
from clap_ds.data.shard_making.caption_lists import Entry
from clap_ds.data.shard_making.shard_building import PlannedShard
from clap_ds.data.shard_making.splits import names_in
from clap_ds.data.shard_making.writing import BROKEN, BuiltShard
from clap_ds.data.shard_manifest import ShardRecord

_MOST_SHOWN = 8
HUB_VOCABULARY = 50265
"""Of `HUB_TOKENIZER`."""

Shards = list[tuple[PlannedShard, BuiltShard]]


def report(
    folder: Path, shards: Shards, unusable: list[Entry], vocab_size: int | None, options: Namespace
) -> list[str]:
    """Lines for the terminal.

    Args:
        unusable: entries that went into no shard.
        vocab_size: of the tokenizer that was trained, if any.
    """
    tokenizer = str(folder / "tokenizer") if vocab_size else HUB_TOKENIZER
    more: dict[str, Any] = {}
    lines = []
    sides: dict[str, list[Entry]] = {}
    for side in ("train", "held_out"):
        own = [(plan, built) for plan, built in shards if plan.name.startswith(side)]
        broken = {path for _, built in own for path, _ in built.broken}
        sides[side] = [entry for plan, _ in own for _, entry in plan.items if str(entry.path) not in broken]
        if records := [built.record for _, built in own if built.record]:
            lines.append(f"{side}: {amount(records)}")
            if side == "held_out":
                more["evaluation"] = {"retrieval": {"shards": f"{folder}/held_out-*.tar"}}
    lines += _divided(sides, options) + _same([entry for side in sides.values() for entry in side])
    num_malformed = sum(bool(entry.remedy) for entry in unusable)
    num_broken = len(unusable) - num_malformed + sum(len(built.broken) for _, built in shards)
    left_out = [f"{num_malformed} malformed rows"] * (num_malformed > 0) + [f"{num_broken} items"] * (num_broken > 0)
    if left_out:
        lines.append(f"{' and '.join(left_out)} left out, listed with reasons in {folder / BROKEN}")
    if vocab_size:
        lines.append(f"{_tokenizer(vocab_size, options.train_tokenizer)}; in {tokenizer}")
    return [*lines, *settings_for(f"{folder}/train-*.tar", tokenizer, options.preset, more)]


def settings_for(shards: str, tokenizer: str, preset: str | None, more: dict[str, Any] | None = None) -> list[str]:
    """What a run on these shards says of them, with `more` sections, for the terminal."""
    settings: dict[str, Any] = {"data": {"source": "shards", "shards": shards, "tokenizer": tokenizer}}
    settings |= ({"model": {"preset": preset}} if preset else {}) | (more or {})
    lines = ['For a run\'s JSON, in "clap":']
    lines += [f'"{name}": {json.dumps(section, indent=2)}' for name, section in settings.items()]
    if preset and tokenizer == HUB_TOKENIZER and (size := load_preset(preset).text.vocab_size) < HUB_VOCABULARY:
        own = f"clap-shards build --train_tokenizer {size} makes one of your captions"
        lines.append(f"The model of preset {preset} takes a tokenizer of at most {size} tokens, not that one: {own}")
    return lines


def amount(records: Sequence[ShardRecord]) -> str:
    """How much these shards hold."""
    items, size, seconds = (sum(c) for c in zip(*((r.items, r.bytes, r.seconds) for r in records), strict=True))
    each = f"{size / items / 1e3:.1f} KB an item of {seconds / items:.1f} s"
    return f"{items} items in {len(records)} shard(s), {size / 1e6:.1f} MB, {seconds / 3600:.2f} h, {each}"


def _divided(sides: dict[str, list[Entry]], options: Namespace) -> list[str]:
    def counts(column: str) -> list[Counter[str]]:
        """How often each side has each name."""
        return [Counter(chain.from_iterable(names_in(e.more, column) for e in side)) for side in sides.values()]

    lines = []
    if column := options.split_column or options.stratify_column:
        train, held_out = counts(column)
        names = sorted(train | held_out)
        lines.append(f"{column} (train + held out): {_few([f'{n} {train[n]} + {held_out[n]}' for n in names])}")
        if options.stratify_column and (without := [name for name in names if not held_out[name]]):
            lines.append(f"nothing is held out of {len(without)} of {len(names)}: {_few(without)}")
    if column := options.group_column:
        train, held_out = counts(column)
        lines.append(f"{column}: {len(train)} in train, {len(held_out)} held out, {len(train & held_out)} in both")
    return lines


def _same(entries: list[Entry]) -> list[str]:
    same = [f"{other} (= {entry.path})" for entry in entries for other in entry.others]
    if not same:
        return []
    return [
        f"{len(same)} file(s) hold the same as another, and are one item with it, with the captions of all: {_few(same)}"
    ]


def vocab_sizes() -> dict[int, str]:
    """Vocabularies of the presets, smallest first, with their names."""
    presets: dict[int, list[str]] = {}
    for name in preset_names():
        presets.setdefault(load_preset(name).text.vocab_size, []).append(name)
    return {size: ", ".join(presets[size]) for size in sorted(presets)}


def _tokenizer(vocab_size: int, wanted: int) -> str:
    fewer = "" if vocab_size == wanted else f" ({wanted} wanted; the captions give no more)"
    fits = [names for size, names in vocab_sizes().items() if size >= vocab_size]
    too_large = [f"{names} ({size})" for size, names in vocab_sizes().items() if size < vocab_size]
    beyond = f", too large for {'; '.join(too_large)}" if too_large else ""
    return (
        f"tokenizer of {vocab_size} tokens{fewer} for a model trained from nothing, of preset {', '.join(fits)}{beyond}"
    )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more
