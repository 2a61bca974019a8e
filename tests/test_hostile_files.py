"""Files that colleagues could put where they are read: each command ends by itself, with a message or without the file."""

import json
import os
import resource
import tarfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from clap_ds.analysis.record import read_record
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.data.shard_making.audio_files import find_same
from clap_ds.data.shard_making.caption_lists import read_entries
from clap_ds.data.shard_manifest import read_manifest
from clap_ds.data.tar_items import list_items
from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import load_tokenizer
from clap_ds.native import library
from clap_ds.ranks.failure import read_words
from clap_ds.ranks.verdict import read_stacks
from clap_ds.record.directory import RunDirectory
from clap_ds.record.lock import FolderLock, HeldError
from clap_ds.record.stream import Stream
from clap_ds.training.schedule import TrainingProgress
from clap_ds.weights.checkpoint_files import newest_good
from clap_ds.weights.load import load_weights
from tests.weights.fake_checkpoints import checkpoint_of, make_checkpoint


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 200 * 10**9)


OPTIONS = Namespace(encoding=None, caption_columns=None, list_column=[])


def _built(source: Path) -> None:
    (source / "a.json").write_text('{"caption": "a"}')
    find_same(read_entries(source, OPTIONS), 1, None)


def _described(source: Path) -> None:
    (source / "b.wav").touch()
    assert "can't be read" in str(read_entries(source, OPTIONS)[0].problem)


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
    "shard.tar": lambda folder: list(list_items(str(folder / "shard.tar"), print)),
    "native.so": lambda folder: library._opened(folder / "native.so"),
    "tokenizer/tokenizer.json": lambda folder: load_tokenizer(str(folder / "tokenizer"), vocab_size=512),
    "source/a.wav": lambda folder: _built(folder / "source"),
    "source/a.txt": lambda folder: _built(folder / "source"),
    "source/b.json": lambda folder: _described(folder / "source"),
    "list.jsonl": lambda folder: read_entries(folder / "list.jsonl", OPTIONS),
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


@pytest.mark.parametrize("clap", ["text", {"loss": []}, {"text_tokens": "many"}])
def test_settings_of_other_kinds(tmp_path: Path, clap: object) -> None:
    model = ClapModel(load_preset("micro"))
    with pytest.raises(ValueError, match=r"settings|can't be read|int"):
        load_weights(checkpoint_of(model, tmp_path, settings={"clap": clap}))


def test_labels_in_their_millions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "clap", "num_labels": 1000000000, "audio_config": {"depths": 5}}'
    )
    with pytest.raises(ValueError, match=r"config\.json: audio\.depths: expected a valid list"):
        load_weights(tmp_path)


@pytest.mark.parametrize("told", [{}, {"pid": []}, {"pid": "../x"}, {"job": [], "pid": 0, "started": 1}])
def test_holders_of_other_kinds(tmp_path: Path, told: dict[str, object]) -> None:
    lock = FolderLock(tmp_path)
    (tmp_path / "writer.json").write_text(json.dumps(lock._own | {"token": "t"} | told))
    with suppress(HeldError):
        lock.acquire()
    lock.release()


def test_links_are_not_written_through(tmp_path: Path) -> None:
    for name in ("writer.json", "history.jsonl"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    Stream(tmp_path / "history.jsonl").append({"step": 1})
    with pytest.raises(HeldError, match="delete"):
        FolderLock(tmp_path).acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_a_chain_of_gnu_sparse_headers_without_end(tmp_path: Path) -> None:
    header, said = tarfile.TarInfo("0.flac"), dict[str, str]()
    header.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    block[482], block[148:156] = 1, b" " * 8  # goes on in the next block; the checksum counts as blanks
    block[148:156] = b"%06o\0 " % sum(block[:512])
    (tmp_path / "a.tar").write_bytes(block + bytes([*[0] * 504, 1, *[0] * 7]) * 3)
    assert list(list_items(str(tmp_path / "a.tar"), said.__setitem__)) == []
    assert "can't be read" in said[str(tmp_path / "a.tar")]


def test_progress_of_another_kind() -> None:
    with pytest.raises(ValueError, match="step"):
        TrainingProgress.from_json(TrainingProgress().to_json().replace('"step": 0', '"step": "many"'))
