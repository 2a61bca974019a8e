"""Copies elsewhere: complete or not there, warned of when they fail, never in the way of training."""

import shlex
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clap_ds.config.sections import CheckpointSettings
from clap_ds.training import remote
from clap_ds.training.remote import BackgroundSync, RemoteFolder
from clap_ds.weights import checkpoint_files
from tests.weights.fake_checkpoints import make_checkpoint


class Unreliable(MemoryFileSystem):
    """A memory file system that notes what is written and fails, or hangs, when asked to."""

    protocol = "unreliable"
    written: ClassVar[list[str]] = []
    failures: ClassVar[list[int]] = []  # uploads still to go well before each failure
    short: ClassVar[list[str]] = []  # ends of names of files that lose their last byte on the way, once each
    gate: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("unreliable://", "memory://"))

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        self.gate.wait(180)
        if self.failures:
            self.failures[0] -= 1
            if self.failures[0] < 0:
                self.failures.pop(0)
                raise ConnectionError("the network is down")
        super().put_file(lpath, rpath, *args, **kwargs)
        for end in [end for end in self.short if rpath.endswith(end)]:
            self.short.remove(end)
            super().pipe_file(rpath, self.cat_file(rpath)[:-1])
        self.written.append(rpath)

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        super().pipe_file(path, value, *args, **kwargs)
        self.written.append(path)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder that isn't there yet on that file system; the first failure is waited for 10 ms."""
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    for notes in (Unreliable.written, Unreliable.failures, Unreliable.short):
        notes.clear()
    Unreliable.gate.set()
    yield f"unreliable://{uuid.uuid4().hex}/deep"
    Unreliable.gate.set()


def copy(url: str, *checkpoints: Path, keep_last: int = 3, keep_best: int = 0) -> list[Path]:
    """Copy these; gives back those that did not arrive."""
    sync = BackgroundSync(url, CheckpointSettings(keep_last=keep_last, keep_best=keep_best, best_by="m"))
    for checkpoint in checkpoints:
        sync.submit(checkpoint)
    return sync.close(30)


def test_there_and_back_is_the_same(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert RemoteFolder(url).download_newest(tmp_path / "new") is None
    saved = [make_checkpoint(tmp_path / "here", step) for step in (1, 2)]
    assert copy(url, *saved) == []
    back = RemoteFolder(url).download_newest(tmp_path / "new")
    assert back == tmp_path / "new" / "step-00000002"
    for name in checkpoint_files.verify(back).files:
        assert (back / name).read_bytes() == (saved[1] / name).read_bytes()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-00000002"]
    # One that comes back takes no damaged one's name.
    (saved[1] / "weights.safetensors").unlink()
    back = RemoteFolder(url).download_newest(tmp_path / "here")
    assert back == tmp_path / "here" / "step-00000002-2"
    checkpoint_files.verify(back)
    assert capsys.readouterr().err == ""


def test_it_tries_again_and_says_so(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Unreliable.failures.extend([1, 0])
    Unreliable.short.append("weights.safetensors")
    assert copy(url, make_checkpoint(tmp_path / "here", 1)) == []
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 3
    assert all(part in warnings[0] for part in ("copying step-00000001", "the network is down", "next attempt"))
    assert "weights.safetensors arrived with 7000 of 7001 bytes" in warnings[2]
    assert RemoteFolder(url).download_newest(tmp_path / "new") is not None


def test_an_upload_that_breaks_off_is_none_and_is_warned_of(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (make_checkpoint(tmp_path / "here", step) for step in (1, 2))
    assert copy(url, first) == []
    Unreliable.failures.extend([1] + [0] * 20)  # one file of the second arrives
    assert copy(url, second) == [second]
    *_, given_up, summary = capsys.readouterr().err.splitlines()
    assert "given up" in given_up
    assert summary.startswith(f"warning: 1 checkpoints have not been copied to {url}: {second}. To copy one by hand")
    back = RemoteFolder(url).download_newest(tmp_path / "new")
    assert back == tmp_path / "new" / first.name
    Unreliable.failures.clear()
    copy(url, make_checkpoint(tmp_path / "here", 3))
    assert not fsspec.url_to_fs(url)[0].exists(f"{url}/{second.name}")  # leftovers are cleared
    python, option, program = shlex.split(summary.partition("manifest.json last: ")[2])
    assert (python, option) == (sys.executable, "-c")
    exec(program)
    assert set(RemoteFolder(url).read_all()) == {"step-00000001", "step-00000002", "step-00000003"}


def test_what_another_run_has_there_stays(url: str, tmp_path: Path) -> None:
    theirs = [make_checkpoint(tmp_path / "theirs", step, run="theirs") for step in (1, 2)]
    assert copy(url, *theirs) == []
    fs, _ = fsspec.url_to_fs(url)
    fs.pipe_file(f"{url}/step-00000003/uploading-theirs", b"")  # which is under way
    fs.pipe_file(f"{url}/step-00000002/manifest.json", b"{")  # damaged meanwhile
    ours = [make_checkpoint(tmp_path / "ours", step, run="ours") for step in (1, 2)]
    assert copy(url, *ours, keep_last=1, keep_best=0) == []
    assert {path.rsplit("/", 1)[1] for path in fs.ls(url, detail=False)} == {
        "step-00000001", "step-00000002", "step-00000002-2", "step-00000003"
    }  # fmt: skip
    newest = RemoteFolder(url).download_newest(tmp_path / "new")
    assert newest is not None
    assert checkpoint_files.Manifest.read(newest).run == "ours"


@pytest.mark.parametrize("damage", ["changed", "cut short", "gone", "no manifest to read"])
def test_a_damaged_copy_is_passed_over(
    url: str, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy(url, *(make_checkpoint(tmp_path / "here", step) for step in (1, 2)))
    name = "manifest.json" if damage == "no manifest to read" else "weights.safetensors"
    file, fs = f"{url}/step-00000002/{name}", fsspec.url_to_fs(url)[0]
    content = fs.cat_file(file)
    fs.rm_file(file)
    if damage != "gone":
        fs.pipe_file(file, b"X" + content[1:] if damage == "changed" else content[:-1])
    assert RemoteFolder(url).download_newest(tmp_path / "new") == tmp_path / "new" / "step-00000001"
    warning = capsys.readouterr().err.splitlines()[0]
    assert "step-00000002" in warning
    assert name in warning
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-00000001"]


def test_a_target_is_tried_before_training(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for good in (url, str(tmp_path / "new" / "folder")):
        remote.try_target(good)
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    with pytest.raises(
        ValueError, match=r"clap\.checkpoint\.sync_to: .*file/run can't be written \(NotADirectoryError"
    ):
        remote.try_target(str(tmp_path / "file" / "run"))
    monkeypatch.setattr(remote, "TRY_S", 0.1)
    monkeypatch.setattr(Unreliable, "makedirs", lambda *_, **__: threading.Event().wait())
    with pytest.raises(ValueError, match=r"can't be written \(TimeoutError: no answer within 0\.1 s\); credentials"):
        remote.try_target(url)
