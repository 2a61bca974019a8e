"""Which tars a run reads, and which of them belong to each worker of each rank.

Every rank finds the same shards and refuses the same mistakes, so that all stop together before training.
"""

from __future__ import annotations

import glob
import math
import re
import sys
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from braceexpand import braceexpand

from clap_ds.data import shard_files

FIELD = "clap.data.shards"
HUB_TOKENIZER = "FacebookAI/roberta-base"

Sampling = Literal["epochs", "replacement"]

_MOST_LOOKED_UP = 32  # remote shards that are looked up before a run; problems with others turn up while reading
_FEWEST_IN_A_PASS = 8  # shards drawn with replacement before the shuffle buffer is emptied


@dataclass(frozen=True, slots=True)
class Source:
    """Tars that are mixed with others by weight; weights of all sources add up to 1."""

    shards: list[str]
    weight: float
    shards_per_pass: int = 0  # drawn by a worker with replacement; 0: each of `shards` once


def expand_sources(shards: str | list[str] | Mapping[str, float]) -> list[Source]:
    """The tars that `clap.data.shards` names, with their weights; one source without them. Errors: see `expand_shards`."""
    if not isinstance(shards, Mapping):
        return [Source(expand_shards(shards), 1.0)]
    total = sum(shards.values())
    return [Source(expand_shards(name), weight / total) for name, weight in shards.items()] or expand_sources([])


def expand_shards(shards: str | list[str]) -> list[str]:
    """The tar files a setting names, in order: paths or URLs, brace patterns (`a-{000..127}.tar`) and wildcards (`a-*.tar`).

    ValueError for nothing named, an unreadable pattern, one that matches nothing, missing or empty files, an unusable URL.
    """
    patterns = [shards] if isinstance(shards, str) else shards
    paths = [name for pattern in patterns for name in _expand(pattern.removeprefix("file://"))]
    if not paths:
        raise ValueError(f"{FIELD}: expected at least one tar file, found an empty list")
    remote = list(filter(shard_files.is_remote, paths))
    local = [path for path in paths if not shard_files.is_remote(path)]
    missing = [path for path in local if not Path(path).is_file()]
    if folder := next((Path(path) for path in missing if Path(path).is_dir()), None):
        raise ValueError(f"{FIELD}: expected tar files, found the folder {str(folder)!r}; {_tars_in(folder)}")
    if missing:
        found = f"{len(missing)} of the {len(paths)} files of {', '.join(patterns)!r} are not there"
        raise ValueError(f"{FIELD}: {found}, the first: {missing[0]} (working folder: {Path.cwd()})")
    for path in local:
        # Only small files are opened: every rank asks this of every shard.
        if Path(path).stat().st_size <= tarfile.RECORDSIZE and not any(Path(path).read_bytes()[: tarfile.BLOCKSIZE]):
            raise ValueError(f"{FIELD}: {path} is an empty tar; expected audio files with captions in it")
    looked_up = remote[:: max(1, math.ceil(len(remote) / _MOST_LOOKED_UP))]
    with ThreadPoolExecutor(8) as threads:
        for url, problem in zip(looked_up, threads.map(shard_files.problem_with, looked_up), strict=True):
            if problem:
                raise ValueError(f"{FIELD}: {url} {problem}")
    return paths


def _expand(pattern: str) -> list[str]:
    try:
        names = list(braceexpand(pattern))
    except ValueError:  # braceexpand's UnbalancedBracesError
        raise ValueError(f"{FIELD}: unbalanced braces in {pattern!r}") from None
    expanded = {name: _matches(name) for name in names}
    for name, matches in expanded.items():
        if not matches:
            where = "" if shard_files.is_remote(name) else f" (working folder: {Path.cwd()})"
            raise ValueError(f"{FIELD}: no file matches {name!r}{where}")
    return [match for name in names for match in expanded[name]]


def _tars_in(folder: Path) -> str:
    """What to write instead of a folder: patterns for the names of the tars in it, those for training first."""
    patterns = {re.sub(r"[0-9]+", "*", path.name) for path in folder.glob("*.tar")}
    names = sorted(patterns, key=lambda pattern: (not pattern.startswith("train"), pattern))
    others = f" ({', '.join(names[1:4])} is there, too)" if names[1:] else ""
    return f"write {str(folder / names[0])!r}{others}" if names else "there are no tars in it"


def _matches(name: str) -> list[str]:
    if not shard_files.is_remote(name):
        return [name] if Path(name).exists() or not glob.has_magic(name) else sorted(glob.glob(name))
    try:
        shard_files.check_url(name)
        # A ? in a web address begins its query.
        return shard_files.match(name) if "*" in name or "[" in name else [name]
    except ValueError as error:
        raise ValueError(f"{FIELD}: {error}") from None
    except Exception as error:  # whatever the file system's package raises
        raise ValueError(f"{FIELD}: {name!r} can't be looked up: {type(error).__name__}: {error}") from None


def share_out(
    sources: list[Source], sampling: Sampling, rank: int, world_size: int, num_workers: int
) -> list[list[Source]]:
    """What each worker of a rank reads of every source.

    With `epochs` no shard is given twice, all are given, and no worker goes without: with too few for every worker of every
    rank, all ranks use fewer workers, and rank 0 says so. With `replacement` every worker draws from all shards.

    `num_workers` are those wanted per rank; 0 (decoding in the training process) counts as one. ValueError where a source has
    fewer shards than there are ranks (`epochs`).
    """
    wanted = num_used = max(num_workers, 1)
    if sampling == "replacement":
        per_pass = [max(_FEWEST_IN_A_PASS, math.ceil(len(s.shards) / (world_size * wanted))) for s in sources]
        return [[replace(s, shards_per_pass=n) for s, n in zip(sources, per_pass, strict=True)]] * wanted
    for number in (len(source.shards) for source in sources):
        if number < world_size:
            raise ValueError(
                f"{FIELD}: {number} shard(s) for {world_size} ranks; every rank needs one of its own: expected at least"
                f" {world_size}, and {world_size * wanted} for all {num_workers} workers per rank (clap.data.num_workers)."
                " Repack the data into more tars, use fewer ranks, or draw shards with replacement (clap.data.sampling)"
            )
        usable = min(wanted, number // world_size)
        if usable < wanted and rank == 0:
            found = (
                f"{number} shards for {world_size} rank(s) × {num_workers} workers: using {usable} worker(s) per rank"
            )
            note(f"{found} ({world_size * num_workers} shards would keep all busy)")
        num_used = min(num_used, usable)
    return [
        [replace(source, shards=source.shards[rank::world_size][worker::num_used]) for source in sources]
        for worker in range(num_used)
    ]


def tokenizer_beside(shard: str) -> str:
    """What to read a tar's captions with where nothing else is said: the folder `tokenizer` beside it, or RoBERTa's own."""
    beside = Path(shard).parent / "tokenizer"
    return str(beside) if beside.is_dir() else HUB_TOKENIZER


def note(text: str) -> None:
    """One line to stderr, naming the setting it is about."""
    print(f"{FIELD}: {text}", file=sys.stderr, flush=True)
