"""Write tars in parallel, atomically, with their manifest and list of unusable files.

Each finished tar has a record, so that an interrupted command continues with the others.
"""

import argparse
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from tqdm import tqdm
from webdataset.writer import TarWriter

from clap_ds.config.arguments import i_of_n, number, whole_number
from clap_ds.data.shard_io import Kind
from clap_ds.data.shard_manifest import FrontEnd, ShardManifest, ShardRecord, write_manifest
from clap_ds.utils.errors import UserError, printable
from clap_ds.utils.files import (
    hold_folder,
    open_atomically,
    read_bytes,
    read_json,
    write_atomically,
)

RECORDS = ".build"
"""Subfolder of finished shards' records."""
SKIPPED = "broken.jsonl"

T = TypeVar("T")
Skipped = tuple[str, str]
"""An unusable file's name, and the reason."""
Member = tuple[dict[str, Any], float]
"""A tar's item (`__key__` and contents by extension), and its seconds of audio."""
Members = Callable[[list[Skipped]], Iterable[Member]]
"""Yields a shard's members, and adds unusable files to the list."""


def write_shards(
    folder: Path,
    plan: Iterable[str],
    shards: Mapping[str, Members],
    num_workers: int,
    manifest_fields: tuple[Kind, FrontEnd] | tuple[()] = (),
    skipped: Sequence[Skipped] = (),
    left_out: Mapping[str, int] = MappingProxyType({}),
) -> tuple[dict[str, ShardRecord], list[Skipped]]:
    """Write the missing shards, the manifest and the list of unusable files.

    Args:
        plan: determines the shards, with `manifest_fields`. Another plan's folder is refused.
        shards: each shard's members by its file name.
        manifest_fields: kind and front end of prepared shards.
        skipped: unusable files that are known already. They come first in the list.
        left_out: numbers of clips that the user didn't want, by reason, for the manifest.

    Returns:
        The shards' records by file name, and the list.
    """
    _claim_folder(folder, chain([repr(manifest_fields)], plan))
    missing = {name: members for name, members in shards.items() if not _read_written(folder, name)}
    if len(missing) < len(shards):
        print(f"{len(shards) - len(missing)} of {len(shards)} shards already exist", flush=True)
    try:
        _write_all(folder, missing, num_workers)
    except OSError as error:
        raise UserError(
            f"{folder} can't be written: {error.strerror or error}; the same command resumes"
        ) from None
    records = {}
    all_skipped = [*skipped]
    for name in shards:
        written = _read_written(folder, name)
        assert written is not None
        record, skipped_of_shard = written
        all_skipped += skipped_of_shard
        if record:
            records[name] = record
    lines = [json.dumps({"file": path, "reason": reason}) + "\n" for path, reason in all_skipped]
    write_atomically(folder / SKIPPED, "".join(lines))
    manifest = ShardManifest(records, *manifest_fields)
    write_manifest(folder, replace(manifest, left_out={**left_out}))
    if not records:
        raise UserError(none_usable(all_skipped))
    return records, all_skipped


def none_usable(skipped: Sequence[Skipped]) -> str:
    return f"none of {len(skipped)} items are usable; the first: {_examples(skipped)}"


def _examples(skipped: Sequence[Skipped]) -> str:
    return "; ".join(f"{path}: {reason}" for path, reason in skipped[:3])


def _claim_folder(folder: Path, plan: Iterable[str]) -> None:
    """Create the folder or check that its plan is the same. Raises UserError if it isn't."""
    path = folder / RECORDS / "plan"
    # Part by part, because a plan of many files is large.
    digest = hashlib.sha256()
    for part in plan:
        digest.update(part.encode())
    if path.is_file():
        if read_bytes(path).decode(errors="replace") != digest.hexdigest():
            raise UserError(
                f"{folder} contains shards made with other options, or from files or "
                "captions that have changed; choose a new folder or empty it"
            )
        return
    is_claimable = not folder.exists()
    # A command that was interrupted at once leaves only this subfolder.
    if folder.is_dir():
        is_claimable = all(path.name == RECORDS for path in folder.iterdir())
    if not is_claimable:
        raise UserError(f"{folder} exists and isn't an empty folder; choose a new one or empty it")
    with hold_folder(path.parent) as records:
        write_atomically(records / path.name, digest.hexdigest())


def _write_all(folder: Path, shards: Mapping[str, Members], num_workers: int) -> None:
    """Write shards in threads. If one fails, all stop."""
    stop = threading.Event()
    # Threads suffice: decoding, features, checksums and writing release the GIL.
    pool = ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        futures = [pool.submit(_write, folder, *shard, stop) for shard in shards.items()]
        for future in tqdm(as_completed(futures), total=len(futures), unit="shard", disable=None):
            future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _read_written(folder: Path, name: str) -> tuple[ShardRecord | None, list[Skipped]] | None:
    """Return a written shard's record and its unusable files, if its size matches. Without a
    usable item, it has neither record nor tar."""
    try:
        content = read_json(folder / RECORDS / f"{name}.json")
        skipped = [(path, reason) for path, reason in content["broken"]]
        if not content["record"]:
            return None, skipped
        record = ShardRecord(**content["record"])
        is_whole = (folder / name).stat().st_size == record.bytes
    except OSError:
        return None
    return (record, skipped) if is_whole else None


def _write(folder: Path, name: str, members: Members, stop: threading.Event) -> None:
    """Write one tar and its record. Raises OSError if writing fails or `stop` is set."""
    skipped: list[Skipped] = []
    num_items = 0
    total_s = 0.0
    path = folder / name
    # Tars with equal contents have equal bytes, without times and users.
    options: Any = {"encoder": False, "mtime": 0, "user": "clap", "group": "clap"}
    # The tar appears when it is complete.
    with open_atomically(path) as file, TarWriter(file, **options) as tar:
        for item, seconds in members(skipped):
            tar.write(item)
            num_items += 1
            total_s += seconds
            if stop.is_set():
                raise InterruptedError
    record = None
    if num_items:
        with path.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        record = asdict(ShardRecord(num_items, path.stat().st_size, round(total_s, 3), digest))
    else:
        path.unlink()
    # After the tar, so that one without a record is written again.
    with hold_folder(folder / RECORDS) as records:
        content = json.dumps({"record": record, "broken": skipped})
        write_atomically(records / f"{name}.json", content)


def add_work_options(parser: argparse.ArgumentParser) -> None:
    text = "write N shards in parallel (default: one per core)"
    num_cores = len(os.sched_getaffinity(0))
    add = parser.add_argument
    add("--workers", type=whole_number(), default=num_cores, metavar="N", help=text)
    add(
        "--max_left_out",
        type=number(0, 1),
        default=0.01,
        metavar="FRACTION",
        help="exit with code 1 if more than this fraction was unusable",
    )

    part_help = "write only this part of all, such as 2/8, into the folder part-2-of-8 of FOLDER"
    add("--part", type=i_of_n, metavar="I/N", help=part_help)


def enter_part(options: argparse.Namespace) -> str:
    """Replace the output folder by that of `--part`, and return a pattern of all parts' folders."""
    if options.part is None:
        return str(options.folder)
    number, count = options.part
    pattern = f"{options.folder}/part-*-of-{count}"
    options.folder /= f"part-{number}-of-{count}"
    return pattern


def take_part(items: Sequence[T], options: argparse.Namespace) -> Sequence[T]:
    """Return a contiguous part of the items, by `--part`. Raises UserError for an empty one."""
    if options.part is None:
        return items
    number, count = options.part
    items_of_part = items[(number - 1) * len(items) // count : number * len(items) // count]
    if not items_of_part:
        raise UserError(f"--part {number}/{count}: empty, as there are only {len(items)} items")
    return items_of_part


def print_amount(title: str, records: Sequence[ShardRecord]) -> None:
    num_items = sum(record.items for record in records)
    megabytes = sum(record.bytes for record in records) / 1e6
    hours = sum(record.seconds for record in records) / 3600
    print(
        f"{title}: {num_items} items in {len(records)} shard(s), {megabytes:.1f} MB, {hours:.2f} h"
    )


def print_skipped(
    folder: Path, records: Iterable[ShardRecord], skipped: Sequence[Skipped], max_fraction: float
) -> int:
    """Print the skipped items. Return the exit code: 1 if their fraction exceeds `max_fraction`."""
    fraction = len(skipped) / (len(skipped) + sum(record.items for record in records))
    if skipped:
        examples = printable(_examples(skipped))
        print(
            f"skipped {len(skipped)}, listed with reasons in {folder / SKIPPED}; the "
            f"first: {examples}"
        )
    if fraction <= max_fraction:
        return 0
    print(
        (
            f"error: {fraction:.1%} skipped, more than --max_left_out {max_fraction:g}; the "
            "shards are usable"
        ),
        file=sys.stderr,
    )
    return 1


def print_settings(shards: str | None, tokenizer: str, preset: str | None, **sections: Any) -> None:
    """Print the settings of a run on these shards, if there are training shards, and other
    `sections`."""
    settings: dict[str, Any] = {}
    if shards:
        settings["data"] = {"source": "webdataset", "shards": shards, "tokenizer": tokenizer}
    if preset:
        settings["model"] = {"preset": preset}
    print('For a run\'s JSON, in "clap":')
    for name, section in (settings | sections).items():
        print(f'"{name}": {json.dumps(section, indent=2)}')
