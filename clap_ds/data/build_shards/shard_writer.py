"""Write tars in parallel, atomically, with their manifest and list of unusable files.

Each finished tar has a record, so that an interrupted command continues with the others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from webdataset.writer import TarWriter

from clap_ds.config.arguments import number, whole_number
from clap_ds.data.shard_io import Kind
from clap_ds.data.shard_manifest import FrontEnd, ShardManifest, ShardRecord, write_manifest
from clap_ds.utils.errors import UserError, printable
from clap_ds.utils.files import own_folder, read_bytes, read_json, replacing, write_atomically

RECORDS = ".build"  # subfolder of finished shards' records
BROKEN = "broken.jsonl"

Named = tuple[str, str]
"""An unusable file's name, and the reason."""
Member = tuple[dict[str, Any], float]
"""A tar's item (`__key__` and contents by extension), and its seconds of audio."""
Members = Callable[[list[Named]], Iterable[Member]]
"""Yields a shard's members, and adds unusable files to the list."""
Built = tuple[ShardRecord | None, list[Named]]
"""A shard's record (None without a usable item, and then there is no tar), and its unusable
files."""


def write_shards(
    folder: Path,
    plan: Iterable[str],
    shards: Mapping[str, Members],
    num_workers: int,
    prepared: tuple[Kind, FrontEnd] | tuple[()] = (),
    unusable: Sequence[Named] = (),
) -> tuple[dict[str, ShardRecord], list[Named]]:
    """Write the missing shards, the manifest and the list of unusable files, those already known
    first. Return both. `plan` and `prepared` determine the shards."""
    _claim(folder, chain([repr(prepared)], plan))
    built = {name: there for name in shards if (there := _finished(folder, name))}
    waiting = {name: members for name, members in shards.items() if name not in built}
    if built:
        print(f"{len(built)} of {len(shards)} shards already exist", flush=True)
    try:
        built |= tqdm(
            _write_all(folder, waiting, num_workers), total=len(waiting), unit="shard", disable=None
        )
    except OSError as error:
        raise UserError(
            f"{folder} can't be written: {error.strerror or error}; the same command resumes"
        ) from None
    records = {name: record for name in shards if (record := built[name][0])}
    broken = [*unusable, *(each for name in shards for each in built[name][1])]
    listed = [json.dumps({"file": path, "reason": reason}) + "\n" for path, reason in broken]
    write_atomically(folder / BROKEN, "".join(listed))
    write_manifest(folder, ShardManifest(records, *prepared))
    if not records:
        raise UserError(none_usable(broken))
    return records, broken


def none_usable(broken: Sequence[Named]) -> str:
    examples = "; ".join(f"{path}: {reason}" for path, reason in broken[:3])
    return f"none of {len(broken)} items are usable; the first: {examples}"


def _claim(folder: Path, plan: Iterable[str]) -> None:
    """Create the folder or check that its plan is the same. Raises UserError if it isn't."""
    mark = folder / RECORDS / "plan"
    state = hashlib.sha256()
    for part in plan:
        state.update(part.encode())
    if mark.is_file():
        if read_bytes(mark).decode(errors="replace") != state.hexdigest():
            other = "made with other options, or from files or captions that have changed"
            raise UserError(f"{folder} contains shards {other}; choose a new folder or empty it")
        return
    if folder.exists() and (
        not folder.is_dir() or any(path.name != RECORDS for path in folder.iterdir())
    ):
        raise UserError(f"{folder} exists and isn't an empty folder; choose a new one or empty it")
    with own_folder(mark.parent) as records:
        write_atomically(records / mark.name, state.hexdigest())


def _write_all(
    folder: Path, shards: Mapping[str, Members], num_workers: int
) -> Iterator[tuple[str, Built]]:
    """Write in threads: decoding, features, checksums and writing release the GIL. If one fails,
    all stop."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in as_completed(
            [pool.submit(_write, folder, *shard, stop) for shard in shards.items()]
        ):
            yield future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _finished(folder: Path, name: str) -> Built | None:
    """Return a shard that was built before, if its record exists and its size matches."""
    try:
        content = read_json(folder / RECORDS / f"{name}.json")
        record = ShardRecord(**content["record"]) if content["record"] else None
        is_whole = record is None or (folder / name).stat().st_size == record.bytes
    except OSError:
        return None
    return (record, [(path, reason) for path, reason in content["broken"]]) if is_whole else None


def _write(folder: Path, name: str, members: Members, stop: threading.Event) -> tuple[str, Built]:
    """Write one tar and its record. Raises OSError if writing fails or `stop` is set."""
    broken: list[Named] = []
    num_items = 0
    seconds = 0.0
    record = None
    path = folder / name
    with (
        replacing(path) as file,
        TarWriter(file, encoder=False, mtime=0, user="clap", group="clap") as tar,
    ):
        for content, length in members(broken):
            tar.write(content)
            num_items = num_items + 1
            seconds = seconds + length
            if stop.is_set():
                raise InterruptedError
    if num_items:
        with path.open("rb") as tar:
            digest = hashlib.file_digest(tar, "sha256").hexdigest()
        record = ShardRecord(num_items, path.stat().st_size, round(seconds, 3), digest)
    else:
        path.unlink()
    built = {"record": record and asdict(record), "broken": broken}
    with own_folder(folder / RECORDS) as records:
        write_atomically(records / f"{name}.json", json.dumps(built))
    return name, (record, broken)


def add_work(parser: argparse.ArgumentParser) -> None:
    more = "write N shards in parallel (default: one per core)"
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=whole_number(), default=cores, metavar="N", help=more)
    more = "exit with code 1 if more than this fraction was unusable"
    parser.add_argument(
        "--max_left_out", type=number(0, 1), default=0.01, metavar="FRACTION", help=more
    )


def print_amount(title: str, records: Sequence[ShardRecord]) -> None:
    items, size, seconds = (
        sum(getattr(record, name) for record in records) for name in ("items", "bytes", "seconds")
    )
    print(
        f"{title}: {items} items in {len(records)} shard(s), {size / 1e6:.1f} MB, {seconds / 3600:.2f} h"
    )


def print_left_out(
    folder: Path, records: Iterable[ShardRecord], broken: Sequence[Named], most: float
) -> int:
    """Print the skipped items. Return the exit code: 1 if their fraction exceeds `most`."""
    share = len(broken) / (len(broken) + sum(record.items for record in records))
    if broken:
        examples = printable("; ".join(f"{name}: {reason}" for name, reason in broken[:3]))
        print(
            f"skipped {len(broken)}, listed with reasons in {folder / BROKEN}; the first: {examples}"
        )
    if share > most:
        print(
            f"error: {share:.1%} skipped, more than --max_left_out {most:g}; the shards are usable",
            file=sys.stderr,
        )
    return int(share > most)


def print_settings(shards: str | None, tokenizer: str, preset: str | None, **more: Any) -> None:
    """Print the settings of a run on these shards, if there are training shards, and `more`
    sections."""
    data = {"data": {"source": "webdataset", "shards": shards, "tokenizer": tokenizer}}
    settings = (data if shards else {}) | ({"model": {"preset": preset}} if preset else {}) | more
    sections = [f'"{name}": {json.dumps(section, indent=2)}' for name, section in settings.items()]
    print('For a run\'s JSON, in "clap":', *sections, sep="\n")
