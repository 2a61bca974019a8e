"""Hostile files in shared folders, against the promises of `SECURITY.md`.

Every command ends, reports or skips the file, and never writes or deletes elsewhere.
"""

import os
import resource
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clap_ds.analysis import report, scaling
from clap_ds.analysis.read_run import read_record
from clap_ds.analysis.runs import read_runs
from clap_ds.checkpoint.checkpoint_files import clear_leftovers, latest_valid
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.remote import RemoteFolder
from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.data.build_shards.build import identify_audio, keep_file, members_of
from clap_ds.data.build_shards.caption_lists import audio_files_in, read_entries, read_paths
from clap_ds.data.shard_manifest import describe_contents, list_items, read_manifest
from clap_ds.distributed import error_file
from clap_ds.distributed.watchdog import Watchdog
from clap_ds.engine.deepspeed_compat import defer_monitor_events
from clap_ds.inference.vectors import read_table
from clap_ds.launch import slurm_hostfile
from clap_ds.launch.attempt import read_summary
from clap_ds.metrics.tensorboard import Scalars
from clap_ds.run_records.lock import FolderLock
from clap_ds.run_records.run_dir import JsonlWriter, RunDirectory, start_log
from clap_ds.utils.errors import UserError
from clap_ds.utils.files import show_results
from clap_ds.weights.hub import load_tokenizer
from tests.analysis.samples import DATA, TINY, make_options
from tests.data import builds
from tests.weights.fake_checkpoints import make_checkpoint

BOMBS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "200 GB": lambda path: (path.touch(), os.truncate(path, 200 * 10**9)),
    "brackets": lambda path: path.write_text("[" * 10**6),
}
MOST_MEMORY_KB = 500_000
BUILD_OPTIONS = Namespace(
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
    (entry,) = read_entries(path.parent, BUILD_OPTIONS)
    identify_audio(9, entry)
    list(members_of([(0, entry)], "", keep_file, lambda: None, []))


def download(checkpoints: Path) -> None:
    RemoteFolder(str(checkpoints)).download_newest(checkpoints / "new", {})


# path in a folder of others → the command's reader of it
READERS: dict[str, Callable[[Path], object]] = {
    # analysis
    "summary.json": lambda path: read_record(path.parent),
    "run.log": lambda path: read_runs([path], make_options(nodes=1, gpus=1)),
    "table.csv": lambda path: read_runs([path], make_options()),
    "run_directory": lambda path: read_summary(path.parent),
    # shards, and what they are built from
    "manifest.json": lambda path: read_manifest(str(path.parent)),
    "shard.tar": lambda path: list(list_items(str(path), print)),
    "list.jsonl": read_paths,
    "list.csv": lambda path: read_entries(path, BUILD_OPTIONS),
    "sounds/a.txt": build_from,
    "sounds/a.json": build_from,
    "sounds/a.wav": build_from,
    # configurations, models and tokenizers
    "run.json": load_run,
    "preset.json": lambda path: load_preset(str(path)),
    "clap.pt": load_weights,
    "hf/config.json": lambda path: load_weights(path.parent),
    "local/open_clip_model.safetensors": lambda path: load_weights(path.parent),
    "initial.safetensors": lambda path: describe_contents([str(path)]),
    "tokenizer/tokenizer.json": lambda path: load_tokenizer(str(path.parent), vocab_size=512),
    "vectors.parquet": read_table,
    # checkpoints
    "step-00000001/manifest.json": lambda path: latest_valid(path.parents[1]),
    "step-00000001/weights.safetensors": lambda path: load_weights(path.parent),
    "step-00000001/state.safetensors": lambda path: download(path.parents[1]),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_reader_of_hostile_file_ends_in_bounded_memory(tmp_path, name, bomb):
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    make_checkpoint(tmp_path, 1)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    BOMBS[bomb](path)
    # Every command reports these in one line.
    with suppress(UserError, ValueError, OSError):
        READERS[name](path)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak_kb - before_kb < MOST_MEMORY_KB


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
    # pytest can't delete it.
    subprocess.run(["rm", "-rf", tmp_path], check=True)


def test_deeply_nested_folder_is_refused_by_readers_and_fails_no_start(deep_folder):
    for read in (audio_files_in, lambda path: read_runs([path], make_options())):
        with pytest.raises((UserError, OSError), match=r"nested|File name too long"):
            read(deep_folder)
    clear_leftovers(deep_folder.parent)


RECORD = DATA / "record_2ranks"
TOKENIZER = "tokenizer/tokenizer.json"
# files in a folder of others → writer of them; uploads: see tests/data/test_remote_files.py
WRITERS: dict[tuple[str, ...], Callable[[Path], object]] = {
    # a run
    ("metrics.jsonl",): lambda run: JsonlWriter(run / "metrics.jsonl").append({"step": 1}),
    ("summary.json",): lambda run: RunDirectory(run).update_summary(state="running"),
    ("writer.json",): lambda run: FolderLock(run).acquire(),
    ("rank0.log",): lambda run: start_log(run / "rank0.log"),
    ("errors",): lambda run: error_file.write_error_file("error", "message", 1),
    ("stacks",): lambda run: Watchdog().start(run),
    ("tensorboard",): lambda run: write_scalars(run),
    ("hostfile",): lambda run: slurm_hostfile.main(
        ["--nodelist", "n1", "--slots", "1", "--output", str(run / "hostfile")]
    ),
    # checkpoints
    (".step-00000001.partial",): lambda folder: make_checkpoint(folder, 1),
    ("history.jsonl",): lambda folder: download_history(folder),
    # analysis
    (
        "report.md", "report.html", "table.csv", "scaling.png", "breakdown-2.png", "projection-1.png",
    ): lambda run: report.main([str(RECORD), str(TINY), "--output", str(run)]),
    ("scaling.csv",): lambda run: scaling.main([str(TINY), "--csv", str(run / "scaling.csv")]),
    # results of plan, flops and evaluate
    ("results.json",): lambda run: show_results("", {}, run / "results.json"),
    # shards
    (
        "train-00000.tar", "manifest.json", "broken.jsonl", TOKENIZER, "tokenizer/tokenizer_config.json",
    ): lambda run: build(run),
    (".build",): lambda run: build(run),
    ("tokenizer",): lambda run: build(run),
}  # fmt: skip


def build(folder: Path) -> None:
    sounds = folder.with_name("sounds")
    if not sounds.exists():
        sounds.mkdir()
        builds.write_list(sounds, 3)
    builds.run(sounds / "list.csv", folder, "--train_tokenizer", 300)


def write_scalars(run: Path) -> None:
    monitor = SimpleNamespace(tb_monitor=None, enabled=True, write_events=print)
    deepspeed = SimpleNamespace(monitor=monitor, global_samples=0)
    engine: Any = SimpleNamespace(
        deepspeed=deepspeed,
        config={"tensorboard": {}},
        defer_monitor_events=partial(defer_monitor_events, deepspeed),
    )
    Scalars(engine, run)


def download_history(folder: Path) -> None:
    remote = make_checkpoint(folder.with_name("remote"), 2).parent
    (remote / "history.jsonl").touch()
    RemoteFolder(f"file://{remote}").download_newest(folder, {})


@pytest.mark.parametrize("names", WRITERS, ids=" ".join)
def test_writer_follows_no_planted_link(tmp_path, monkeypatch, names):
    victim = tmp_path / "victim"
    (victim / "folder").mkdir(parents=True)
    (victim / "file").write_text("precious")
    # `start_log` replaces these.
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    for trial, target in enumerate(("folder", "file", "absent")):
        folder = tmp_path / f"trial-{trial}"
        folder.mkdir()
        monkeypatch.setattr(error_file.this_rank, "folder", folder / "errors")
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(victim / target)
        with suppress(OSError, ValueError):
            WRITERS[names](folder)
        assert sorted(path.name for path in victim.rglob("*")) == ["file", "folder"]
        assert (victim / "file").read_text() == "precious"
