"""A run finds its checkpoints, also after its data or initial weights have moved, resumes from
them, and names others of its name."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.resume import (
    describe_run,
    find_checkpoint_folder,
    load_pretrained,
    resume,
)
from clap_ds.checkpoint.train_state import ResumeOptions
from clap_ds.config.model import load_preset
from clap_ds.config.schema import CheckpointSettings
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, write_manifest
from clap_ds.distributed.init import Ranks
from clap_ds.model.clap import ClapModel
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.weights.hub import train_tokenizer
from tests.checkpoint import trained_engines as engines
from tests.data.tars import marked_tars
from tests.training import reference_steps as reference
from tests.weights.fake_checkpoints import checkpoint_of, make_checkpoint, save_safetensors

MICRO = load_preset("micro")
WriteRun = Callable[..., Path]
OpenRun = Callable[..., RunSettings]
SETTINGS: dict[str, Any] = {"source": "webdataset", "tokenizer": "x"}


@pytest.fixture
def open_run(write_run: WriteRun, tmp_path: Path) -> OpenRun:
    """Return a function that reads a run on shards."""
    # A pattern of file names would match the brackets otherwise.
    output = {"dir": str(tmp_path), "run_name": "lr[1e-3]"}

    def read(shards: Any, seed: int = 0, **train: Any) -> RunSettings:
        data = {**SETTINGS, "shards": shards}
        return load_run(
            write_run(clap={"data": data, "seed": seed, "train": train, "output": output})
        )

    return read


def find_folder(run: RunSettings) -> Path:
    return find_checkpoint_folder(run, describe_run(run))


def save(run: RunSettings, step: int = 5) -> Path:
    """Add a checkpoint to a run's folder, and return the folder."""
    folder = find_folder(run)
    make_checkpoint(folder, step, settings=describe_run(run))
    return folder


def move(shards: Path, target: Path) -> str:
    shards.rename(target)
    return f"{target}/*.tar"


def copy_to_memory(shards: Path, target: Path) -> str:
    files = fsspec.filesystem("memory")
    for tar in shards.glob("*.tar"):
        files.pipe_file(f"/{target.name}/{tar.name}", tar.read_bytes())
    return f"memory://{target.name}/*.tar"


@pytest.mark.parametrize(
    "respell",
    [
        move,
        copy_to_memory,
        lambda shards, _: f"{shards}/{{002,001,000}}.tar",
        lambda shards, _: {f"{shards}/000.tar": 1.0, f"{shards}/00[12].tar": 1.0},
    ],
)
def test_run_with_moved_data_finds_checkpoints(respell, open_run, tmp_path, capsys):
    run = open_run(marked_tars(tmp_path / "shards", 3, 4))
    folder = save(run)
    assert folder == run.checkpoint_folder
    # Files in memory are shared by all tests.
    shards = respell(tmp_path / "shards", tmp_path / f"{tmp_path.name}_moved")
    assert find_folder(open_run(shards)) == folder
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("sizes", [(3, 4, 50), (4, 4, 0)], ids=["other", "more tars"])
def test_other_contents_at_same_path_are_another_run(sizes, open_run, tmp_path, capsys):
    """Their number, names and sizes may be the same, and a manifest may be older."""
    pattern = f"{tmp_path}/shards/*.tar"
    marked_tars(tmp_path / "shards", 3, 4)
    write_manifest(tmp_path / "shards", ShardManifest({"000.tar": ShardRecord(4, 0, 0.0, "")}))
    first = save(open_run(pattern))
    marked_tars(tmp_path / "shards", *sizes)
    second = save(open_run(pattern), step=2)
    assert second != first
    message = f"--set clap.checkpoint.folder={first} (step 5; clap.contents.data.shards: '3 file(s)"
    assert message in capsys.readouterr().out
    assert find_folder(open_run(pattern)) == second
    shutil.rmtree(tmp_path / "shards")
    assert find_folder(open_run(marked_tars(tmp_path / "shards", 3, 4))) == first


def test_new_run_prints_runs_of_same_name(open_run, tmp_path, capsys):
    pattern = marked_tars(tmp_path / "shards", 2, 2)
    first = save(open_run(pattern))
    longer_name = first.with_name("lr[1e-3]-big-0a1b2c3d-checkpoints")
    make_checkpoint(longer_name, 9)
    other = find_folder(open_run(pattern, seed=1))
    output = capsys.readouterr().out
    assert other != first
    assert f"{other} is new" in output
    assert f"--set clap.checkpoint.folder={first} (step 5; clap.seed: 0 there, 1 here)" in output
    assert longer_name.name not in output
    for manifest in first.glob("*/manifest.json"):
        manifest.write_text("")
    find_folder(open_run(pattern, seed=1))
    assert f"--set clap.checkpoint.folder={first} (none of" in capsys.readouterr().out


def test_checkpoints_of_earlier_versions_without_contents_are_found(open_run, tmp_path):
    run = open_run(marked_tars(tmp_path / "shards", 2, 2))
    make_checkpoint(run.checkpoint_folder, 5, settings=run.resolved())
    assert find_folder(run) == run.checkpoint_folder


@pytest.mark.parametrize("file", ["", "weights.safetensors"])
def test_initial_weights_are_identified_by_content(open_run, tmp_path, file):
    pattern = marked_tars(tmp_path / "shards", 2, 2)
    for folder in ("a", "copies/a"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "weights.safetensors").write_bytes(b"one")

    def open_with(path: Path | str) -> RunSettings:
        return open_run(pattern, pretrained=str(path))

    first = save(open_with(tmp_path / "a" / file))
    assert find_folder(open_with(tmp_path / "copies" / "a" / file)) == first
    (tmp_path / "copies" / "a" / "weights.safetensors").write_bytes(b"two")
    assert find_folder(open_with(tmp_path / "copies" / "a" / file)) != first
    assert find_folder(open_with("laion/clap-htsat-unfused")) != first


def test_missing_data_and_weights_are_reported_at_once(open_run, tmp_path):
    run = open_run(f"{tmp_path}/none-*.tar", pretrained=f"{tmp_path}/none.pt")
    with pytest.raises(ValueError, match=r"(?s)data\.shards: no file .*train\.pretrained: "):
        describe_run(run)


def test_default_folder_keeps_name():
    """If the name differed between versions, `resume: auto` would find no checkpoint and start from
    scratch."""
    run = reference.settings(train={"max_samples": 8, "freeze": ["text"]})
    assert run.checkpoint_folder.name.endswith("-7fc3ca81-checkpoints")


def pretrained_model(
    path: Path, tokenizer: str | None = None, preset: str = "micro", **options: Any
) -> ClapModel:
    model = ClapModel(load_preset(preset))
    load_pretrained(str(path), model, tokenizer, ResumeOptions(**options))
    return model


def test_pretrained_weights_of_same_model_are_loaded(tmp_path):
    torch.manual_seed(9)
    model = ClapModel(MICRO)
    path = tmp_path / "weights.safetensors"
    save_safetensors(model, path)
    state = pretrained_model(path).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"clap\.train\.pretrained: .* contains model micro"):
        pretrained_model(path, preset="demo")


def test_pretrained_weights_need_their_tokenizer(tmp_path):
    for name, caption in (("one", "a dog barks"), ("other", "rain on a roof")):
        train_tokenizer([caption] * 3, tmp_path / name, vocab_size=280)
    checkpoint = checkpoint_of(ClapModel(MICRO), tmp_path / "saved", tokenizer=tmp_path / "one")
    other = str(tmp_path / "other")
    pretrained_model(checkpoint, str(tmp_path / "one"))
    pretrained_model(checkpoint, other, resume_weights_only=True)
    with pytest.raises(ValueError, match=r"pretrained: .*Set clap\.data\.tokenizer to"):
        pretrained_model(checkpoint, other)


def start_repeatedly(
    folder: str, jobs: list[str], options: ResumeOptions, source: str
) -> list[int]:
    """Start one command once per job attempt, in a folder with step 5 of another run. Each start
    saves one more step. Return the steps at which they begin."""
    engine = engines.trained_engine()
    other_run = Checkpointer(folder)
    other_run.run_id = "theirs"
    other_run.save(engine, engines.progress(5))
    settings = CheckpointSettings(keep_last=9)
    steps = []
    for job in jobs:
        attempt = Path(job) if job else None
        ranks = Ranks(0, 1, 0, 1, job_folder=attempt)
        lock_owner = attempt.parent if attempt else None
        with (
            tempfile.TemporaryDirectory() as logs,
            Checkpointer(folder, settings, job=lock_owner) as checkpointer,
        ):
            record = RunDirectory(Path(logs))
            state = resume(checkpointer, engine, source.format(folder), options, ranks, record)
            steps.append(state.step)
            assert checkpointer.save(engine, engines.progress(state.step + 1))[0].saved
    return steps


@pytest.mark.parametrize(
    ("options", "source", "jobs", "expected"),
    [
        # The first attempt of each job starts over.
        (ResumeOptions(restart=True), "auto", ["7.ab/0", "7.ab/1", "8.cd/0"], [0, 1, 0]),
        # Only the very first start takes the path.
        (ResumeOptions(), "{}/step-00000005", ["7.ab/0", "8.cd/0", ""], [5, 6, 7]),
        (ResumeOptions(), "auto", ["", ""], [5, 6]),
    ],
    ids=["restart", "path", "auto"],
)
def test_repeated_command_takes_options_for_the_beginning_once(
    one_rank, tmp_path, options, source, jobs, expected
):
    steps = one_rank.run(start_repeatedly, str(tmp_path / "checkpoints"), jobs, options, source)
    assert steps == [expected]
