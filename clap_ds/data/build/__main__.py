"""Command: turn audio files with captions into the tars that training reads.

    python -m clap_ds.data.build clips.csv shards --held_out 0.05

SOURCE is a CSV or JSONL with a column of paths and one or more of captions, or a folder where each audio file has a .txt (one
caption a line) or .json (field caption) of the same name. Rows of the same file, and files that hold the same, become one item
with several captions; other columns are kept in the item's json, so that a column of classes can serve zero-shot evaluation. A
build that was stopped resumes when the same command is given again. Rows that can't be read are refused before any work; files
that can't be used are left out, counted, and listed in `broken.jsonl`. `--verify` compares the shards of a folder with the
checksums in its manifest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import UserError, exit_code_of
from clap_ds.config.files import write_atomically
from clap_ds.data.build import splits
from clap_ds.data.build.audio_files import merge_same
from clap_ds.data.build.caption_lists import Entry, read_entries
from clap_ds.data.build.report import BROKEN, Shards, report, vocab_sizes
from clap_ds.data.build.shard_building import (
    BuiltShard,
    Encoding,
    PlannedShard,
    build_shard,
    claim,
    finished,
    plan_shards,
)
from clap_ds.data.shard_manifest import MANIFEST, Manifest, digest, read_manifest, write_manifest
from clap_ds.model.tokenizer import train_tokenizer

FAILED = 1


def build(entries: list[Entry], folder: Path, options: argparse.Namespace) -> tuple[Shards, list[Entry]]:
    """Build all shards that aren't there yet; then the manifest and the list of broken items.

    Returns the shards, and the entries that are in none because they have a problem. UserError where the folder holds something
    else or no item can be used; OSError where it can't be written, or the disk is full: what is finished stays.
    """
    encoding = Encoding(options.to_flac, options.sample_rate, options.mono)
    unusable = [entry for entry in entries if entry.problem]
    if len(unusable) == len(entries):
        reasons = [(str(entry.path), str(entry.problem)) for entry in entries]
        raise UserError(_none_usable(reasons) + _remedy(entries, options))
    planned = plan_shards([entry for entry in entries if not entry.problem], options)
    claim(folder, planned, encoding)
    built = {shard.name: there for shard in planned if (there := finished(folder, shard.name))}
    waiting = [shard for shard in planned if shard.name not in built]
    if built:
        print(f"{len(built)} of {len(planned)} shards are there already", flush=True)
    with tqdm(total=sum(len(shard.items) for shard in waiting), unit="item", disable=None) as progress:
        for done in _build_all(waiting, folder, encoding, options.workers, progress.update):
            built[done.name] = done
    shards = [(shard, built[shard.name]) for shard in planned]
    broken = [(str(entry.path), str(entry.problem)) for entry in unusable]
    broken += [each for _, shard in shards for each in shard.broken]
    listed = [json.dumps({"file": path, "reason": reason}, ensure_ascii=False) + "\n" for path, reason in broken]
    write_atomically(folder / BROKEN, "".join(listed))
    write_manifest(folder, Manifest({shard.name: shard.record for _, shard in shards if shard.record}))
    if not any(shard.record for _, shard in shards):
        raise UserError(_none_usable(broken))
    return shards, unusable


def _none_usable(broken: list[tuple[str, str]]) -> str:
    examples = "; ".join(f"{path}: {reason}" for path, reason in broken[:3])
    return f"none of {len(broken)} items can be used, the first: {examples}"


def _remedy(entries: list[Entry], options: argparse.Namespace) -> str:
    """What to type where files aren't where they were looked for: the folder that has the first of them, if it is near."""
    root = options.audio_root or options.source.parent
    missing = [entry.path for entry in entries if not entry.remedy and not os.path.lexists(entry.path)]
    if options.source.is_dir() or not missing:
        return ""
    name = os.path.relpath(missing[0], root)
    with contextlib.suppress(OSError):
        for folder in (*root.iterdir(), *(root / "..").iterdir()):
            if (folder / name).is_file():
                return f"; {os.path.normpath(folder / name)} is there: --audio_root {shlex.quote(os.path.normpath(folder))}"
    ending = "" if missing[0].suffix else ", and --audio_column '{column}.wav' adds what names in a column lack"
    return f"; --audio_root says what paths are relative to{ending}"


def _build_all(
    shards: list[PlannedShard], folder: Path, encoding: Encoding, num_workers: int, advance: Callable[[], Any]
) -> Iterator[BuiltShard]:
    """Build shards side by side, in threads: decoding, checksums and writing leave Python's lock."""
    stop = threading.Event()

    def on_item() -> None:
        if stop.is_set():
            raise InterruptedError
        advance()

    pool = ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in as_completed([pool.submit(build_shard, shard, folder, encoding, on_item) for shard in shards]):
            yield future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def verify(folder: Path) -> list[str]:
    """Compare the shards of a folder with its manifest. Returns what is wrong; UserError where there is no manifest."""
    manifest = read_manifest(str(folder)).shards
    if not manifest:
        raise UserError(f"{folder}: no {MANIFEST} in it that can be read: not a finished build")
    problems = []
    for name, record in tqdm(manifest.items(), unit="shard", disable=None):
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: is not there")
        elif path.stat().st_size != record.bytes:
            problems.append(f"{name}: has {path.stat().st_size} bytes, expected {record.bytes}")
        elif digest(path) != record.sha256:
            problems.append(f"{name}: its content has changed (SHA-256 differs)")
    return problems


def _parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("python -m clap_ds.data.build", description=description, allow_abbrev=False)
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help="CSV, JSONL or folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the shards go: new, empty, or begun before")
    parser.add_argument("--verify", action="store_true", help="check FOLDER against its manifest, and build nothing")
    add = parser.add_argument_group("how to read SOURCE (default: found out)").add_argument
    add("--audio_column", metavar="NAME", help="of paths; or how they are made of columns, such as '{id}_{start}.wav'")
    add("--caption_columns", nargs="+", metavar="NAME", help="of captions; a column of classes makes captions, too")
    add("--delimiter", metavar="CHARACTER", help="of a CSV; \\t for a tab")
    add("--encoding", metavar="NAME", help="such as cp1252 (default: UTF-8, or UTF-16 with its mark)")
    add("--audio_root", type=Path, metavar="DIR", help="what paths are relative to (default: SOURCE's folder)")
    add("--lenient", action="store_true", help="leave malformed rows out and list them, instead of refusing SOURCE")
    add = parser.add_argument_group("what is kept for evaluation").add_argument
    add("--held_out", type=float, default=0.0, metavar="SHARE", help="of items, drawn at random (default 0)")
    add("--group_column", metavar="NAME", help="recording, speaker, …: items of one value stay on one side")
    add("--stratify_column", metavar="NAME", help="class: hold out the share of each, at least one item of two")
    add("--split_column", metavar="NAME", help=f"instead of these: says of each item {splits.SIDES}")
    add = parser.add_argument_group("shards").add_argument
    add("--shard_mb", type=float, default=500.0, metavar="MB", help="size of a shard, about (default 500)")
    more = "so many for training, instead: at least ranks × workers per rank, best a multiple of it"
    add("--shards", type=whole_number(), metavar="N", help=more)
    add("--seed", type=int, default=0, metavar="K", help="of the order and of what is held out (default 0)")
    audio = "audio (default: files as they are; to FLAC where training couldn't read them)"
    add = parser.add_argument_group(audio).add_argument
    add("--to_flac", action="store_true", help="re-encode all")
    add("--sample_rate", type=whole_number(1000, 655350), metavar="HZ", help="resample to this, as FLAC")
    add("--mono", action="store_true", help="average the channels, as FLAC")
    sizes = vocab_sizes()
    fitting = "; ".join(f"up to {size} for {names}" for size, names in sizes.items())
    more = "train a tokenizer of so many tokens on the captions, for a model trained from nothing, without a hub: 261 (bytes, "
    more += f"special tokens) and often 1000 to 10000, the more the more captions; {fitting}"
    parser.add_argument("--train_tokenizer", type=whole_number(261, max(sizes)), metavar="VOCABULARY", help=more)
    more, cores = "shards built at a time (default: one for each core)", len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=whole_number(), default=cores, metavar="N", help=more)
    return parser


def _parse(arguments: Iterable[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_intermixed_args(None if arguments is None else list(arguments))
    if options.source is None and not options.verify:
        parser.error("expected SOURCE and FOLDER (only --verify takes a folder alone)")
    if not 0 <= options.held_out < 1:
        parser.error(f"--held_out {options.held_out}: expected a share from 0 to below 1")
    if options.split_column and (options.held_out or options.group_column or options.stratify_column):
        parser.error(
            "--split_column says which items are held out; expected no --held_out, --group_column, --stratify_column"
        )
    if (options.group_column or options.stratify_column) and not options.held_out:
        parser.error("--group_column and --stratify_column: expected --held_out SHARE, too")
    if not options.shard_mb > 0:
        parser.error(f"--shard_mb {options.shard_mb}: expected a size above 0")
    if options.delimiter is not None:
        options.delimiter = options.delimiter.replace("\\t", "\t")
        if len(options.delimiter) != 1:
            parser.error(f"--delimiter {options.delimiter!r}: expected one character, or \\t")
    return options


def run_build(options: argparse.Namespace) -> int:
    if options.verify:
        problems = verify(options.folder)
        print("\n".join(problems) or f"{options.folder}: all shards are as they were built")
        return FAILED if problems else 0
    entries = read_entries(options.source, options, lambda row: splits.problem_with(row, options))
    entries = merge_same(entries, options.workers)
    shards, unusable = build(entries, options.folder, options)
    vocab_size = None
    if options.train_tokenizer:
        captions = (caption for entry in entries if not entry.problem for caption in entry.captions)
        vocab_size = train_tokenizer(captions, options.folder / "tokenizer", vocab_size=options.train_tokenizer)
    print("\n".join(report(options.folder, shards, unusable, vocab_size, options)))
    return 0


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit code: 0, 1 (stopped, or a shard is not as it was built) or 2 (a mistake of the user's)."""
    options = _parse(arguments)
    try:
        return exit_code_of(lambda: run_build(options), (UserError,))
    except OSError as error:
        reason = error.strerror or error
        print(f"error: {options.folder} can't be written: {reason}; the same command resumes", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped; the same command resumes", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
