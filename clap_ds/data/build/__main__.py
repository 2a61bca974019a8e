"""Command: turn audio files with captions into the tars that training reads.

    python -m clap_ds.data.build clips.csv shards --held_out 0.05

SOURCE is a CSV or JSONL with a column of paths and one or more of captions, or a folder where each audio file has a .txt (one
caption a line) or .json (field caption) of the same name. Rows of the same file become one item with several captions; other
columns are kept in the item's json, so that a column of classes can serve zero-shot evaluation. A build that was stopped goes
on when the same command is given again. What can't be used is left out, counted, and listed in `broken.jsonl`. `--verify`
compares the shards of a folder with the checksums in its manifest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from clap_ds.config.errors import USER_ERROR, UserError
from clap_ds.data.build.caption_lists import Entry, ListOptions, read_entries
from clap_ds.data.build.shard_building import (
    RECORDS,
    BuiltShard,
    Encoding,
    PlannedShard,
    build_shard,
    fingerprint,
    finished,
    plan_shards,
)
from clap_ds.data.shard_manifest import MANIFEST, digest, read_manifest, write_manifest, write_whole

FAILED = 1
BROKEN = "broken.jsonl"

_counter: Any = None  # of a worker process: items done by all of them


class BuildError(Exception):
    """The build can't go on; what is finished stays."""


def build(entries: list[Entry], folder: Path, options: argparse.Namespace) -> list[BuiltShard]:
    """Build all shards that aren't there yet; then the manifest and the list of broken items.

    Raises:
        UserError: the folder holds something else, or no item can be used.
        BuildError: a worker died, or the disk is full.
    """
    encoding = Encoding(options.to_flac, options.sample_rate, options.mono)
    planned = plan_shards(
        entries,
        held_out=options.held_out,
        shard_bytes=round(options.shard_mb * 1e6),
        num_shards=options.shards,
        seed=options.seed,
    )
    _claim(folder, fingerprint(planned, encoding))
    built = {shard.name: there for shard in planned if (there := finished(folder, shard.name))}
    waiting = [shard for shard in planned if shard.name not in built]
    if built:
        print(f"{len(built)} of {len(planned)} shards are there already", flush=True)
    with tqdm(total=sum(len(shard.items) for shard in waiting), unit="item", disable=None) as progress:
        for done in _build_all(waiting, folder, encoding, options.workers, progress.update):
            built[done.name] = done
    in_order = [built[shard.name] for shard in planned]
    _conclude(folder, in_order)
    return in_order


def _claim(folder: Path, plan: str) -> None:
    """Make the folder, or make sure that it is this build's."""
    mark = folder / RECORDS / "plan"
    try:
        if mark.is_file():
            if mark.read_text() != plan:
                raise UserError(
                    f"{folder} holds shards of another list, other audio or other options; name a new folder, or empty it"
                )
            return
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and isn't an empty folder; name a new one, or empty it first")
        mark.parent.mkdir(parents=True)
        write_whole(mark, plan)
    except OSError as error:
        raise UserError(f"{folder} can't be written: {error.strerror}") from None


def _build_all(
    shards: list[PlannedShard], folder: Path, encoding: Encoding, num_workers: int, advance: Callable[[int], Any]
) -> Iterator[BuiltShard]:
    try:
        if num_workers == 1 or len(shards) < 2:
            for shard in shards:
                yield build_shard(shard, folder, encoding, lambda: advance(1))
        else:
            yield from _build_in_parallel(shards, folder, encoding, num_workers, advance)
    except BrokenProcessPool:
        raise BuildError(
            "a worker process died (most likely the host ran out of memory: try fewer --workers); the same command goes on"
            " with the shards that are left"
        ) from None
    except OSError as error:
        raise BuildError(f"{folder} can't be written: {error.strerror or error}; the same command goes on") from None


def _build_in_parallel(
    shards: list[PlannedShard], folder: Path, encoding: Encoding, num_workers: int, advance: Callable[[int], Any]
) -> Iterator[BuiltShard]:
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    workers = min(num_workers, len(shards))
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(counter,))
    try:
        running: set[Future[BuiltShard]] = {pool.submit(_build_in_worker, shard, folder, encoding) for shard in shards}
        seen = 0
        while running:
            done, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            now = counter.value
            advance(now - seen)
            seen = now
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(counter: Any) -> None:
    global _counter
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends it without a word
    _counter = counter


def _build_in_worker(shard: PlannedShard, folder: Path, encoding: Encoding) -> BuiltShard:
    def count() -> None:
        with _counter.get_lock():
            _counter.value += 1

    return build_shard(shard, folder, encoding, count)


def _conclude(folder: Path, built: list[BuiltShard]) -> None:
    broken = [{"file": path, "reason": reason} for shard in built for path, reason in shard.broken]
    write_whole(folder / BROKEN, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in broken))
    write_manifest(folder, {shard.name: shard.record for shard in built if shard.record})
    if not any(shard.record for shard in built):
        examples = "; ".join(f"{item['file']}: {item['reason']}" for item in broken[:3])
        raise UserError(f"none of {len(broken)} items can be used, the first: {examples}")


def verify(folder: Path) -> list[str]:
    """Compare the shards of a folder with its manifest. Returns what is wrong.

    Raises:
        UserError: there is no manifest.
    """
    manifest = read_manifest(str(folder))
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


def _report(folder: Path, built: list[BuiltShard], with_tokenizer: bool) -> list[str]:
    records = [(shard.name, shard.record) for shard in built if shard.record]
    num_broken = sum(len(shard.broken) for shard in built)
    lines = []
    for part in ("train", "held_out"):
        own = [record for name, record in records if name.startswith(part)]
        if own:
            lines.append(
                f"{part}: {sum(record.items for record in own)} items in {len(own)} shard(s),"
                f" {sum(record.bytes for record in own) / 1e6:.1f} MB, {sum(record.seconds for record in own) / 3600:.2f} h"
            )
    if num_broken:
        lines.append(f"{num_broken} items left out, listed with reasons in {folder / BROKEN}")
    tokenizer = str(folder / "tokenizer") if with_tokenizer else "FacebookAI/roberta-base"
    settings = {"source": "shards", "shards": str(folder / "train-*.tar"), "tokenizer": tokenizer}
    lines.append(f'For a run\'s JSON, in "clap":\n"data": {json.dumps(settings, indent=2)}')
    if any(name.startswith("held_out") for name, _ in records):
        evaluation = {"retrieval": {"shards": str(folder / "held_out-*.tar")}}
        lines.append(f'"evaluation": {json.dumps(evaluation, indent=2)}')
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m clap_ds.data.build", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help="CSV, JSONL or folder (see the module)")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the shards go: new, empty, or begun before")
    parser.add_argument("--verify", action="store_true", help="check FOLDER against its manifest, and build nothing")
    lists = parser.add_argument_group("how to read SOURCE (default: found out)")
    lists.add_argument("--audio_column", metavar="NAME")
    lists.add_argument("--caption_columns", nargs="+", metavar="NAME")
    lists.add_argument("--delimiter", metavar="CHARACTER", help="of a CSV; \\t for a tab")
    lists.add_argument("--encoding", metavar="NAME", help="such as cp1252 (default: UTF-8, or UTF-16 with its mark)")
    lists.add_argument(
        "--audio_root", type=Path, metavar="DIR", help="what paths are relative to (default: SOURCE's folder)"
    )
    shards = parser.add_argument_group("shards")
    shards.add_argument(
        "--held_out", type=float, default=0.0, metavar="SHARE", help="of items, kept for evaluation (default 0)"
    )
    shards.add_argument(
        "--shard_mb", type=float, default=500.0, metavar="MB", help="size of a shard, about (default 500)"
    )
    shards.add_argument(
        "--shards", type=_at_least_one, metavar="N",
        help="so many for training, instead: at least ranks × workers per rank, best a multiple of it",
    )  # fmt: skip
    shards.add_argument(
        "--seed", type=int, default=0, metavar="K", help="of the order and of what is held out (default 0)"
    )
    audio = parser.add_argument_group("audio (default: files as they are; to FLAC where training couldn't read them)")
    audio.add_argument("--to_flac", action="store_true", help="re-encode all")
    audio.add_argument("--sample_rate", type=_at_least_one, metavar="HZ", help="resample to this, as FLAC")
    audio.add_argument("--mono", action="store_true", help="average the channels, as FLAC")
    parser.add_argument(
        "--train_tokenizer", type=_at_least_one, metavar="VOCABULARY",
        help="train a tokenizer of so many tokens on the captions (at least 261), for use without a hub",
    )  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers", type=_at_least_one, default=cores, metavar="N", help=f"processes (default {cores})"
    )
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def run_build(options: argparse.Namespace) -> int:
    """The command after its arguments are parsed. Returns the exit code; errors: see `build` and `read_entries`."""
    if options.verify:
        problems = verify(options.folder)
        print("\n".join(problems) if problems else f"{options.folder}: all shards are as they were built")
        return FAILED if problems else 0
    columns = tuple(options.caption_columns) if options.caption_columns else None
    delimiter = "\t" if options.delimiter == "\\t" else options.delimiter
    list_options = ListOptions(options.audio_column, columns, delimiter, options.encoding, options.audio_root)
    entries = read_entries(options.source, list_options)
    if options.shards and options.shards > len(entries):
        raise UserError(f"--shards {options.shards} is more than the {len(entries)} items: a shard would be empty")
    built = build(entries, options.folder, options)
    if options.train_tokenizer:
        _train_tokenizer(entries, options)
    print("\n".join(_report(options.folder, built, bool(options.train_tokenizer))))
    return 0


def _train_tokenizer(entries: list[Entry], options: argparse.Namespace) -> None:
    from clap_ds.model.tokenizer import train_tokenizer

    captions = (caption for entry in entries if not entry.problem for caption in entry.captions)
    train_tokenizer(captions, options.folder / "tokenizer", vocab_size=options.train_tokenizer)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.source is None and not options.verify:
        parser.error("expected SOURCE and FOLDER (only --verify takes a folder alone)")
    if not 0 <= options.held_out < 1:
        parser.error(f"--held_out {options.held_out}: expected a share from 0 to below 1")
    if not options.shard_mb > 0:
        parser.error(f"--shard_mb {options.shard_mb}: expected a size above 0")
    if options.delimiter is not None and len(options.delimiter.replace("\\t", "\t")) != 1:
        parser.error(f"--delimiter {options.delimiter!r}: expected one character, or \\t")
    if options.sample_rate is not None and not 1000 <= options.sample_rate <= 655350:
        parser.error(f"--sample_rate {options.sample_rate}: expected 1000 to 655350 Hz")
    if options.train_tokenizer is not None and options.train_tokenizer < 261:
        parser.error(
            f"--train_tokenizer {options.train_tokenizer}: expected at least 261 (256 bytes and 5 special tokens)"
        )


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit code: 0, 1 (stopped, or a shard is not as it was built) or 2 (a mistake of the user's)."""
    parser = _parser()
    options = parser.parse_intermixed_args(None if arguments is None else list(arguments))
    _check(parser, options)
    try:
        return run_build(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
