"""`clap-shards build`: pack audio files with captions into tars for training.

    clap-shards build clips.csv shards --held_out 0.05

SOURCE is a CSV or JSONL with a column of paths and columns of captions. Or it is a folder in which each audio file has a
.txt (one caption per line) or .json (field caption) of the same name. Identical files become one item with several
captions; other columns are kept in the item's json. Unusable files are skipped, counted and listed in `broken.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from clap_ds.config import arguments
from clap_ds.config.errors import UserError
from clap_ds.config.files import own_folder, read_bytes
from clap_ds.config.model import load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.build_shards.audio_files import look_at, merge, save_looks
from clap_ds.data.build_shards.caption_lists import MOST_OF_A_FILE, read_entries
from clap_ds.data.build_shards.prepared_audio import EncodedClip, add_preparation_options, as_it_is, preparation_of
from clap_ds.data.build_shards.report import print_amount, print_left_out, print_settings
from clap_ds.data.build_shards.shard_writer import RECORDS, BuiltShard, Member, Named, add_work, fill, none_usable
from clap_ds.data.build_shards.splits import SIDES, Numbered, check_columns, divide
from clap_ds.data.captions import monotony
from clap_ds.data.front_end import KINDS
from clap_ds.data.shard_assignment import HUB_TOKENIZER
from clap_ds.weights.tokenizer import train_tokenizer


def add_build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="CSV, JSONL or folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="output folder: new, empty, or to resume")
    add = parser.add_argument_group("how to read SOURCE (default: detected)").add_argument
    add("--audio_column", metavar="NAME", help="column of paths, or a template such as '{id}_{start}.wav'")
    add("--caption_columns", nargs="+", metavar="NAME", help="columns of captions or class names")
    more = "columns of several names separated by commas, semicolons or bars, such as FSD50K's labels; split into lists"
    add("--multilabel_column", nargs="+", default=[], metavar="NAME", help=more)
    add("--audio_root", type=Path, metavar="DIR", help="folder that paths are relative to (default: SOURCE's)")
    group = parser.add_argument_group("held-out items for evaluation")
    add, add_one = group.add_argument, group.add_mutually_exclusive_group().add_argument
    more = "fraction of items to hold out at random (default: 0); 1: all, for a test set"
    add_one("--held_out", type=arguments.number(0, 1), default=0.0, metavar="SHARE", help=more)
    add("--group_column", metavar="NAME", help="column such as the speaker: items with equal values stay in one split")
    add_one("--split_column", metavar="NAME", help=f"instead, column with each item's split: {SIDES}")
    add_one("--fold_column", metavar="NAME", help="instead, column with each item's fold, as in ESC-50")
    add("--held_out_fold", metavar="FOLD", help="fold to hold out, with --fold_column")
    add = parser.add_argument_group("shards").add_argument
    more = "approximate size of a shard in MB of SOURCE's files (default: 500)"
    add("--shard_mb", type=arguments.positive, default=500.0, metavar="MB", help=more)
    more = "number of training shards, instead of --shard_mb; ideally a multiple of ranks × workers"
    add("--shards", type=arguments.whole_number(), metavar="N", help=more)
    add("--seed", type=int, default=0, metavar="K", help="seed for shuffling and holding out (default: 0)")
    add_preparation_options(parser, KINDS, default="encoded")
    more = "train a tokenizer with N tokens on the captions, to train a model from scratch; typically 1000 to 10000"
    sizes = arguments.whole_number(261, max(load_preset(name).text.vocab_size for name in preset_names()))
    parser.add_argument("--train_tokenizer", type=sizes, metavar="VOCABULARY", help=more)
    add_work(parser)


def run_build(options: argparse.Namespace) -> int:
    """Build shards and return the exit code."""
    if bool(options.fold_column) != bool(options.held_out_fold) or (options.group_column and not options.held_out):
        raise UserError("expected --fold_column with --held_out_fold, and --group_column with --held_out")
    preparation = preparation_of(options)
    entries = read_entries(options.source, options)
    check_columns(entries, options)
    saved = options.folder / RECORDS / "files.json"
    look_at(entries, options.workers, saved if options.part or options.join else None)
    listed, entries = entries, merge(entries)
    usable = [entry for entry in entries if not entry.problem]
    broken = [(str(entry.path), entry.problem) for entry in entries if entry.problem]
    if not usable:
        raise UserError(f"{none_usable(broken)}; set --audio_root if paths are relative to another folder")
    if few := monotony([tuple(entry.captions) for entry in usable]):
        print(f"warning: {few}", file=sys.stderr)
    divided = divide(usable, options)
    convert = preparation.clip if preparation else as_it_is
    members = {name: partial(members_of, items, convert) for name, items in divided.items()}
    shards = fill(options.folder, _plan(divided), members, options, preparation, broken)
    if options.part:
        if not saved.is_file():
            save_looks(saved, listed)
        print_amount("part {}/{}".format(*options.part), shards)
        return 0
    tokenizer = HUB_TOKENIZER
    if options.train_tokenizer:
        tokenizer = str(options.folder / "tokenizer")
        captions = (caption for entry in usable for caption in entry.captions)
        with own_folder(Path(tokenizer)) as folder:
            vocab_size = train_tokenizer(captions, folder, vocab_size=options.train_tokenizer)
        print(f"trained a tokenizer of {vocab_size} tokens, for a model trained from scratch")
    _report(options.folder, shards, tokenizer, options.preset)
    return print_left_out(options.folder, shards, broken, options.max_left_out)


def _plan(divided: dict[str, Numbered]) -> Iterator[str]:
    """Yield everything that determines the shards: their names, and their items' numbers, files, sizes and metadata."""
    for name, items in divided.items():
        yield name
        for number, entry in items:
            parts = [number, str(entry.path), entry.size, entry.captions, entry.more, list(map(str, entry.others))]
            yield json.dumps(parts, default=str)


def members_of(items: Numbered, convert: Callable[[bytes, str], EncodedClip], broken: list[Named]) -> Iterator[Member]:
    """Yield the items of a shard, and add unusable ones to `broken`."""
    for number, entry in items:
        names = [entry.path, *entry.others]
        try:
            content = read_bytes(entry.path, MOST_OF_A_FILE)
            clip = convert(content, entry.path.suffix.lower().removeprefix("."))
        except (BrokenItemError, OSError) as error:
            broken += [(str(path), str(error)) for path in names]
            continue
        sources = list(dict.fromkeys(path.name for path in names))
        caption, source = (each[0] if len(each) == 1 else each for each in (entry.captions, sources))
        described = {**entry.more, "caption": caption, "source": source}
        said = json.dumps(described, ensure_ascii=False, default=str).encode(errors="replace")
        yield {"__key__": f"{number:09d}", clip.extension: clip.content, "json": said}, clip.seconds


def _report(folder: Path, shards: list[BuiltShard], tokenizer: str, preset: str | None) -> None:
    more = {}
    has_train = print_amount("train", [shard for shard in shards if shard.name.startswith("train")])
    if print_amount("held_out", [shard for shard in shards if shard.name.startswith("held_out")]):
        more["evaluation"] = {"retrieval": {"shards": f"{folder}/held_out-*.tar"}}
    print_settings(f"{folder}/train-*.tar" if has_train else None, tokenizer, preset, more)
