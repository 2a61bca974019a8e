"""Pack audio files with captions into tars for training.

Examples:
    clap-ds shards build clips.csv shards --held_out 0.05
    clap-ds shards build sounds/ shards --kind mel --preset htsat_tiny_roberta_base

SOURCE is a CSV, a JSONL or a JSON array with a column of paths and columns of captions. Or it is a
folder in which each audio file has a .txt (one caption per line) or .json (field caption) of the
same name. Rows of a file, and files with equal audio, become one item with several captions; other
columns are kept in the item's json. Unusable files are skipped, counted and listed in
`broken.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

from tqdm import tqdm

from clap_ds.config import arguments
from clap_ds.data.build_shards import shard_writer
from clap_ds.data.build_shards.caption_lists import (
    MOST_OF_A_FILE,
    Entry,
    add_columns,
    merge,
    read_entries,
    values_of,
)
from clap_ds.data.build_shards.prepare import (
    EncodedClip,
    add_preparation_options,
    as_it_is,
    preparation_of,
)
from clap_ds.data.build_shards.shard_writer import Member, Named
from clap_ds.data.decoding import BrokenItemError, check_samples, open_audio
from clap_ds.data.shard_io import KINDS
from clap_ds.data.shard_manifest import HUB_TOKENIZER
from clap_ds.utils.errors import UserError
from clap_ds.utils.files import pinned, read_bytes, replacing_files
from clap_ds.weights.hub import train_tokenizer

TRAIN = ("train", "training")
HELD_OUT = ("held_out", "valid", "val", "validation", "test", "dev", "eval")
SIDES = f"{TRAIN[0]} or {HELD_OUT[0]} (also {', '.join(HELD_OUT[1:])})"

TRIAL = 100  # files, after which the whole list's time is estimated
START = 2**15
"""Samples by which files are compared first; only those with equal ones are compared whole."""

Numbered = list[tuple[int, Entry]]
"""Entries with their numbers in the list."""
Convert = Callable[[bytes, str], EncodedClip]
"""Converts a file's content, given its extension."""


def add_build_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="CSV, JSONL, JSON array or folder"
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="output folder: new, empty, or to resume"
    )
    parser.add_argument(
        "--first",
        type=arguments.whole_number(),
        metavar="N",
        help="build only the first N files, as a test",
    )
    add_columns(parser)
    group = parser.add_argument_group("held-out items for evaluation")
    add = group.add_argument
    add_one = group.add_mutually_exclusive_group().add_argument
    more = "hold out this fraction of items at random; 1: all, for a test set"
    add_one("--held_out", type=arguments.number(0, 1), default=0.0, metavar="FRACTION", help=more)
    add_one(
        "--split_column", metavar="NAME", help=f"read each item's split from this column: {SIDES}"
    )
    add_one(
        "--fold_column", metavar="NAME", help="read each item's fold from this column, as in ESC-50"
    )
    add("--held_out_fold", metavar="FOLD", help="hold out this fold of --fold_column")
    add = parser.add_argument_group("shards").add_argument
    more = "set the approximate size of a shard in MB of SOURCE's files"
    add("--shard_mb", type=arguments.positive, default=500.0, metavar="MB", help=more)
    more = "set the number of training shards, instead of --shard_mb; ideally a multiple of ranks × workers"
    add("--shards", type=arguments.whole_number(), metavar="N", help=more)
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="set the seed for shuffling and holding out",
    )
    add_preparation_options(parser, KINDS, default="encoded")
    more = "train a tokenizer with N tokens on the captions, to train a model from scratch; typically 1000 to 10000"
    parser.add_argument(
        "--train_tokenizer", type=arguments.whole_number(261), metavar="N", help=more
    )
    shard_writer.add_work(parser)


def run_build(options: Namespace) -> int:
    """Build shards and return the exit code."""
    if bool(options.fold_column) != bool(options.held_out_fold):
        raise UserError("expected --fold_column with --held_out_fold")
    preparation = preparation_of(options)
    folder = options.folder
    listed = read_entries(options.source, options)
    entries = merge_equal_audio(listed[: options.first], options.workers)
    usable = [entry for entry in entries if not entry.problem]
    broken = [(str(entry.path), entry.problem) for entry in entries if entry.problem]
    if not usable:
        raise UserError(
            f"{shard_writer.none_usable(broken)}; set --audio_root if paths are relative to another folder"
        )
    num_different = len({tuple(entry.captions) for entry in usable})
    if len(usable) > num_different * (50 if num_different > 1 else 1):
        few = f"only {num_different:,} different caption(s) among {len(usable):,} clips"
        print(f"warning: {few}; check the caption source", file=sys.stderr)
    divided = divide(usable, options)
    convert = timed(preparation.clip if preparation else as_it_is, len(listed))
    members = {name: partial(members_of, items, convert) for name, items in divided.items()}
    prepared = preparation.described if preparation else ()
    # The plan: everything that determines the shards.
    records, broken = shard_writer.write_shards(
        folder, map(repr, divided.items()), members, options.workers, prepared, broken
    )
    tokenizer = HUB_TOKENIZER
    if options.train_tokenizer:
        captions = (caption for entry in usable for caption in entry.captions)
        with replacing_files(folder / "tokenizer") as draft:
            vocab_size = train_tokenizer(captions, draft, vocab_size=options.train_tokenizer)
        tokenizer = str(folder / "tokenizer")
        print(f"trained a tokenizer of {vocab_size} tokens, for a model trained from scratch")
    patterns = {}
    for side in ("train", "held_out"):
        if of_side := [record for name, record in records.items() if name.startswith(side)]:
            shard_writer.print_amount(side, of_side)
            patterns[side] = f"{folder}/{side}-*.tar"
    more = (
        {"evaluation": {"retrieval": {"shards": patterns["held_out"]}}}
        if "held_out" in patterns
        else {}
    )
    shard_writer.print_settings(patterns.get("train"), tokenizer, options.preset, **more)
    return shard_writer.print_left_out(folder, records.values(), broken, options.max_left_out)


def merge_equal_audio(entries: list[Entry], num_threads: int) -> list[Entry]:
    """Check the files, and merge entries whose samples are equal, whatever their format and
    tags."""
    with ThreadPoolExecutor(num_threads) as pool:
        digests = pool.map(partial(identify_audio, START), entries)
        starts = list(tqdm(digests, "files", len(entries), disable=None))
        number_of = Counter(starts)
        whole = pool.map(
            lambda start, entry: start if number_of[start] == 1 else identify_audio(2**62, entry),
            starts,
            entries,
        )
        merged = merge(zip(whole, entries, strict=True))
    num_merged = len(entries) - len(merged)
    if num_merged:
        print(f"merged {num_merged} of {len(entries)} files into others with equal audio")
    return merged


def identify_audio(most_samples: int, entry: Entry) -> str:
    """Set a file's size or problem. Return a digest of its first samples and length, or its path if
    it is unusable."""
    if entry.problem:
        return str(entry.path)
    try:
        entry.size = entry.path.stat().st_size
        with pinned(entry.path) as path, open_audio(path) as file:
            samples = file.read(most_samples, "float32", always_2d=True).mean(axis=1)
            is_constant = len(samples) == file.frames and samples.min() == samples.max()
            check_samples(len(samples), min(most_samples, file.frames), is_constant)
            return f"{file.frames} {file.samplerate} {hashlib.sha256(samples).hexdigest()}"
    except BrokenItemError:
        pass  # its reason is recorded when it is packed
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        entry.problem = f"audio file can't be read: {error}"
    return str(entry.path)


def timed(convert: Convert, total: int) -> Convert:
    """Print how long `total` files will take after the first `TRIAL`."""
    started_s = time.perf_counter()
    numbers = count(1)

    def converted(content: bytes, extension: str) -> EncodedClip:
        clip = convert(content, extension)
        if next(numbers) == TRIAL:
            took_s = time.perf_counter() - started_s
            total_min = took_s / TRIAL * total / 60
            print(
                f"the first {TRIAL} files took {took_s:.3g} s: about {total_min:.3g} min for all {total:,}",
                flush=True,
            )
        return clip

    return converted


def members_of(items: Numbered, convert: Convert, broken: list[Named]) -> Iterator[Member]:
    """Yield the items of a shard, and add unusable ones to `broken`."""
    for number, entry in items:
        try:
            content = read_bytes(entry.path, MOST_OF_A_FILE)
            clip = convert(content, entry.path.suffix.lower().removeprefix("."))
        except (BrokenItemError, OSError) as error:
            broken.append((str(entry.path), str(error)))
            continue
        caption = entry.captions[0] if len(entry.captions) == 1 else entry.captions
        fields = {"caption": caption, "source": entry.path.name}
        # Readers prefer a `text` to the caption.
        others = {
            f"{name}_column" if name in ("text", *fields) else name: value
            for name, value in entry.more.items()
        }
        said = json.dumps(others | fields, ensure_ascii=False, default=str).encode(errors="replace")
        yield {"__key__": f"{number:09d}", clip.extension: clip.content, "json": said}, clip.seconds


def divide(entries: list[Entry], options: Namespace) -> dict[str, Numbered]:
    """Shuffle entries and assign them to shards (by file name). Raises UserError for a split or
    shard without items."""
    order = list(range(len(entries)))
    random.Random(options.seed).shuffle(order)
    chosen = held_out(entries, order, options)
    shards = {}
    for side in ("held_out", "train"):
        items = [
            (number, entries[number])
            for number in order
            if (number in chosen) == (side == "held_out")
        ]
        num_shards = min(
            len(items),
            max(1, round(sum(entry.size for _, entry in items) / (options.shard_mb * 1e6))),
        )
        if options.shards and side == "train":
            num_shards = options.shards
        if num_shards > len(items):
            raise UserError(f"--shards {num_shards} exceeds the {len(items)} items for training")
        for k in range(num_shards):
            name = f"{side}-{k:0{max(5, len(str(num_shards)))}d}.tar"
            shards[name] = items[k * len(items) // num_shards : (k + 1) * len(items) // num_shards]
    return shards


def held_out(entries: list[Entry], order: list[int], options: Namespace) -> set[int]:
    """Return the indices of the held-out entries, by a column or as the first part of the given
    order."""
    chosen: set[int] = set()
    if column := options.split_column or options.fold_column:
        sides = {*TRAIN, *HELD_OUT} if options.split_column else None
        wanted = HELD_OUT if sides else (options.held_out_fold.lower(),)
        values = [
            {str(value).strip().lower() for value in values_of(entry.more, column)}
            for entry in entries
        ]
        for entry, found in zip(entries, values, strict=True):
            if not found or (sides and not found <= sides):
                expected = f"{SIDES if sides else 'a value'} in its column {column!r}"
                there = f"found {', '.join(found) or 'none'}; its columns: {', '.join(entry.more) or 'none'}"
                raise UserError(f"{entry.path}: expected {expected}, {there}")
        chosen = {number for number in order if not values[number].isdisjoint(wanted)}
        if not chosen and not sides:
            there = ", ".join(sorted(set().union(*values))[:20])
            raise UserError(
                f"--held_out_fold {options.held_out_fold}: no such value in {column!r}; found {there}"
            )
    elif options.held_out:
        chosen = {*order[: max(1, round(options.held_out * len(entries)))]}
    if len(chosen) == len(entries) and options.held_out != 1:
        raise UserError(
            f"all {len(entries)} item(s) would be held out, with none left for training"
        )
    return chosen
