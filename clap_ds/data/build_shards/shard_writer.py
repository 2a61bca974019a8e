"""Tars written side by side, each under another name until it is whole; and beside them the manifest and what can't be used.

Each finished tar has a record: a command that was stopped, or joins parts, goes on with those that have none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
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
from clap_ds.config.errors import UserError
from clap_ds.config.files import own_folder, read_bytes, read_json, replacing, write_atomically
from clap_ds.data.build_shards.prepared_audio import Preparation
from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, digest, write_manifest

RECORDS = ".build"  # folder of finished shards' records, beside them
BROKEN = "broken.jsonl"

Named = tuple[str, str]
"""Something that can't be used, and why."""
Member = tuple[dict[str, Any], float]
"""An item of a tar, its `__key__` and contents by extension, and its seconds of audio."""
Members = Callable[[list[Named]], Iterable[Member]]
"""Gives what goes into a shard, and adds what can't be used to the list."""


class BuiltShard(NamedTuple):
    """A finished shard."""

    name: str
    record: ShardRecord | None  # None where none of its items could be used, so that there is no tar
    broken: list[Named]  # items left out


def fill(
    folder: Path,
    plan: Iterable[str],
    shards: Mapping[str, Members],
    options: argparse.Namespace,
    preparation: Preparation | None,
    unusable: Sequence[Named] = (),
) -> list[BuiltShard]:
    """Write all shards of this part that aren't there yet; of the whole also the manifest and the list of broken items,
    `unusable` first. `plan` is what the shards follow from, beside the preparation."""
    prepared = (preparation.kind, preparation.front_end) if preparation else ()
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
        print(f"{len(built)} of {len(shards)} shards are there already", flush=True)
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
    return f"none of {len(broken)} items can be used, the first: {examples}"


def _claim(folder: Path, plan: Iterable[str]) -> None:
    """Make the folder, or make sure that it is for the same: UserError where its shards were to be of another plan."""
    mark, state = folder / RECORDS / "plan", hashlib.sha256()
    for part in plan:
        state.update(part.encode())
    is_used = folder.exists() and (not folder.is_dir() or any(path.name != RECORDS for path in folder.iterdir()))
    if not mark.is_file():  # looked for last, as another part may begin at the same time
        if is_used:
            raise UserError(f"{folder} exists and isn't an empty folder; name a new one, or empty it first")
        with own_folder(mark.parent) as records:
            write_atomically(records / mark.name, state.hexdigest())
    elif read_bytes(mark).decode(errors="replace") != state.hexdigest():
        other = "of other options, or of files or captions that have changed since"
        raise UserError(f"{folder} holds shards {other}; name a new folder, or empty it")


def _write_all(folder: Path, shards: Mapping[str, Members], num_workers: int) -> Iterator[BuiltShard]:
    """Write in threads: decoding, features, checksums and writing leave Python's lock. Where one fails, all end."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in as_completed([pool.submit(_write, folder, *shard, stop) for shard in shards.items()]):
            yield future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _finished(folder: Path, name: str) -> BuiltShard | None:
    """Read the record of a shard that was built before, if it is there in full length."""
    try:
        content = read_json(folder / RECORDS / f"{name}.json")
        record = ShardRecord(**content["record"]) if content["record"] else None
        is_whole = record is None or (folder / name).stat().st_size == record.bytes
        return BuiltShard(name, record, [(path, reason) for path, reason in content["broken"]]) if is_whole else None
    except OSError:
        return None


def _write(folder: Path, name: str, members: Members, stop: threading.Event) -> BuiltShard:
    """Write one tar and its record; OSError where the folder can't be written, the disk is full, or it is told to stop."""
    broken: list[Named] = []
    num_items, seconds, record = 0, 0.0, None
    with replacing(folder / name) as file, TarWriter(file, encoder=False, mtime=0, user="clap", group="clap") as tar:
        for content, length in members(broken):
            tar.write(content)
            num_items, seconds = num_items + 1, seconds + length
            if stop.is_set():
                raise InterruptedError
    if num_items:
        record = ShardRecord(num_items, (folder / name).stat().st_size, round(seconds, 3), digest(folder / name))
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
    raise argparse.ArgumentTypeError(f"expected a part and how many there are, from 1/N to N/N, or 0/N, found {text!r}")


def add_work(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on many nodes, with the same other options").add_mutually_exclusive_group()
    more = "write part I of N alone, at the same time as others or again; 0/N first looks at the files, once for all"
    group.add_argument("--part", type=_part, metavar="I/N", help=more)
    more = "when all N parts are written: the manifest, and all that is said of the whole"
    group.add_argument("--join", type=whole_number(), metavar="N", help=more)
    more, cores = "shards written at a time (default: one for each core)", len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=whole_number(), default=cores, metavar="N", help=more)
    more = "exit code 1 where more than that was left out as it can't be used (default 0.01)"
    parser.add_argument("--max_left_out", type=number(0, 1), default=0.01, metavar="SHARE", help=more)
