"""`clap-shards build`: turn audio files with captions into the tars that training reads.

    clap-shards build clips.csv shards --held_out 0.05

SOURCE is a CSV or JSONL with a column of paths and one or more of captions, or a folder where each audio file has a .txt (one
caption a line) or .json (field caption) of the same name. Rows of the same file, and files that hold the same, become one item
with several captions; other columns are kept in the item's json, so that a column of classes can serve zero-shot evaluation.
`--kind` prepares the audio for a model, so that runs needn't (of shards that are there, `clap-shards prepare` does). A
build that was stopped resumes when the same command is given again. Rows that can't be read are refused before any work; files
that can't be used are left out, counted, and listed in `broken.jsonl`. `--verify` compares the shards of a folder with the
checksums in its manifest.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from tqdm import tqdm

from clap_ds.config.arguments import positive, whole_number
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.data.front_end import KINDS, FrontEnd
from clap_ds.data.shard_making import splits
from clap_ds.data.shard_making.audio_files import merge_same
from clap_ds.data.shard_making.caption_lists import Entry, read_entries
from clap_ds.data.shard_making.prepared_audio import Encoding, add_preparation_options, preparation_of
from clap_ds.data.shard_making.report import report
from clap_ds.data.shard_making.shard_building import members_of, plan_of, plan_shards
from clap_ds.data.shard_making.writing import FAILED, BuiltShard, Task, add_workers, claim, fill, none_usable, resumable
from clap_ds.data.shard_manifest import MANIFEST, digest, read_manifest
from clap_ds.model.tokenizer import train_tokenizer


def build(entries: list[Entry], options: argparse.Namespace) -> tuple[list[BuiltShard], list[tuple[str, Entry]]]:
    """Build all shards that aren't there yet; then the manifest and the list of broken items.

    Returns the shards, and each entry with the name of its shard, "" of those that have a problem. UserError where the folder
    holds something else or no item can be used; OSError where it can't be written, or the disk is full: what is finished stays.
    """
    preparation = preparation_of(options)
    conversion = preparation or Encoding(options.to_flac)
    unusable = [entry for entry in entries if entry.problem]
    reasons = [(str(entry.path), str(entry.problem)) for entry in unusable]
    if len(unusable) == len(entries):
        how = "--audio_root says what paths are relative to, --audio_column '{column}.wav' adds what names in a column lack"
        raise UserError(f"{none_usable(reasons)}; {how}")
    planned = plan_shards([entry for entry in entries if not entry.problem], options)
    claim(options.folder, plan_of(planned, conversion))
    tasks = [Task(each.name, partial(members_of, each, conversion)) for each in planned]
    front_end = FrontEnd.of(preparation.audio) if preparation else None
    built = fill(options.folder, tasks, options.workers, kind=options.kind, front_end=front_end, unusable=reasons)
    return built, [("", entry) for entry in unusable] + [(shard.name, e) for shard in planned for _, e in shard.items]


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
        elif digest(path) != record.sha256:
            problems.append(
                f"{name}: its content has changed: {path.stat().st_size} bytes of {record.bytes}, SHA-256 differs"
            )
    return problems


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """SOURCE may be left out; for options between it and FOLDER, parse with `parse_intermixed_args`."""
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help="CSV, JSONL or folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the shards go: new, empty, or begun before")
    parser.add_argument("--verify", action="store_true", help="check FOLDER against its manifest, and build nothing")
    add = parser.add_argument_group("how to read SOURCE (default: found out)").add_argument
    add("--audio_column", metavar="NAME", help="of paths; or how they are made of columns, such as '{id}_{start}.wav'")
    add("--caption_columns", nargs="+", metavar="NAME", help="of captions; a column of classes makes captions, too")
    add("--delimiter", type=_character, metavar="CHARACTER", help="of a CSV; \\t for a tab")
    add("--encoding", metavar="NAME", help="such as cp1252 (default: UTF-8, or UTF-16 with its mark)")
    add("--audio_root", type=Path, metavar="DIR", help="what paths are relative to (default: SOURCE's folder)")
    add("--lenient", action="store_true", help="leave malformed rows out and list them, instead of refusing SOURCE")
    add = parser.add_argument_group("what is kept for evaluation").add_argument
    add("--held_out", type=float, default=0.0, metavar="SHARE", help="of items, drawn at random (default 0)")
    add("--group_column", metavar="NAME", help="recording, speaker, …: items of one value stay on one side")
    add("--stratify_column", metavar="NAME", help="class: hold out the share of each, at least one item of two")
    add("--split_column", metavar="NAME", help=f"instead of these: says of each item {splits.SIDES}")
    add = parser.add_argument_group("shards").add_argument
    more = "size of a shard, about, by the size of SOURCE's files (default 500)"
    add("--shard_mb", type=positive, default=500.0, metavar="MB", help=more)
    more = "so many for training, instead: at least ranks × workers per rank, best a multiple of it"
    add("--shards", type=whole_number(), metavar="N", help=more)
    add("--seed", type=int, default=0, metavar="K", help="of the order and of what is held out (default 0)")
    audio = "audio (default: files as they are; to FLAC where training couldn't read them)"
    add = parser.add_argument_group(audio).add_argument
    add("--to_flac", action="store_true", help="re-encode all")
    add = parser.add_argument_group("audio prepared for a model, once for all runs, instead").add_argument
    add_preparation_options(add, KINDS, default="encoded")
    largest = max(load_preset(name).text.vocab_size for name in preset_names())
    more = "train a tokenizer of so many tokens on the captions, for a model trained from nothing, without a hub: 261 (bytes, "
    more += "special tokens) and often 1000 to 10000, the more the more captions, up to the model's vocabulary"
    parser.add_argument("--train_tokenizer", type=whole_number(261, largest), metavar="VOCABULARY", help=more)
    add_workers(parser)


def _character(text: str) -> str:
    if len(character := text.replace("\\t", "\t")) != 1:
        raise argparse.ArgumentTypeError(f"expected one character, or \\t, found {text!r}")
    return character


def _check(options: argparse.Namespace) -> None:
    """UserError for options that contradict each other."""
    if options.source is None and not options.verify:
        raise UserError("expected SOURCE and FOLDER (only --verify takes a folder alone)")
    if not 0 <= options.held_out < 1:
        raise UserError(f"--held_out {options.held_out}: expected a share from 0 to below 1")
    divided = options.group_column or options.stratify_column
    if options.split_column and (options.held_out or divided):
        raise UserError("--split_column says which items are held out; expected no other option that does")
    if divided and not options.held_out:
        raise UserError("--group_column and --stratify_column: expected --held_out SHARE, too")
    if options.kind != "encoded" and options.to_flac:
        raise UserError(f"--kind {options.kind} says what becomes of audio; expected no --to_flac")


def run_build(options: argparse.Namespace) -> int:
    """Returns the exit code: 0, 1 (the folder can't be written, or a shard is not as it was built) or 130 (stopped).

    UserError where the user made a mistake.
    """
    _check(options)
    if options.verify:
        problems = verify(options.folder)
        print("\n".join(problems) or f"{options.folder}: all shards are as they were built")
        return FAILED if problems else 0
    return resumable(options.folder, lambda: _build_and_report(options))


def _build_and_report(options: argparse.Namespace) -> int:
    entries = read_entries(options.source, options, lambda row: splits.problem_with(row, options))
    entries = merge_same(entries, options.workers)
    shards, shard_and_entry = build(entries, options)
    if options.train_tokenizer:
        captions = (caption for entry in entries if not entry.problem for caption in entry.captions)
        vocab_size = train_tokenizer(captions, options.folder / "tokenizer", vocab_size=options.train_tokenizer)
        fits = [name for name in preset_names() if load_preset(name).text.vocab_size >= vocab_size]
        print(f"tokenizer of {vocab_size} tokens for a model trained from nothing, of preset {', '.join(fits)}")
    print("\n".join(report(options.folder, shards, shard_and_entry, options)))
    return 0
