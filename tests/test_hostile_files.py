"""Malicious files in shared folders: every command ends, reports or skips the file, and never
writes or deletes elsewhere."""

import os
import resource
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clap_ds import shards
from clap_ds.analysis import extrapolate, plot_scaling, report, scaling
from clap_ds.analysis.read_run import read_record
from clap_ds.analysis.runs import read_runs
from clap_ds.checkpoint.checkpoint_files import clear_leftovers, newest_good
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.remote import RemoteFolder, try_target
from clap_ds.config.model import load_preset
from clap_ds.config.schema import CheckpointSettings
from clap_ds.config.settings import load_run
from clap_ds.data.build_shards.build import as_it_is, identify_audio, members_of
from clap_ds.data.build_shards.caption_lists import audio_files_in, read_entries, read_paths
from clap_ds.data.shard_manifest import describe_contents, list_items, read_manifest
from clap_ds.distributed import error_file
from clap_ds.distributed.watchdog import Watchdog
from clap_ds.inference.vectors import read_table
from clap_ds.launch import slurm_hostfile
from clap_ds.launch.attempt import read_summary
from clap_ds.metrics.tensorboard import Scalars
from clap_ds.run_records.lock import FolderLock
from clap_ds.run_records.run_dir import JsonlWriter, RunDirectory, start_log
from clap_ds.utils import csv_text
from clap_ds.utils.errors import UserError
from clap_ds.utils.files import show_results
from clap_ds.weights.hub import load_tokenizer
from examples.synthetic_sounds import __main__ as synthetic_sounds
from tests.analysis.samples import DATA, TINY, given
from tests.data import builds
from tests.weights.fake_checkpoints import make_checkpoint

BOMBS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "200 GB": lambda path: (path.touch(), os.truncate(path, 200 * 10**9)),
    "brackets": lambda path: path.write_text("[" * 10**6),
}
BUILD = Namespace(
    audio_column=None,
    caption_columns=None,
    multilabel_column=[],
    audio_root=None,
    follow_links=False,
)


def build_from(path: Path) -> None:
    """Pack a sound and its caption, one of which is this file."""
    other = path.with_suffix(".txt" if path.suffix == ".wav" else ".wav")
    other.write_text("a caption")
    (entry,) = read_entries(path.parent, BUILD)
    identify_audio(9, entry)
    list(members_of([(0, entry)], as_it_is, []))


def download(folder: Path) -> object:
    return RemoteFolder(str(folder)).download_newest(folder / "new", {})


READERS: dict[str, Callable[[Path], object]] = {
    "summary.json": lambda path: read_record(path.parent),
    "run.log": lambda path: read_runs([path], given(nodes=1, gpus=1)),
    "table.csv": lambda path: read_runs([path], given()),
    "list.jsonl": read_paths,
    "metrics.jsonl": lambda path: read_record(path.parent),
    "run.json": load_run,
    "manifest.json": lambda path: read_manifest(str(path.parent)),
    "initial.safetensors": lambda path: describe_contents([str(path)]),
    "shard.tar": lambda path: list(list_items(str(path), print)),
    "tokenizer/tokenizer.json": lambda path: load_tokenizer(str(path.parent), vocab_size=512),
    "step-00000001/manifest.json": lambda path: newest_good(path.parents[1]),
    "vectors.parquet": read_table,
    "clap.pt": load_weights,
    "hf/config.json": lambda path: load_weights(path.parent),
    "local/open_clip_model.safetensors": lambda path: load_weights(path.parent),
    "preset.json": lambda path: load_preset(str(path)),
    "list.csv": lambda path: read_entries(path, BUILD),
    "list.json": read_paths,
    "sounds/a.txt": build_from,
    "sounds/a.json": build_from,
    "sounds/a.wav": build_from,
    "step-00000001/weights.safetensors": lambda path: (
        newest_good(path.parents[1]),
        load_weights(path.parent),
    ),
    "step-00000001/state.safetensors": lambda path: RemoteFolder(
        str(path.parents[1])
    ).download_newest(path.parents[1] / "new", {}),
    "run_directory": lambda path: read_summary(path.parent),
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
    with suppress(UserError, ValueError, OSError):  # reported by every command in one line
        READERS[name](path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB


@pytest.fixture
def deep_folder(tmp_path: Path) -> Iterator[Path]:
    """A leftover of a checkpoint, with folders nested more deeply than the walkers of Python 3.11
    can follow."""
    folder = os.open(tmp_path, os.O_RDONLY)
    for name in (".step-00000001.partial", *"d" * 1500):
        os.mkdir(name, dir_fd=folder)
        outer = folder
        folder = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(outer)
    os.close(folder)
    yield tmp_path / ".step-00000001.partial"
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # which pytest can't


def test_folders_nested_deeply_are_named_and_no_start_fails(deep_folder: Path) -> None:
    for read in (audio_files_in, lambda path: read_runs([path], given())):
        with pytest.raises((UserError, OSError), match=r"nested|File name too long"):
            read(deep_folder)
    clear_leftovers(deep_folder.parent)


RECORD = DATA / "record_2ranks"
REPORTED = (
    "report.md",
    "report.html",
    "table.csv",
    "scaling.png",
    "breakdown-1.png",
    "projection-1.png",
)
SHARDS = (
    "train-00000.tar",
    "manifest.json",
    "broken.jsonl",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
)
PREPARED = (*SHARDS[:4], ".build/plan")
WRITERS: dict[str | tuple[str, ...], Callable[[Path], object]] = {
    "metrics.jsonl": lambda run: JsonlWriter(run / "metrics.jsonl").append({"step": 1}),
    "config.json": lambda run: RunDirectory(run).write_json("config.json", {}),
    "summary.json": lambda run: RunDirectory(run).update_summary(state="running"),
    "writer.json": lambda run: FolderLock(run).acquire(),
    "rank0.log": lambda run: start_log(run / "rank0.log"),
    "errors": lambda run: error_file.write_error_file("error", "message", 1),
    "stacks": lambda run: Watchdog().start(run),
    "tensorboard": lambda run: Scalars(_engine(), run),
    ".probe": lambda folder: try_target(str(folder)),
    ".step-00000001.partial": lambda folder: make_checkpoint(folder, 1),
    "history.jsonl": lambda folder: _remote_folder(folder).download_newest(folder, {}),
    "logs": lambda folder: RemoteFolder(str(folder)).upload_logs([_logs(folder.parent / "logs")]),
    "step-00000002": lambda folder: RemoteFolder(str(folder)).upload(
        _checkpoint(folder), CheckpointSettings()
    ),
    REPORTED: lambda run: report.main([str(RECORD), str(TINY), "--output", str(run)]),
    "scaling.csv": lambda run: scaling.main([str(TINY), "--csv", str(run / "scaling.csv")]),
    ("p.png", "p.pdf", "p.svg"): lambda run: plot_scaling.main(
        [str(TINY), "--output", str(run / "p.png")]
    ),
    "curves.svg": lambda run: plot_scaling.main(
        ["--curves", str(RECORD), "--output", str(run / "curves.svg")]
    ),
    ("e.png", "e.pdf"): lambda run: extrapolate.main([str(TINY), "--output", str(run / "e.png")]),
    "hostfile": lambda run: slurm_hostfile.main(
        ["--nodelist", "n1", "--slots", "1", "--output", str(run / "hostfile")]
    ),
    "results.json": lambda run: show_results(
        "", {}, run / "results.json"
    ),  # of plan, flops and evaluate
    "labels.csv": lambda run: csv_text.write_csv(
        run / "labels.csv", [["a"]]
    ),  # of classify, search and score
    SHARDS: lambda run: build(run),
    ".build": lambda run: build(run),
    "tokenizer": lambda run: build(run),
    PREPARED: lambda run: prepare(run),
    ("sounds-000.tar", "classes.json", "tokenizer/tokenizer.json"): lambda run: (
        synthetic_sounds.main([str(run), "--clips", "2", "--shards", "1", "--seconds", "0.1"])
    ),
}


def build(folder: Path) -> None:
    sounds = folder.with_name("sounds")
    if not sounds.exists():
        sounds.mkdir()
        builds.write_list(sounds, 3)
    builds.run(sounds / "list.csv", folder, "--train_tokenizer", 300)


def prepare(folder: Path) -> None:
    """Prepare shards that have a tokenizer beside them."""
    build(built := folder.with_name("built"))
    shards.main(
        [
            "prepare",
            f"{built}/*.tar",
            str(folder),
            "--kind",
            "waveform",
            "--preset",
            "micro",
            "--workers",
            "1",
        ]
    )


def _remote_folder(folder: Path) -> RemoteFolder:
    remote = _checkpoint(folder).parent
    (remote / "history.jsonl").touch()
    return RemoteFolder(f"file://{remote}")


def _checkpoint(folder: Path) -> Path:
    return make_checkpoint(folder.with_name("there"), 2)


def _logs(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "file").write_text("log")
    return folder


def _engine() -> Any:
    monitor = SimpleNamespace(tb_monitor=None, enabled=True, write_events=print)
    return SimpleNamespace(
        deepspeed=SimpleNamespace(monitor=monitor, global_samples=0), config={"tensorboard": {}}
    )


@pytest.mark.parametrize("names", WRITERS, ids=str)
def test_nothing_is_written_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str | tuple[str, ...]
) -> None:
    """Plant links of each kind, or if a command has several outputs, to a missing file and a file
    in turn."""
    victim = tmp_path / "victim"
    (victim / "folder").mkdir(parents=True)
    (victim / "file").write_text("precious")
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    if isinstance(names, str):
        planted = [{names: target} for target in ("folder", "file", "absent")]
    else:
        planted = [dict(zip(names, cycle(("absent", "file")), strict=False))]
    for number, links in enumerate(planted):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        monkeypatch.setattr(error_file.this_rank, "folder", run / "errors")
        for name, target in links.items():
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).symlink_to(victim / target)
        with suppress(OSError, ValueError):
            WRITERS[names](run)
        assert sorted(path.name for path in victim.rglob("*")) == ["file", "folder"]
        assert (victim / "file").read_text() == "precious"
