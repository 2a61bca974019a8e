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
from clap_ds.data.tar_items import list_items
from clap_ds.model.tokenizer import load_tokenizer
from clap_ds.weights.checkpoint_files import newest_good
from clap_ds.weights.load import load_weights
from tests.weights.fake_checkpoints import make_checkpoint

BOMBS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "200 GB": lambda path: (path.touch(), os.truncate(path, 200 * 10**9)),
    "brackets": lambda path: path.write_text("[" * 10**6),
}
READERS: dict[str, Callable[[Path], object]] = {
    "summary.json": read_record,
    "metrics.jsonl": read_record,
    "run.json": lambda folder: load_run(folder / "run.json"),
    "manifest.json": lambda folder: read_manifest(str(folder)),
    "shard.tar": lambda folder: list(list_items(str(folder / "shard.tar"), print)),
    "tokenizer/tokenizer.json": lambda folder: load_tokenizer(str(folder / "tokenizer"), vocab_size=512),
    "step-00000001/manifest.json": newest_good,
    "step-00000001/weights.safetensors": lambda folder: (newest_good(folder), load_weights(folder / "step-00000001")),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_readers_end(tmp_path: Path, name: str, bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    make_checkpoint(tmp_path, 1)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    BOMBS[bomb](path)
    with suppress(UserError, ValueError, OSError):  # which every command tells in one line
        READERS[name](tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB
