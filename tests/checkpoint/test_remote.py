"""Remote copies are complete or absent, cause warnings if they fail, and never stop training."""

import uuid
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clap_ds.checkpoint import checkpoint_files, remote
from clap_ds.checkpoint.remote import BackgroundSync, RemoteFolder
from clap_ds.config.schema import CheckpointSettings
from tests.weights.fake_checkpoints import make_checkpoint


class Unreliable(MemoryFileSystem):
    """A memory file system whose uploads fail as listed in `faults`."""

    protocol = "unreliable"
    faults: ClassVar[list[bool]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("unreliable://", "memory://"))

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        if self.faults and self.faults.pop(0):
            raise ConnectionError("the network is down")
        super().put_file(lpath, rpath, *args, **kwargs)


@pytest.fixture
def url() -> str:
    """Return the URL of a folder that doesn't exist on that file system yet."""
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    Unreliable.faults.clear()
    return f"unreliable://{uuid.uuid4().hex}/deep"


def copy(url: str, *checkpoints: Path, keep_last: int = 3, minutes: float = 0.0) -> list[Path]:
    """Copy checkpoints and return those that failed."""
    rule = CheckpointSettings(keep_last=keep_last, keep_best=0, remote_sync_every_minutes=minutes)
    sync = BackgroundSync(
        url, rule, checkpoints[0].parent, checkpoints[0].parent / "runs" / "run-1"
    )
    for checkpoint in checkpoints:
        sync.submit(checkpoint)
    return sync.close(30)


def names(url: str) -> list[str]:
    return sorted(path.rsplit("/", 1)[1] for path in fsspec.url_to_fs(url)[0].ls(url, detail=False))


def test_there_and_back_is_the_same(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RemoteFolder(url).download_newest(tmp_path / "new", {}) is None
    saved = [make_checkpoint(tmp_path / "here", step) for step in (1, 2)]
    assert copy(url, *saved) == []
    back = RemoteFolder(url).download_newest(tmp_path / "new", {})
    assert back == tmp_path / "new" / "step-00000002"
    for name in checkpoint_files.verify(back).files:
        assert (back / name).read_bytes() == (saved[1] / name).read_bytes()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-00000002"]
    assert capsys.readouterr().err == ""


def test_logs_go_with_checkpoints_and_history_comes_back(url: str, tmp_path: Path) -> None:
    saved = [make_checkpoint(tmp_path / "here", step) for step in (1, 2, 3)]
    for name in ("history.jsonl", "tensorboard/events", "runs/run-1/errors/rank0.json"):
        (path := tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert copy(url, *saved, minutes=60.0) == []
    assert names(url) == ["history.jsonl", "run-1", saved[0].name, saved[2].name, "tensorboard"]
    assert names(f"{url}/run-1/errors") == ["rank0.json"]
    RemoteFolder(url).download_newest(tmp_path / "new", {})
    assert (tmp_path / "new" / "history.jsonl").read_text() == "history.jsonl"


def test_an_upload_that_breaks_off_is_none_and_is_warned_of(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (make_checkpoint(tmp_path / "here", step) for step in (1, 2))
    assert copy(url, first) == []
    Unreliable.faults.extend([False, True])  # only one file of the second is uploaded
    assert copy(url, second) == [second]
    failed, summary = capsys.readouterr().err.splitlines()
    assert all(
        part in failed for part in ("step-00000002", "the network is down", "training continues")
    )
    assert f"not copied to {url}: {second}" in summary
    assert RemoteFolder(url).download_newest(tmp_path / "new", {}) == tmp_path / "new" / first.name
    assert copy(url, make_checkpoint(tmp_path / "here", 3)) == []
    assert names(url) == ["step-00000001", "step-00000003"]  # leftovers are cleared


def test_another_runs_copy_stays_and_a_damaged_one_is_passed_over(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert copy(url, make_checkpoint(tmp_path / "theirs", 1, run="theirs")) == []
    assert (
        copy(
            url,
            *(make_checkpoint(tmp_path / "ours", step, run="ours") for step in (1, 2, 3)),
            keep_last=1,
        )
        == []
    )
    assert names(url) == ["step-00000001", "step-00000003"]
    fsspec.url_to_fs(url)[0].pipe_file(f"{url}/step-00000003/weights.safetensors", bytes(10**6))
    assert (
        RemoteFolder(url).download_newest(tmp_path / "new", {})
        == tmp_path / "new" / "step-00000001"
    )
    (warning,) = capsys.readouterr().err.splitlines()
    assert all(part in warning for part in ("step-00000003", "weights.safetensors has more than"))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-00000001"]


def test_a_target_is_tried_before_training(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for good in (url, str(tmp_path / "new" / "folder")):
        remote.try_target(good)
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    with pytest.raises(
        ValueError,
        match=r"clap\.checkpoint\.remote_sync: .*file/run can't be written \(NotADirectory",
    ):
        remote.try_target(str(tmp_path / "file" / "run"))


def test_links_of_others_are_left_alone(tmp_path: Path) -> None:
    """Rotation must not delete through links to other folders, and uploads must not write through
    them."""
    first, second, third = (
        make_checkpoint(tmp_path / "here", step, run="ours") for step in (1, 2, 3)
    )
    there = tmp_path / "there"
    there.mkdir()
    (there / first.name).symlink_to(first)
    (there / third.name).symlink_to(tmp_path)
    assert copy(str(there), second, third, keep_last=1) == []
    assert checkpoint_files.verify(first).step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]
    assert checkpoint_files.verify(there / f"{third.name}-2").step == 3


def test_links_beside_checkpoints_are_not_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They could lead to private files. `tests/test_hostile_files.py` has links in the other
    folder."""
    here = tmp_path / "here"
    there = tmp_path / "there"
    saved = make_checkpoint(here, 1)
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "secret").touch()
    (here / "tensorboard").symlink_to(tmp_path / "victim")
    assert copy(str(there), saved) == []
    assert [path.name for path in there.iterdir()] == [saved.name]
    assert "tensorboard/secret isn't copied" in capsys.readouterr().err
    (saved / "state.safetensors").unlink()
    (saved / "state.safetensors").symlink_to(tmp_path / "victim" / "secret")
    assert copy(f"{there}2", saved) == [saved]


@pytest.mark.parametrize("planted", ["link", "large"])
def test_a_history_that_is_refused_is_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    planted: str,
) -> None:
    there = tmp_path / "there"
    new = tmp_path / "new"
    saved = make_checkpoint(there, 1)
    if planted == "link":
        (there / "history.jsonl").symlink_to(saved / "manifest.json")
    else:
        (there / "history.jsonl").write_text("touch scratch")
        monkeypatch.setattr(remote, "MOST_HISTORY_BYTES", 5)
    assert RemoteFolder(f"file://{there}").download_newest(new, {}) == new / saved.name
    assert [path.name for path in new.iterdir()] == [saved.name]
    assert "history.jsonl isn't copied" in capsys.readouterr().err


def test_uploads_under_way_and_folders_of_others_stay(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = fsspec.url_to_fs(url)[0]
    remote.pipe_file(f"{url}/step-00000100/other_tools_model.pt", b"model")
    Unreliable.faults.extend([False, True])
    theirs = make_checkpoint(tmp_path / "theirs", 1, run="theirs")
    assert copy(url, theirs) == [theirs]
    assert (
        copy(
            url,
            *(make_checkpoint(tmp_path / "ours", step, run="ours") for step in (1, 100)),
            keep_last=1,
        )
        == []
    )
    left = ["step-00000001", "step-00000100", "step-00000100-2"]
    assert names(url) == left
    assert remote.cat_file(f"{url}/step-00000100/other_tools_model.pt") == b"model"
    warnings = capsys.readouterr().err.splitlines()
    assert [
        name for name in left if any(f"{name} has no manifest" in warning for warning in warnings)
    ] == left[:2]
    assert copy(url, theirs) == []
    assert names(f"{url}/step-00000001") == [
        "manifest.json",
        "state.safetensors",
        "weights.safetensors",
    ]


def test_logs_are_uploaded_again_only_if_they_changed(url: str, tmp_path: Path) -> None:
    log = tmp_path / "here" / "history.jsonl"
    first, second, third = (make_checkpoint(log.parent, step) for step in (1, 2, 3))
    sync = BackgroundSync(url, CheckpointSettings(), log.parent)
    log.write_text("1")
    assert sync._copy(first)
    remote = fsspec.url_to_fs(url)[0]
    remote.pipe_file(f"{url}/history.jsonl", b"uploaded")
    assert sync._copy(second)
    assert remote.cat_file(f"{url}/history.jsonl") == b"uploaded"
    log.write_text("1\n2")
    assert sync._copy(third)
    assert remote.cat_file(f"{url}/history.jsonl") == b"1\n2"
