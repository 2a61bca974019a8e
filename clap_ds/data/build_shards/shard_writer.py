"""Write tars in parallel, atomically, with their manifest and list of unusable files.

Each finished tar has a record, so that an interrupted or joining command continues with the others.
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
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from webdataset.writer import TarWriter

from clap_ds.config.arguments import number, whole_number
from clap_ds.config.errors import UserError, printable
from clap_ds.config.files import own_folder, read_bytes, read_json, replacing, write_atomically
from clap_ds.data.shard_io import Kind
from clap_ds.data.shard_manifest import FrontEnd, ShardManifest, ShardRecord, write_manifest

RECORDS = ".build"  # subfolder of finished shards' records
BROKEN = "broken.jsonl"

Named = tuple[str, str]
"""An unusable file's name, and the reason."""
Member = tuple[dict[str, Any], float]
"""A tar's item (`__key__` and contents by extension), and its seconds of audio."""
Members = Callable[[list[Named]], Iterable[Member]]
"""Yields a shard's members, and adds unusable files to the list."""


class BuiltShard(NamedTuple):
    name: str
    record: ShardRecord | None  # None if no item was usable, so that there is no tar
    broken: list[Named]  # skipped items


def fill(
    folder: Path,
    plan: Iterable[str],
    shards: Mapping[str, Members],
    options: argparse.Namespace,
    prepared: tuple[Kind, FrontEnd] | tuple[()] = (),
    unusable: Sequence[Named] = (),
) -> list[BuiltShard]:
    """Write this part's missing shards and, without --part, the manifest and list of broken items, `unusable` first.
    `plan` and `prepared` determine the shards."""
    _claim(folder, chain([repr(prepared)], plan))
    if options.part:
        part, num_parts = options.part
        shards = {name: members for k, (name, members) in enumerate(shards.items()) if k % num_parts == part - 1}
    built = {name: there for name in shards if (there := _finished(folder, name))}
    waiting = {name: members for name, members in shards.items() if name not in built}
    if options.join and waiting:
        parts = sorted({k % options.join + 1 for k, name in enumerate(shards) if name in waiting})
        again = f"run --part I/{options.join} with I = {','.join(map(str, parts))}, then join"
        raise UserError(f"{folder}: {len(waiting)} of {len(shards)} shards are missing; {again}")
    if built:
        print(f"{len(built)} of {len(shards)} shards already exist", flush=True)
    try:
        for done in tqdm(_write_all(folder, waiting, options.workers), total=len(waiting), unit="shard", disable=None):
            built[done.name] = done
    except OSError as error:
        raise UserError(f"{folder} can't be written: {error.strerror or error}; the same command resumes") from None
    ordered = [built[name] for name in shards]
    if options.part:
        return ordered
    broken = [*unusable, *(each for shard in ordered for each in shard.broken)]
    listed = [json.dumps({"file": path, "reason": reason}) + "\n" for path, reason in broken]
    write_atomically(folder / BROKEN, "".join(listed))
    records = {shard.name: shard.record for shard in ordered if shard.record}
    write_manifest(folder, ShardManifest(records, *prepared))
    if not records:
        raise UserError(none_usable(broken))
    return ordered


def none_usable(broken: Sequence[Named]) -> str:
    examples = "; ".join(f"{path}: {reason}" for path, reason in broken[:3])
    return f"none of {len(broken)} items are usable; the first: {examples}"


def _claim(folder: Path, plan: Iterable[str]) -> None:
    """Create the folder or check that its plan is the same. Raises UserError if it isn't."""
    mark, state = folder / RECORDS / "plan", hashlib.sha256()
    for part in plan:
        state.update(part.encode())
    is_used = folder.exists() and (not folder.is_dir() or any(path.name != RECORDS for path in folder.iterdir()))
    if not mark.is_file():  # checked last, because another part may start at the same time
        if is_used:
            raise UserError(f"{folder} exists and isn't an empty folder; choose a new one or empty it")
        with own_folder(mark.parent) as records:
            write_atomically(records / mark.name, state.hexdigest())
    elif read_bytes(mark).decode(errors="replace") != state.hexdigest():
        other = "made with other options, or from files or captions that have changed"
        raise UserError(f"{folder} contains shards {other}; choose a new folder or empty it")


def _write_all(folder: Path, shards: Mapping[str, Members], num_workers: int) -> Iterator[BuiltShard]:
    """Write in threads: decoding, features, checksums and writing release the GIL. If one fails, all stop."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in as_completed([pool.submit(_write, folder, *shard, stop) for shard in shards.items()]):
            yield future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _finished(folder: Path, name: str) -> BuiltShard | None:
    """Return a shard that was built before, if its record exists and its size matches."""
    try:
        content = read_json(folder / RECORDS / f"{name}.json")
        record = ShardRecord(**content["record"]) if content["record"] else None
        is_whole = record is None or (folder / name).stat().st_size == record.bytes
        return BuiltShard(name, record, [(path, reason) for path, reason in content["broken"]]) if is_whole else None
    except OSError:
        return None


def _write(folder: Path, name: str, members: Members, stop: threading.Event) -> BuiltShard:
    """Write one tar and its record. Raises OSError if writing fails or `stop` is set."""
    broken: list[Named] = []
    num_items, seconds, record = 0, 0.0, None
    with replacing(folder / name) as file, TarWriter(file, encoder=False, mtime=0, user="clap", group="clap") as tar:
        for content, length in members(broken):
            tar.write(content)
            num_items, seconds = num_items + 1, seconds + length
            if stop.is_set():
                raise InterruptedError
    if num_items:
        with (folder / name).open("rb") as tar:
            digest = hashlib.file_digest(tar, "sha256").hexdigest()
        record = ShardRecord(num_items, (folder / name).stat().st_size, round(seconds, 3), digest)
    else:
        (folder / name).unlink()
    built = {"record": asdict(record) if record else None, "broken": broken}
    with own_folder(folder / RECORDS) as records:
        write_atomically(records / f"{name}.json", json.dumps(built))
    return BuiltShard(name, record, broken)


def _part(text: str) -> tuple[int, int]:
    part, slash, num_parts = text.partition("/")
    if slash and part.isdecimal() and num_parts.isdecimal() and int(part) <= int(num_parts) > 0:
        return int(part), int(num_parts)
    raise argparse.ArgumentTypeError(f"expected I/N with I from 0 to N, found {text!r}")


def add_work(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on many nodes, with the same other options").add_mutually_exclusive_group()
    more = "write only part I of N, also in parallel or again; 0/N only checks the files, once for all"
    group.add_argument("--part", type=_part, metavar="I/N", help=more)
    more = "after all N parts are written, write the manifest and report on the whole"
    group.add_argument("--join", type=whole_number(), metavar="N", help=more)
    more, cores = "shards to write in parallel (default: one per core)", len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=whole_number(), default=cores, metavar="N", help=more)
    more = "exit with code 1 if more than this fraction was unusable (default: 0.01)"
    parser.add_argument("--max_left_out", type=number(0, 1), default=0.01, metavar="SHARE", help=more)


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
