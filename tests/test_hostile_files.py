"""Files that colleagues could put where they are read: each command ends by itself, with a message or without the file."""

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from clap_ds.analysis.record import read_record
from clap_ds.config.errors import UserError
from clap_ds.config.settings import load_run
from clap_ds.data.shard_manifest import read_manifest
from clap_ds.ranks.failure import read_words
from clap_ds.ranks.verdict import read_stacks
from clap_ds.record.directory import RunDirectory
from clap_ds.record.lock import FolderLock
from clap_ds.record.stream import Stream
from clap_ds.weights.checkpoint_files import newest_good
from clap_ds.weights.load import load_weights
from tests.weights.fake_checkpoints import make_checkpoint


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 200 * 10**9)


BOMBS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "zeros without end": lambda path: path.symlink_to("/dev/zero"),
    "200 GB": _sparse,
    "brackets": lambda path: path.write_text("[" * 10**6),
    "a number": lambda path: path.write_text('{"step": ' + "9" * 5000 + "}"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00" * 99),
    "a folder": Path.mkdir,
}
READERS: dict[str, Callable[[Path], object]] = {
    **{f"{name}.json": read_record for name in ("summary", "config", "environment")},
    "metrics.jsonl": lambda folder: (read_record(folder), Stream(folder / "metrics.jsonl").forget_after(5)),
    "run.json": lambda folder: load_run(folder / "run.json"),
    "manifest.json": lambda folder: read_manifest(str(folder)),
    "step-00000001/manifest.json": newest_good,
    "step-00000001/weights.safetensors": lambda folder: (newest_good(folder), load_weights(folder / "step-00000001")),
    "errors/rank0.json": read_words,
    "stacks/rank0.txt": read_stacks,
    "writer.json": lambda folder: FolderLock(folder).check(),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_readers_end(tmp_path: Path, name: str, bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    RunDirectory(tmp_path).write_json("summary.json", {"state": "completed"})
    make_checkpoint(tmp_path, 1)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    BOMBS[bomb](path)
    with suppress(UserError, ValueError, OSError):  # which every command tells in one line
        READERS[name](tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB
