"""`clap-shards build`: turn audio files with captions into the tars that training reads.

    clap-shards build clips.csv shards --held_out 0.05

SOURCE is a CSV or JSONL with a column of paths and one or more of captions, or a folder where each audio file has a .txt (one
caption a line) or .json (field caption) of the same name. Files that hold the same become one item with several captions; other
columns are kept in the item's json. Files that can't be used are left out, counted, and listed in `broken.jsonl`.
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
from clap_ds.data.build_shards.prepared_audio import Clip, add_preparation_options, as_it_is, preparation_of
from clap_ds.data.build_shards.report import print_amount, print_left_out, print_settings
from clap_ds.data.build_shards.shard_writer import RECORDS, BuiltShard, Member, Named, add_work, fill, none_usable
from clap_ds.data.build_shards.splits import SIDES, Numbered, check_columns, divide
from clap_ds.data.captions import monotony
from clap_ds.data.front_end import KINDS
from clap_ds.data.shard_assignment import HUB_TOKENIZER
from clap_ds.model.tokenizer import train_tokenizer


def add_build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="CSV, JSONL or folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the shards go: new, empty, or begun before")
    add = parser.add_argument_group("how to read SOURCE (default: found out)").add_argument
    add("--audio_column", metavar="NAME", help="of paths; or how they are made of columns, such as '{id}_{start}.wav'")
    add("--caption_columns", nargs="+", metavar="NAME", help="of captions; a column of classes makes captions, too")
    more = "of several names between commas, semicolons or bars, as FSD50K's labels: each becomes a list"
    add("--multilabel_column", nargs="+", default=[], metavar="NAME", help=more)
    add("--audio_root", type=Path, metavar="DIR", help="what paths are relative to (default: SOURCE's folder)")
    group = parser.add_argument_group("what is kept for evaluation")
    add, add_one = group.add_argument, group.add_mutually_exclusive_group().add_argument
    more = "of items, drawn at random (default 0); 1: all, such as a list of test clips"
    add_one("--held_out", type=arguments.number(0, 1), default=0.0, metavar="SHARE", help=more)
    add("--group_column", metavar="NAME", help="recording, speaker, …: items of one value stay on one side")
    add_one("--split_column", metavar="NAME", help=f"instead of these: says of each item {SIDES}")
    add_one("--fold_column", metavar="NAME", help="or: of the fold that each item is of, as ESC-50's")
    add("--held_out_fold", metavar="FOLD", help="the fold of that column that is held out")
    add = parser.add_argument_group("shards").add_argument
    more = "size of a shard, about, by the size of SOURCE's files (default 500)"
    add("--shard_mb", type=arguments.positive, default=500.0, metavar="MB", help=more)
    more = "so many for training, instead: at least ranks × workers per rank, best a multiple of it"
    add("--shards", type=arguments.whole_number(), metavar="N", help=more)
    add("--seed", type=int, default=0, metavar="K", help="of the order and of what is held out (default 0)")
    add_preparation_options(parser, KINDS, default="encoded")
    more = "train a tokenizer of so many tokens on the captions, often 1000 to 10000, for a model trained from nothing"
    sizes = arguments.whole_number(261, max(load_preset(name).text.vocab_size for name in preset_names()))
    parser.add_argument("--train_tokenizer", type=sizes, metavar="VOCABULARY", help=more)
    add_work(parser)


def run_build(options: argparse.Namespace) -> int:
    """Build, and return the exit code."""
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
        raise UserError(f"{none_usable(broken)}; --audio_root says what paths are relative to")
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
        print(f"tokenizer of {vocab_size} tokens for a model trained from nothing")
    _report(options.folder, shards, tokenizer, options.preset)
    return print_left_out(options.folder, shards, broken, options.max_left_out)


def _plan(divided: dict[str, Numbered]) -> Iterator[str]:
    """Give what the shards follow from: their list, its captions and sizes of files."""
    for name, items in divided.items():
        yield name
        for number, entry in items:
            parts = [number, str(entry.path), entry.size, entry.captions, entry.more, list(map(str, entry.others))]
            yield json.dumps(parts, default=str)


def members_of(items: Numbered, convert: Callable[[bytes, str], Clip], broken: list[Named]) -> Iterator[Member]:
    """Give each item of a shard; those that can't be used are added to `broken`."""
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
