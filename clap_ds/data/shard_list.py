"""Which tars a run reads, and which of them belong to each worker of each rank.

Every rank finds the same shards and refuses the same mistakes, so that all stop together before training. Reading the tars is
left to `shards`.
"""

from __future__ import annotations

import glob
import sys
import tarfile
from pathlib import Path

from braceexpand import braceexpand

FIELD = "clap.data.shards"


def expand_shards(shards: str | list[str]) -> list[Path]:
    """The tar files a setting names: paths, brace patterns (`a-{000..127}.tar`) and wildcards (`a-*.tar`), in order.

    Raises:
        ValueError: nothing named, a pattern that can't be read or matches nothing, files that are missing or empty.
    """
    patterns = [shards] if isinstance(shards, str) else shards
    paths = [Path(name) for pattern in patterns for name in _expand(pattern)]
    if not paths:
        raise ValueError(f"{FIELD}: expected at least one tar file, found an empty list")
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"{FIELD}: {len(missing)} of the {len(paths)} files of {', '.join(patterns)!r} are not there, the first: "
            f"{missing[0]} (working folder: {Path.cwd()})"
        )
    for path in paths:
        if _is_empty_tar(path):
            raise ValueError(f"{FIELD}: {path} is an empty tar; expected audio files with captions in it")
    return paths


def _expand(pattern: str) -> list[str]:
    try:
        names = list(braceexpand(pattern))
    except ValueError:  # braceexpand's UnbalancedBracesError
        raise ValueError(f"{FIELD}: unbalanced braces in {pattern!r}") from None
    expanded: list[str] = []
    for name in names:
        if Path(name).exists() or not glob.has_magic(name):
            expanded.append(name)
        elif matches := sorted(glob.glob(name)):
            expanded += matches
        else:
            raise ValueError(f"{FIELD}: no file matches {name!r} (working folder: {Path.cwd()})")
    return expanded


def _is_empty_tar(path: Path) -> bool:
    # Only small files are opened: every rank asks this of every shard.
    if path.stat().st_size > tarfile.RECORDSIZE:
        return False
    with path.open("rb") as file:
        return not any(file.read(tarfile.BLOCKSIZE))


def divide_shards(shards: list[Path], *, rank: int, world_size: int, num_workers: int) -> list[list[Path]]:
    """The shards of each worker of a rank. No shard is given twice, all are given, and no worker goes without.

    With too few shards for every worker of every rank, all ranks use fewer workers, and rank 0 says so.

    Args:
        num_workers: worker processes wanted per rank; 0 (decoding in the training process) counts as one.

    Raises:
        ValueError: fewer shards than ranks.
    """
    if len(shards) < world_size:
        raise ValueError(
            f"{FIELD}: {len(shards)} shard(s) for {world_size} ranks; every rank needs one of its own: "
            f"expected at least {world_size}, and {world_size * max(num_workers, 1)} for all {num_workers} workers per rank "
            "(clap.data.num_workers). Repack the data into more tars, or use fewer ranks"
        )
    num_used = min(max(num_workers, 1), len(shards) // world_size)
    if num_used < num_workers and rank == 0:
        note(
            f"{len(shards)} shards for {world_size} rank(s) × {num_workers} workers: using {num_used} worker(s) per rank "
            f"({world_size * num_workers} shards would keep all busy)"
        )
    own = shards[rank::world_size]
    return [own[worker::num_used] for worker in range(num_used)]


def note(text: str) -> None:
    """One line to stderr, naming the setting it is about."""
    print(f"{FIELD}: {text}", file=sys.stderr, flush=True)
