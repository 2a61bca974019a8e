"""`clap-shards prepare`: prepare the audio of shards for a model, so that runs needn't decode it.

    clap-shards prepare 'shards/train-*.tar' mel --kind mel --preset htsat_tiny_roberta_base

Each tar becomes one of the same name, with the same items in the same order; captions, and whatever else belongs to an item,
stay as they are, and so does a folder `tokenizer` beside the tars. Where the command was stopped, the same one resumes. Items
that can't be used are left out, counted, and listed in `broken.jsonl`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fsspec

from clap_ds.config.errors import UserError
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.captions import captions_of
from clap_ds.data.front_end import FrontEnd
from clap_ds.data.items import CLIP_FORMATS, choose_clip
from clap_ds.data.shard_list import expand_shards, tokenizer_beside
from clap_ds.data.shard_making.prepared_audio import Preparation, add_preparation_options, preparation_of
from clap_ds.data.shard_making.report import amount, settings_for
from clap_ds.data.shard_making.writing import BROKEN, RECORDS, Member, Named, Task, add_workers, claim, fill, resumable
from clap_ds.data.shard_manifest import read_manifest
from clap_ds.data.tar_items import read_items


def add_prepare_options(parser: argparse.ArgumentParser) -> None:
    """For options between SHARDS and FOLDER, parse with `parse_intermixed_args`."""
    more = "tars, by path, pattern or URL as in clap.data.shards"
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help=more)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where these go: new, empty, or begun before")
    add_preparation_options(parser.add_argument, ("waveform", "mel"), required=True)
    add_workers(parser)


def run_prepare(options: argparse.Namespace) -> int:
    """Returns the exit code: 0, 1 (FOLDER can't be written) or 130 (stopped). UserError or ValueError of a user's mistake."""
    preparation = preparation_of(options)
    assert preparation is not None  # of an encoded kind, which isn't among the choices
    tars = _by_name(expand_shards(options.shards))
    return resumable(options.folder, lambda: _prepare(tars, preparation, options))


def _prepare(tars: Mapping[str, str], preparation: Preparation, options: argparse.Namespace) -> int:
    folder, num_workers = options.folder, options.workers
    for place in dict.fromkeys(tar.rpartition("/")[0] or "." for tar in tars.values()):
        if read_manifest(place).kind == "mel":
            raise UserError(f"{place} holds features; expected audio")
    with ThreadPoolExecutor(num_workers) as pool:
        sizes = pool.map(_size, tars.values())
    claim(folder, [repr(preparation), *(f"{tar} {size}" for tar, size in zip(tars.values(), sizes, strict=True))])
    tasks = [Task(name, partial(members_of, tar, preparation)) for name, tar in tars.items()]
    shards = fill(folder, tasks, num_workers, kind=preparation.kind, front_end=FrontEnd.of(preparation.audio))
    print(f"{preparation.kind}: {amount([shard.record for shard in shards if shard.record])}")
    if broken := [name for shard in shards for name, _ in shard.broken]:
        print(f"{len(broken)} left out, listed with reasons in {folder / BROKEN}")
    if cut := sorted({*broken} & {*tars.values()}):
        again = f"to read one again, remove its record in {folder / RECORDS}"
        print(f"{len(cut)} tar(s) couldn't be read to the end, such as {cut[0]}; {again}, and give the same command")
    tokenizer = Path(next(iter(tars.values()))).parent / "tokenizer"
    if tokenizer.is_dir():
        shutil.copytree(tokenizer, folder / tokenizer.name, dirs_exist_ok=True)
    print("\n".join(settings_for(f"{folder}/*.tar", tokenizer_beside(f"{folder}/*.tar"), options.preset)))
    return 0


def members_of(tar: str, preparation: Preparation, broken: list[Named]) -> Iterator[Member | None]:
    """What a tar (path or URL) holds, prepared, item by item; None of what can't be used, which is added to `broken`."""
    for item in read_items(tar, lambda name, reason: broken.append((name, reason))):
        try:
            captions_of(item)
            clip = preparation.clip(bytes(choose_clip(item, "encoded")))
        except BrokenItemError as error:
            broken.append((f"{tar}: {item['__key__']}", str(error)))
            yield None
            continue
        others = {name: item[name] for name in item.keys() - {*CLIP_FORMATS} if name[:1] not in ("", "_")}
        yield {"__key__": item["__key__"], clip.extension: clip.content, **others}, clip.seconds


def _by_name(tars: Iterable[str]) -> dict[str, str]:
    """Tars by the names of those that they become."""
    named: dict[str, str] = {}
    for tar in tars:
        name = re.sub(r"\.(tar|tgz)\b.*", "", tar.rpartition("/")[2]) + ".tar"
        if name in named:
            raise UserError(f"{named[name]} and {tar} would both become {name}; prepare them into folders of their own")
        named[name] = tar
    return named


def _size(tar: str) -> int:
    """Bytes; 0 where that isn't known."""
    with contextlib.suppress(Exception):  # whatever the file system's package raises
        fs, path = fsspec.url_to_fs(tar)
        return int(fs.size(path) or 0)
    return 0
