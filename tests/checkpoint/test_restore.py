"""A run finds its checkpoints after its data or initial weights have moved, and names others of its
name."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from clap_ds.checkpoint.restore import describe_run, find_checkpoint_folder
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, write_manifest
from tests.data.tars import marked_tars
from tests.weights.fake_checkpoints import make_checkpoint

WriteRun = Callable[..., Path]
SETTINGS: dict[str, Any] = {"source": "webdataset", "tokenizer": "x"}


@pytest.fixture
def open_run(write_run: WriteRun) -> Callable[..., RunSettings]:
    """Return a function that reads a run on shards."""

    def read(shards: Any, seed: int = 0, **train: Any) -> RunSettings:
        return load_run(
            write_run(clap={"data": {**SETTINGS, "shards": shards}, "seed": seed, "train": train})
        )

    return read


def save(run: RunSettings, step: int = 5) -> Path:
    """Return the folder of a run's checkpoints with a new one."""
    config = describe_run(run)
    folder = find_checkpoint_folder(run, config)
    make_checkpoint(folder, step, settings=config)
    return folder


def find(run: RunSettings) -> Path:
    return find_checkpoint_folder(run, describe_run(run))


def move(shards: Path, to: Path) -> str:
    shards.rename(to)
    return f"{to}/*.tar"


def copy_to_memory(shards: Path, to: Path) -> str:
    files = fsspec.filesystem("memory")
    for tar in shards.glob("*.tar"):
        files.pipe_file(f"/{to.name}/{tar.name}", tar.read_bytes())
    return f"memory://{to.name}/*.tar"


def link_each(shards: Path, to: Path) -> str:
    to.mkdir()
    for tar in shards.glob("*.tar"):
        (to / tar.name).symlink_to(tar)
    return f"{to}/*.tar"


def replace_by_link(shards: Path, to: Path) -> str:
    shards.rename(to)
    shards.symlink_to(to)
    return f"{shards}/*.tar"


@pytest.mark.parametrize(
    "respell",
    [
        move,
        copy_to_memory,
        link_each,
        replace_by_link,
        lambda shards, to: f"{shutil.copytree(shards, to)}/00?.tar",
        lambda shards, to: f"{shards}/{{002,001,000}}.tar",
        lambda shards, to: [f"{shards}/000.tar", f"{shards}/00[12].tar"],
        lambda shards, to: {f"{shards}/000.tar": 1.0, f"{shards}/00[12].tar": 1.0},
        lambda shards, to: f"{os.path.relpath(shards)}//*.tar",
        lambda shards, to: f"file://{shards}/*.tar",
    ],
)
def test_checkpoints_of_data_that_moved_or_is_spelled_otherwise_are_found(
    respell: Callable[[Path, Path], Any],
    open_run: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = open_run(marked_tars(tmp_path / "shards", 3, 4))
    folder = save(run)
    assert folder == run.checkpoint_folder
    moved = open_run(respell(tmp_path / "shards", tmp_path / f"{tmp_path.name}_moved"))
    assert find(moved) == folder
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "sizes", [(3, 4, 50), (3, 5, 0), (4, 4, 0)], ids=["other", "more samples", "more tars"]
)
def test_other_contents_at_the_same_path_are_another_run(
    sizes: tuple[int, int, int], open_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their number, names and sizes may be the same, and a manifest may be older."""
    pattern = f"{tmp_path}/shards/*.tar"
    marked_tars(tmp_path / "shards", 3, 4)
    write_manifest(tmp_path / "shards", ShardManifest({"000.tar": ShardRecord(4, 0, 0.0, "")}))
    first = save(open_run(pattern))
    marked_tars(tmp_path / "shards", *sizes)
    second = save(open_run(pattern), step=2)
    assert second != first
    output = capsys.readouterr().out
    assert (
        f"--set clap.checkpoint.folder={first} (step 5; clap.contents.data.shards: '3 file(s)"
        in output
    )
    assert find(open_run(pattern)) == find(open_run(f"{tmp_path}/shards/00[0-9].tar")) == second
    shutil.rmtree(tmp_path / "shards")
    assert find(open_run(marked_tars(tmp_path / "shards", 3, 4))) == first


def test_checkpoints_of_a_name_with_brackets_are_found(write_run: WriteRun, tmp_path: Path) -> None:
    def read(shards: str) -> RunSettings:
        clap = {
            "data": {**SETTINGS, "shards": shards},
            "output": {"dir": str(tmp_path), "run_name": "lr[1e-3]"},
        }
        return load_run(write_run(clap=clap))

    folder = save(read(marked_tars(tmp_path / "shards", 3, 4)))
    assert find(read(move(tmp_path / "shards", tmp_path / "moved"))) == folder


def test_a_new_run_names_another_whose_checkpoints_are_unreadable(
    open_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(open_run(marked_tars(tmp_path / "shards", 3, 4)))
    for manifest in folder.glob("*/manifest.json"):
        manifest.write_text("")
    assert find(open_run(move(tmp_path / "shards", tmp_path / "moved"))) != folder
    assert f"--set clap.checkpoint.folder={folder} (none of" in capsys.readouterr().out


def test_a_new_run_names_others_of_its_name(
    open_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = marked_tars(tmp_path / "shards", 2, 2)
    first = save(open_run(pattern))
    longer_name = first.with_name("run-big-0a1b2c3d-checkpoints")
    make_checkpoint(longer_name, 9)
    other = find(open_run(pattern, seed=1))
    output = capsys.readouterr().out
    assert other != first
    assert f"{other} is new" in output
    assert f"--set clap.checkpoint.folder={first} (step 5; clap.seed: 0 there, 1 here)" in output
    assert longer_name.name not in output
    chosen = load_run(open_run(pattern, seed=1).path, 1, [f"clap.checkpoint.folder={first}"])
    assert find(chosen) == first
    assert capsys.readouterr().out == ""


def test_checkpoints_of_earlier_versions_without_contents_are_found_at_their_path(
    open_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = marked_tars(tmp_path / "shards", 2, 2)
    run = open_run(pattern)
    make_checkpoint(run.checkpoint_folder, 5, settings=run.resolved())
    assert find(open_run(pattern)) == run.checkpoint_folder
    assert find(open_run(move(tmp_path / "shards", tmp_path / "moved"))) != run.checkpoint_folder
    assert f"clap.data.shards: '{pattern}' there" in capsys.readouterr().out


def test_initial_weights_count_by_content(open_run: Any, tmp_path: Path) -> None:
    pattern = marked_tars(tmp_path / "shards", 2, 2)
    for name, content in (("a", b"one"), ("b", b"two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").write_bytes(content)

    def find_from(path: Path) -> Path:
        return find(open_run(pattern, pretrained=str(path)))

    for file in ("", "weights.safetensors"):
        first = save(open_run(pattern, pretrained=f"{tmp_path}/a/{file}"))
        shutil.copytree(tmp_path / "a", tmp_path / "copies" / "a", dirs_exist_ok=True)
        assert (
            find_from(tmp_path / "copies" / "a" / file) == find_from(tmp_path / "a" / file) == first
        )
        assert find_from(tmp_path / "b" / file) != first
        (tmp_path / "copies" / "a" / "weights.safetensors").write_bytes(b"two")
        assert find_from(tmp_path / "copies" / "a" / file) != first
    assert find(open_run(pattern, pretrained="laion/clap-htsat-unfused")) != first


def test_missing_data_and_weights_are_reported_at_once(open_run: Any, tmp_path: Path) -> None:
    run = open_run(f"{tmp_path}/none-*.tar", pretrained=f"{tmp_path}/none.pt")
    with pytest.raises(ValueError, match=r"clap\.data\.shards: no file matches") as refusal:
        describe_run(run)
    assert "clap.train.pretrained: " in str(refusal.value)
