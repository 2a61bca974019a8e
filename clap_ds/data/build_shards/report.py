"""Report on finished shards: their size, skipped items, and the settings of a run on them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clap_ds.config.errors import printable
from clap_ds.data.build_shards.shard_writer import BROKEN, BuiltShard, Named


def print_amount(title: str, shards: Sequence[BuiltShard]) -> bool:
    """Print the total size of these shards. Return whether there are any."""
    records = [shard.record for shard in shards if shard.record]
    items, size, seconds = (sum(getattr(record, name) for record in records) for name in ("items", "bytes", "seconds"))
    if records:
        each = f"{size / items / 1e3:.1f} KB and {seconds / items:.1f} s per item"
        print(f"{title}: {items} items in {len(records)} shard(s), {size / 1e6:.1f} MB, {seconds / 3600:.2f} h, {each}")
    return bool(records)


def print_left_out(folder: Path, shards: Sequence[BuiltShard], unusable: Sequence[Named], most: float) -> int:
    """Print the skipped items. Return the exit code: 1 if their fraction exceeds `most`."""
    left_out = [*unusable, *(each for shard in shards for each in shard.broken)]
    share = len(left_out) / (len(left_out) + sum(shard.record.items for shard in shards if shard.record))
    if left_out:
        examples = printable("; ".join(f"{name}: {reason}" for name, reason in left_out[:3]))
        print(f"skipped {len(left_out)}, listed with reasons in {folder / BROKEN}; the first: {examples}")
    if share > most:
        print(f"error: {share:.1%} skipped, more than --max_left_out {most:g}", file=sys.stderr)
    return int(share > most)


def print_settings(shards: str | None, tokenizer: str, preset: str | None, more: dict[str, Any] | None = None) -> None:
    """Print the settings of a run on these shards, if there are training shards, and `more` sections."""
    data = {"data": {"source": "webdataset", "shards": shards, "tokenizer": tokenizer}}
    settings = (data if shards else {}) | ({"model": {"preset": preset}} if preset else {}) | (more or {})
    sections = [f'"{name}": {json.dumps(section, indent=2)}' for name, section in settings.items()]
    print('For a run\'s JSON, in "clap":', *sections, sep="\n")
