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

import hashlib
import json
import math
import random
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from tqdm import tqdm

from clap_ds.config import arguments
from clap_ds.data.build_shards import shard_writer
from clap_ds.data.build_shards.caption_lists import (
    MAX_FILE_BYTES,
    Entry,
    add_columns,
    merge,
    read_entries,
    values_of,
)
from clap_ds.data.build_shards.prepare import (
    EncodedClip,
    add_preparation_options,
    keep_file,
    preparation_of,
)
from clap_ds.data.build_shards.shard_writer import Member, Skipped
from clap_ds.data.decoding import BrokenItemError, check_samples, open_audio
from clap_ds.data.shard_io import KINDS
from clap_ds.data.shard_manifest import HUB_TOKENIZER
from clap_ds.utils.errors import UserError
from clap_ds.utils.files import hold_file, read_bytes, replace_files
from clap_ds.weights.hub import train_tokenizer

TRAIN = ("train", "training")
HELD_OUT = ("held_out", "valid", "val", "validation", "test", "dev", "eval")
SPLITS = f"{TRAIN[0]} or {HELD_OUT[0]} (also {', '.join(HELD_OUT[1:])})"

# files, after which the whole list's time is estimated
_NUM_TRIAL_FILES = 100
# Files are first compared by so many samples. Only those with equal ones are compared whole.
_COMPARED_SAMPLES = 2**15
_ALL_SAMPLES = 2**62

NumberedEntries = list[tuple[int, Entry]]
"""Entries with their numbers in the list."""
Convert = Callable[[bytes, str], EncodedClip]
"""Converts a file's content, given its extension."""


def add_build_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="CSV, JSONL, JSON array or folder")
    add("folder", type=Path, metavar="FOLDER", help="output folder: new, empty, or to resume")
    add(
        "--first",
        type=arguments.whole_number(),
        metavar="N",
        help="build only the first N files, as a test",
    )
    add(
        "--min_seconds",
        type=arguments.positive,
        default=0.0,
        metavar="S",
        help="leave out shorter clips",
    )
    add(
        "--max_seconds",
        type=arguments.positive,
        default=math.inf,
        metavar="S",
        help="leave out longer clips",
    )
    add_columns(parser)
    group = parser.add_argument_group("held-out items for evaluation")
    add = group.add_mutually_exclusive_group().add_argument
    add(
        "--held_out",
        type=arguments.number(0, 1),
        default=0.0,
        metavar="FRACTION",
        help="hold out this fraction of items at random; 1: all, for a test set",
    )
    add("--split_column", metavar="NAME", help=f"read each item's split from this column: {SPLITS}")
    add(
        "--fold_column", metavar="NAME", help="read each item's fold from this column, as in ESC-50"
    )
    group.add_argument(
        "--held_out_fold", metavar="FOLD", help="hold out this fold of --fold_column"
    )
    add = parser.add_argument_group("shards").add_argument
    add(
        "--shard_mb",
        type=arguments.positive,
        default=500.0,
        metavar="MB",
        help="set the approximate size of a shard in MB of SOURCE's files",
    )
    add(
        "--shards",
        type=arguments.whole_number(),
        metavar="N",
        help=(
            "set the number of training shards, instead of --shard_mb; ideally a "
            "multiple of ranks × workers"
        ),
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="set the seed for shuffling and holding out",
    )
    add_preparation_options(parser, KINDS, default="encoded")
    text = (
        "train a tokenizer with N tokens on the captions, to train a model from scratch; "
        "typically 1000 to 10000"
    )
    # 261: a token per byte, and RoBERTa's five special tokens.
    add = parser.add_argument
    add("--train_tokenizer", type=arguments.whole_number(261), metavar="N", help=text)
    shard_writer.add_work_options(parser)


def run_build(options: Namespace) -> int:
    """Build shards and return the exit code."""
    if bool(options.fold_column) != bool(options.held_out_fold):
        raise UserError("expected --fold_column with --held_out_fold")
    preparation = preparation_of(options)
    folder_pattern = shard_writer.enter_part(options)
    listed = read_entries(options.source, options)
    listed_in_part = listed
    if options.part:
        # A part may lack a fold that the list has.
        choose_held_out(listed, [*range(len(listed))], options)
        # Lists are often sorted, and each part should be like the others.
        listed_in_part = random.Random(f"{options.seed}, parts").sample(listed, len(listed))
        listed_in_part = [*shard_writer.take_part(listed_in_part, options)]
    entries = merge_equal_audio(listed_in_part[: options.first], options.workers)
    entries, left_out = leave_out_by_length(entries, options)
    usable = [entry for entry in entries if not entry.problem]
    skipped = [(str(entry.path), entry.problem) for entry in entries if entry.problem]
    if not usable:
        raise UserError(
            f"{shard_writer.none_usable(skipped)}; set --audio_root if paths are relative "
            "to another folder"
        )
    warn_of_few_captions(usable)
    shards = divide(usable, options)
    convert = preparation.convert if preparation else keep_file
    count_attempt = make_estimate(len(usable), len(listed_in_part))
    records, skipped = shard_writer.write_shards(
        options.folder,
        # everything that determines the shards
        map(repr, shards.items()),
        {
            name: partial(members_of, items, prefix_of_part(options), convert, count_attempt)
            for name, items in shards.items()
        },
        options.workers,
        preparation.manifest_fields if preparation else (),
        skipped,
        left_out,
    )
    tokenizer = HUB_TOKENIZER
    if options.train_tokenizer:
        # The same one in all parts.
        tokenizer = train_on_captions(listed if options.part else usable, options)
    patterns = {}
    for split in ("train", "held_out"):
        of_split = [record for name, record in records.items() if name.startswith(split)]
        if of_split:
            shard_writer.print_amount(split, of_split)
            patterns[split] = f"{folder_pattern}/{split}-*.tar"
    sections = {}
    if "held_out" in patterns:
        sections["evaluation"] = {"retrieval": {"shards": patterns["held_out"]}}
    shard_writer.print_settings(patterns.get("train"), tokenizer, options.preset, **sections)
    return shard_writer.print_skipped(
        options.folder, records.values(), skipped, options.max_left_out
    )


def leave_out_by_length(
    entries: list[Entry], options: Namespace
) -> tuple[list[Entry], dict[str, int]]:
    """Return the entries within `--min_seconds` and `--max_seconds`, and print and return how many
    others there were. Raises UserError if none is left."""
    suited = []
    left_out: Counter[str] = Counter()
    for entry in entries:
        # Files that can't be decoded have no length, and are reported.
        if 0 < entry.seconds < options.min_seconds:
            left_out[f"shorter than {options.min_seconds:g} s"] += 1
        elif entry.seconds > options.max_seconds:
            left_out[f"longer than {options.max_seconds:g} s"] += 1
        else:
            suited.append(entry)
    if left_out:
        counts = ", ".join(f"{number:,} {reason}" for reason, number in left_out.items())
        print(f"left out of {len(entries):,} clips: {counts}")
        if not suited:
            raise UserError(f"no clip is left: {counts}")
    return suited, dict(left_out)


def warn_of_few_captions(entries: list[Entry]) -> None:
    """Warn of captions as a wrong column causes them: all equal, or fewer than 2% distinct."""
    # Clips with equal lists of captions count once.
    num_captions = len({tuple(entry.captions) for entry in entries})
    most_clips = 50 * num_captions if num_captions > 1 else 1
    if len(entries) > most_clips:
        print(
            (
                f"warning: only {num_captions:,} different caption(s) among {len(entries):,} "
                "clips; check the caption source"
            ),
            file=sys.stderr,
        )


def train_on_captions(entries: list[Entry], options: Namespace) -> str:
    """Train a tokenizer on the captions, and return its folder."""
    folder = options.folder / "tokenizer"
    captions = chain.from_iterable(entry.captions for entry in entries)
    with replace_files(folder) as draft:
        vocab_size = train_tokenizer(captions, draft, vocab_size=options.train_tokenizer)
    print(f"trained a tokenizer of {vocab_size} tokens, for a model trained from scratch")
    return str(folder)


def merge_equal_audio(entries: list[Entry], num_threads: int) -> list[Entry]:
    """Check the files, and merge entries whose samples are equal, whatever their format and
    tags."""
    # libsndfile and hashing release the GIL.
    with ThreadPoolExecutor(num_threads) as pool:
        digests_of_starts = pool.map(partial(identify_audio, _COMPARED_SAMPLES), entries)
        starts = list(tqdm(digests_of_starts, "files", len(entries), disable=None))
        counts = Counter(starts)

        def identify_whole(start: str, entry: Entry) -> str:
            return start if counts[start] == 1 else identify_audio(_ALL_SAMPLES, entry)

        merged = merge(zip(pool.map(identify_whole, starts, entries), entries, strict=True))
    num_merged = len(entries) - len(merged)
    if num_merged:
        print(f"merged {num_merged} of {len(entries)} files into others with equal audio")
    return merged


def identify_audio(max_samples: int, entry: Entry) -> str:
    """Set a file's size and length, or its problem. Return a digest of its first samples and length, or its path if
    it is unusable."""
    if entry.problem:
        return str(entry.path)
    try:
        entry.size = entry.path.stat().st_size
        with hold_file(entry.path) as path, open_audio(path) as file:
            # The mean, so that mono and stereo copies are equal.
            entry.seconds = file.frames / file.samplerate
            samples = file.read(max_samples, "float32", always_2d=True).mean(axis=1)
            is_constant = len(samples) == file.frames and samples.min() == samples.max()
            check_samples(len(samples), min(max_samples, file.frames), is_constant)
            return f"{file.frames} {file.samplerate} {hashlib.sha256(samples).hexdigest()}"
    except BrokenItemError:
        # Its reason is recorded when it is packed.
        pass
    # ValueError: a path with a zero byte
    except (OSError, ValueError) as error:
        entry.problem = f"audio file can't be read: {error}"
    return str(entry.path)


def make_estimate(num_packed: int, num_files: int) -> Callable[[], None]:
    """Return a function to call after each file, usable or not. After the first `_NUM_TRIAL_FILES`
    of `num_packed` it prints how long `num_files` will take."""
    num_trial_files = min(_NUM_TRIAL_FILES, num_packed)
    started_s = time.perf_counter()
    numbers = count(1)

    def count_attempt() -> None:
        # Threads share the counter.
        if next(numbers) != num_trial_files or num_files <= num_trial_files:
            return
        elapsed_s = time.perf_counter() - started_s
        total_min = elapsed_s / num_trial_files * num_files / 60
        print(
            (
                f"the first {num_trial_files} files took {elapsed_s:.3g} s: about "
                f"{total_min:.3g} min for all {num_files:,}"
            ),
            flush=True,
        )

    return count_attempt


def members_of(
    items: NumberedEntries,
    prefix: str,
    convert: Convert,
    count_attempt: Callable[[], None],
    skipped: list[Skipped],
) -> Iterator[Member]:
    """Yield the items of a shard, whose keys begin with `prefix`, and add unusable ones to
    `skipped`."""
    for number, entry in items:
        try:
            content = read_bytes(entry.path, MAX_FILE_BYTES)
            clip = convert(content, entry.path.suffix.lower().removeprefix("."))
        except (BrokenItemError, OSError) as error:
            skipped.append((str(entry.path), str(error)))
            continue
        finally:
            count_attempt()
        caption = entry.captions[0] if len(entry.captions) == 1 else entry.captions
        fields: dict[str, Any] = {}
        for name, value in entry.more.items():
            # Readers prefer a `text` to the caption.
            is_reserved = name in ("text", "caption", "source")
            fields[f"{name}_column" if is_reserved else name] = value
        # Last, so that columns can't replace them.
        fields |= {"caption": caption, "source": entry.path.name}
        encoded = json.dumps(fields, ensure_ascii=False, default=str).encode(errors="replace")
        item = {"__key__": f"{prefix}{number:09d}", clip.extension: clip.content, "json": encoded}
        yield item, clip.seconds


def divide(entries: list[Entry], options: Namespace) -> dict[str, NumberedEntries]:
    """Shuffle entries and assign them to shards (by file name). Raises UserError for a split or
    shard without items."""
    order = list(range(len(entries)))
    random.Random(options.seed).shuffle(order)
    # In the random order, so that each shard is a random sample of the list.
    held_out = choose_held_out(entries, order, options, is_whole=options.part is None)
    shards = {}
    for split in ("held_out", "train"):
        is_held_out = split == "held_out"
        items = [
            (number, entries[number]) for number in order if (number in held_out) == is_held_out
        ]
        size = sum(entry.size for _, entry in items)
        # At least one shard, and no empty ones.
        num_shards = min(len(items), max(1, round(size / (1e6 * options.shard_mb))))
        if options.shards and not is_held_out:
            num_shards = options.shards
        if num_shards > len(items):
            raise UserError(f"--shards {num_shards} exceeds the {len(items)} items for training")
        num_digits = max(5, len(str(num_shards)))
        for shard in range(num_shards):
            # Shards differ by at most one item.
            start = shard * len(items) // num_shards
            stop = (shard + 1) * len(items) // num_shards
            shards[f"{split}-{prefix_of_part(options)}{shard:0{num_digits}d}.tar"] = items[
                start:stop
            ]
    return shards


def prefix_of_part(options: Namespace) -> str:
    """Return what makes the names of a part's shards and items its own, as all parts are one data
    set."""
    return f"{options.part[0]}-" if options.part else ""


def choose_held_out(
    entries: list[Entry], order: list[int], options: Namespace, *, is_whole: bool = True
) -> set[int]:
    """Return the indices of the held-out entries, by a column or as the first ones of `order`. Of a
    whole list, some must be held out and some not, or else UserError is raised."""
    held_out: set[int] = set()
    if options.split_column:
        labels = [_labels(entry, options.split_column, {*TRAIN, *HELD_OUT}) for entry in entries]
        held_out = {number for number in order if not labels[number].isdisjoint(HELD_OUT)}
    # Merged rows can have several values. Audio that is in both sets is held out.
    elif options.fold_column:
        labels = [_labels(entry, options.fold_column) for entry in entries]
        held_out = {number for number in order if options.held_out_fold.lower() in labels[number]}
        if not held_out and is_whole:
            folds = ", ".join(sorted(set().union(*labels))[:20])
            raise UserError(
                f"--held_out_fold {options.held_out_fold}: no such value in "
                f"{options.fold_column!r}; found {folds}"
            )
    elif options.held_out:
        held_out = {*order[: max(1, round(options.held_out * len(entries)))]}
    # `--held_out 1` asks for a test set.
    if len(held_out) == len(entries) and options.held_out != 1 and is_whole:
        raise UserError(
            f"all {len(entries)} item(s) would be held out, with none left for training"
        )
    return held_out


def _labels(entry: Entry, column: str, allowed: set[str] | None = None) -> set[str]:
    """Return an entry's lower-case values in a column, which are several if it merges rows. Raises
    UserError for none, and for others than `allowed`."""
    labels = {str(value).strip().lower() for value in values_of(entry.more, column)}
    if not labels or (allowed and not labels <= allowed):
        expected = f"expected {SPLITS if allowed else 'a value'} in its column {column!r}"
        columns = ", ".join(entry.more) or "none"
        raise UserError(
            f"{entry.path}: {expected}, found {', '.join(labels) or 'none'}; its columns: {columns}"
        )
    return labels
