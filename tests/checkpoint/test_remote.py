"""Remote copies are complete or absent, cause warnings if they fail, and never stop training."""

import uuid
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clap_ds.checkpoint import remote
from clap_ds.checkpoint.checkpoint_files import CheckpointFolder
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
    """The URL of a folder that doesn't exist on that file system yet."""
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    Unreliable.faults.clear()
    return f"unreliable://{uuid.uuid4().hex}/deep"


def copy(url: str, *checkpoints: Path, keep_last: int = 3, minutes: float = 0.0) -> list[Path]:
    """Copy checkpoints and return those that failed."""
    settings = CheckpointSettings(
        keep_last=keep_last, keep_best=0, remote_sync_every_minutes=minutes
    )
    folder = checkpoints[0].parent
    sync = BackgroundSync(url, settings, folder, folder / "runs" / "run-1")
    for checkpoint in checkpoints:
        sync.submit(checkpoint)
    return sync.close(30)


def list_names(url: str) -> list[str]:
    paths = fsspec.url_to_fs(url)[0].ls(url, detail=False)
    return sorted(path.rsplit("/", 1)[1] for path in paths)


def test_logs_are_uploaded_and_history_is_downloaded(url, tmp_path):
    folder = tmp_path / "local"
    first, second, third = (make_checkpoint(folder, step) for step in (1, 2, 3))
    for name in ("history.jsonl", "tensorboard/events", "runs/run-1/errors/rank0.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    # The second is too soon after the first; the last one is always copied.
    assert copy(url, first, second, third, minutes=60.0) == []
    assert list_names(url) == ["history.jsonl", "run-1", first.name, third.name, "tensorboard"]
    assert list_names(f"{url}/run-1/errors") == ["rank0.json"]
    RemoteFolder(url).download_newest(tmp_path / "new", {})
    assert (tmp_path / "new" / "history.jsonl").read_text() == "history.jsonl"


def test_interrupted_upload_is_no_checkpoint_and_is_warned_of(url, tmp_path, capsys):
    first, second = (make_checkpoint(tmp_path / "local", step) for step in (1, 2))
    assert copy(url, first) == []
    # Only one file of the second is uploaded.
    Unreliable.faults.extend([False, True])
    assert copy(url, second) == [second]
    failure, summary = capsys.readouterr().err.splitlines()
    assert "the network is down" in failure
    assert f"not copied to {url}: {second}" in summary
    newest = RemoteFolder(url).download_newest(tmp_path / "new", {})
    assert newest == tmp_path / "new" / first.name
    # The next copy clears leftovers.
    assert copy(url, make_checkpoint(tmp_path / "local", 3)) == []
    assert list_names(url) == ["step-00000001", "step-00000003"]


def test_damaged_copy_is_skipped_with_warning(url, tmp_path, capsys):
    assert copy(url, *(make_checkpoint(tmp_path / "local", step) for step in (1, 2))) == []
    weights = f"{url}/step-00000002/weights.safetensors"
    fsspec.url_to_fs(url)[0].pipe_file(weights, bytes(10**6))
    newest = RemoteFolder(url).download_newest(tmp_path / "new", {})
    assert newest == tmp_path / "new" / "step-00000001"
    assert [*(tmp_path / "new").iterdir()] == [newest]
    assert "step-00000002/weights.safetensors has more than" in capsys.readouterr().err


def test_uploads_and_folders_of_others_stay(url, tmp_path, capsys):
    files = fsspec.url_to_fs(url)[0]
    files.pipe_file(f"{url}/step-00000100/other_tools_model.pt", b"model")
    Unreliable.faults.extend([False, True])
    other_run = make_checkpoint(tmp_path / "theirs", 1, run="theirs")
    assert copy(url, other_run) == [other_run]
    checkpoints = [make_checkpoint(tmp_path / "ours", step, run="ours") for step in (1, 100)]
    assert copy(url, *checkpoints, keep_last=1) == []
    assert list_names(url) == ["step-00000001", "step-00000100", "step-00000100-2"]
    assert files.cat_file(f"{url}/step-00000100/other_tools_model.pt") == b"model"
    assert "step-00000001 has no manifest" in capsys.readouterr().err
    # The other run continues its upload, and rotation of this run keeps it.
    assert copy(url, other_run) == []
    assert copy(url, make_checkpoint(tmp_path / "ours", 101, run="ours"), keep_last=1) == []
    assert list_names(url) == ["step-00000001", "step-00000100", "step-00000101"]
    assert "manifest.json" in list_names(f"{url}/step-00000001")


def test_target_is_tried_before_training(tmp_path):
    remote.try_target(str(tmp_path / "new"))
    assert [*(tmp_path / "new").iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"remote_sync: .*file/run can't be written"):
        remote.try_target(str(tmp_path / "file" / "run"))


def test_links_at_target_are_left_alone(tmp_path):
    """Rotation must not delete through links to other folders, and uploads must not write through
    them."""
    first, second, third = (
        make_checkpoint(tmp_path / "local", step, run="ours") for step in (1, 2, 3)
    )
    target = tmp_path / "target"
    target.mkdir()
    (target / first.name).symlink_to(first)
    (target / third.name).symlink_to(tmp_path)
    assert copy(str(target), second, third, keep_last=1) == []
    CheckpointFolder.read(first).verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local", "target"]
    CheckpointFolder.read(target / f"{third.name}-2").verify()


def test_links_beside_checkpoints_are_not_copied(tmp_path, capsys):
    """They could lead to private files. `tests/test_hostile_files.py` has links in the other
    folder."""
    local = tmp_path / "local"
    target = tmp_path / "target"
    saved = make_checkpoint(local, 1)
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "secret").touch()
    (local / "tensorboard").symlink_to(tmp_path / "victim")
    assert copy(str(target), saved) == []
    assert [path.name for path in target.iterdir()] == [saved.name]
    assert "tensorboard/secret isn't copied" in capsys.readouterr().err
    (saved / "state.safetensors").unlink()
    (saved / "state.safetensors").symlink_to(tmp_path / "victim" / "secret")
    assert copy(f"{target}2", saved) == [saved]


def test_linked_history_is_not_downloaded(tmp_path, capsys):
    target = tmp_path / "target"
    saved = make_checkpoint(target, 1)
    (target / "history.jsonl").symlink_to(saved / "manifest.json")
    new = tmp_path / "new"
    assert RemoteFolder(f"file://{target}").download_newest(new, {}) == new / saved.name
    assert [path.name for path in new.iterdir()] == [saved.name]
    assert "history.jsonl isn't copied" in capsys.readouterr().err
