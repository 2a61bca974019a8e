"""`clap-shards prepare`: preprocess the audio of shards for a model, so that runs needn't decode it.

    clap-shards prepare 'shards/train-*.tar' mel --kind mel --preset htsat_tiny_roberta_base

Each output tar has the name, items and order of its input; only the audio changes. Unusable items are skipped, counted
and listed in `broken.jsonl`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from clap_ds.config.errors import UserError
from clap_ds.config.files import own_folder, read_bytes, replacing
from clap_ds.data.build_shards.prepared_audio import Preparation, add_preparation_options, preparation_of
from clap_ds.data.build_shards.report import print_amount, print_left_out, print_settings
from clap_ds.data.build_shards.shard_writer import Member, Named, add_work, fill
from clap_ds.data.clip import CLIP_FORMATS, captions_of, choose_clip
from clap_ds.data.decoding import BrokenItemError
from clap_ds.data.shard_manifest import expand_shards, folder_of, read_manifest, tokenizer_beside
from clap_ds.data.tar_samples import fetch, list_items


def add_prepare_options(parser: argparse.ArgumentParser) -> None:
    more = "tars: paths, patterns or URLs, as in clap.data.shards"
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help=more)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="output folder: new, empty, or to resume")
    add_preparation_options(parser, ("waveform", "mel"), required=True)
    add_work(parser)


def run_prepare(options: argparse.Namespace) -> int:
    """Prepare shards and return the exit code."""
    preparation = preparation_of(options)
    assert preparation is not None  # `encoded` isn't among the choices
    tars, folder = _by_name(expand_shards(options.shards)), options.folder
    for place in dict.fromkeys(map(folder_of, tars.values())):
        if read_manifest(place).kind == "mel":
            raise UserError(f"{place} holds features; expected audio")
    members = {name: partial(members_of, tar, preparation) for name, tar in tars.items()}
    shards = fill(folder, tars.values(), members, options, preparation)
    print_amount("part {}/{}".format(*options.part) if options.part else preparation.kind, shards)
    if options.part:
        return 0
    tokenizer = Path(next(iter(tars.values()))).parent / "tokenizer"
    if tokenizer.is_dir():
        with own_folder(folder / tokenizer.name) as own:
            for file in filter(Path.is_file, tokenizer.iterdir()):
                with replacing(own / file.name) as copy:
                    copy.write(read_bytes(file))
    print_settings(f"{folder}/*.tar", tokenizer_beside(f"{folder}/*.tar"), options.preset)
    return print_left_out(folder, shards, [], options.max_left_out)


def members_of(tar: str, preparation: Preparation, broken: list[Named]) -> Iterator[Member]:
    """Yield the prepared items of a tar (path or URL), and add unusable ones to `broken`."""
    for item in list_items(tar, lambda name, reason: broken.append((name, reason))):
        try:
            fetch(item)
            captions_of(item)
            clip = preparation.clip(choose_clip(item, "encoded"))
        except BrokenItemError as error:
            broken.append((f"{tar}: {item['__key__']}", str(error)))
            continue
        others = {name: item[name] for name in item.keys() - {*CLIP_FORMATS} if name[:1] not in ("", "_")}
        yield {"__key__": item["__key__"], clip.extension: clip.content, **others}, clip.seconds


def _by_name(tars: Iterable[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for tar in tars:
        name = re.sub(r"\.(tar|tgz)\b.*", "", tar.rpartition("/")[2]) + ".tar"
        if name in named:
            raise UserError(f"{named[name]} and {tar} would both become {name}; prepare them into separate folders")
        named[name] = tar
    return named
