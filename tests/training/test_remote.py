"""Copies elsewhere: complete or not there, told when they fail, never in the way of training."""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clap_ds.training import remote
from clap_ds.training.remote import BackgroundSync, RemoteFolder, check_target
from clap_ds.weights import checkpoint_files
from tests.weights.fake_checkpoints import make_checkpoint


class Unreliable(MemoryFileSystem):
    """A memory file system that notes what is written and fails, or hangs, when told to."""

    protocol = "unreliable"
    written: ClassVar[list[str]] = []
    failures: ClassVar[list[int]] = []  # uploads still to go well before each failure
    short: ClassVar[list[str]] = []  # ends of names of files that lose their last byte on the way, once each
    gate: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("unreliable://", "memory://"))

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        self.gate.wait(30)
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
def unreliable() -> Iterator[str]:
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    Unreliable.written.clear()
    Unreliable.failures.clear()
    Unreliable.short.clear()
    Unreliable.gate.set()
    yield f"unreliable://{uuid.uuid4().hex}"
    Unreliable.gate.set()


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "elsewhere") if request.param == "local" else f"memory://{uuid.uuid4().hex}/deep"


def sync_to(url: str, warnings: list[str], *, keep_last: int = 3, keep_best: int = 0) -> BackgroundSync:
    return BackgroundSync(
        url, keep_last=keep_last, keep_best=keep_best, best_by="m", warn=warnings.append, first_wait_s=0.01
    )


def names(url: str) -> list[str]:
    return sorted(RemoteFolder(url).read_all()[0])


def same_content(one: Path, other: Path) -> bool:
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    theirs = sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    return files == theirs and all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


def test_there_and_back_is_the_same(url: str, tmp_path: Path) -> None:
    warnings: list[str] = []
    sync = sync_to(url, warnings)
    saved = [make_checkpoint(tmp_path / "here", step) for step in (1, 2)]
    for path in saved:
        sync.submit(path)
    assert sync.close(30) == []
    (tmp_path / "new").mkdir()
    back = RemoteFolder(url).download_newest(tmp_path / "new", warnings.append)
    assert back == tmp_path / "new" / "step-00000002"
    assert same_content(back, saved[1])
    assert not warnings
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-00000002"]


def test_an_empty_place_has_none(url: str, tmp_path: Path) -> None:
    assert RemoteFolder(url).download_newest(tmp_path, pytest.fail) is None


def test_the_manifest_goes_last(unreliable: str, tmp_path: Path) -> None:
    sync = sync_to(unreliable, [])
    sync.submit(make_checkpoint(tmp_path, 1))
    assert sync.close(30) == []
    assert [path.rsplit("/", 1)[1] for path in Unreliable.written] == [
        "mp_rank_00_model_states.pt", "weights.safetensors", "manifest.json",
    ]  # fmt: skip


def test_it_tries_again_and_says_so(unreliable: str, tmp_path: Path) -> None:
    warnings: list[str] = []
    Unreliable.failures.extend([1, 0])
    sync = sync_to(unreliable, warnings)
    sync.submit(make_checkpoint(tmp_path, 1))
    assert sync.close(30) == []
    assert len(warnings) == 2
    assert "copying step-00000001" in warnings[0]
    assert "the network is down" in warnings[0]
    assert "next attempt" in warnings[0]
    assert names(unreliable) == ["step-00000001"]


def test_what_arrives_cut_short_is_sent_again(unreliable: str, tmp_path: Path) -> None:
    warnings: list[str] = []
    Unreliable.short.append("weights.safetensors")
    sync = sync_to(unreliable, warnings)
    sync.submit(make_checkpoint(tmp_path / "here", 1))
    assert sync.close(30) == []
    assert "weights.safetensors arrived with 7000 of 7001 bytes" in warnings[0]
    (tmp_path / "new").mkdir()
    assert RemoteFolder(unreliable).download_newest(tmp_path / "new", pytest.fail) is not None


def test_an_upload_that_breaks_off_is_none_and_is_told(unreliable: str, tmp_path: Path) -> None:
    warnings: list[str] = []
    first, second = (make_checkpoint(tmp_path / "here", step) for step in (1, 2))
    sync = sync_to(unreliable, warnings)
    sync.submit(first)
    assert sync.close(30) == []
    Unreliable.failures.extend([1] + [0] * 20)  # one file of the second arrives
    sync = sync_to(unreliable, warnings)
    sync.submit(second)
    assert sync.close(30) == [second]
    assert "given up" in warnings[-2]
    assert "1 checkpoints have not been copied" in warnings[-1]
    assert second.name in warnings[-1]
    (tmp_path / "new").mkdir()
    back = RemoteFolder(unreliable).download_newest(tmp_path / "new", warnings.append)
    assert back is not None
    assert back.name == first.name
    Unreliable.failures.clear()
    sync = sync_to(unreliable, [])
    sync.submit(make_checkpoint(tmp_path / "here", 3))
    sync.close(30)
    assert not RemoteFolder(unreliable)._fs.exists(f"{unreliable}/{second.name}")  # leftovers are cleared


def test_the_same_is_not_copied_twice(unreliable: str, tmp_path: Path) -> None:
    sync = sync_to(unreliable, [])
    path = make_checkpoint(tmp_path, 1)
    sync.submit(path)
    sync.submit(path)
    sync.close(30)
    assert len(Unreliable.written) == 3


def test_copies_are_rotated_as_locally(url: str, tmp_path: Path) -> None:
    sync = sync_to(url, [], keep_last=1, keep_best=1)
    for step, score in enumerate([0.1, 0.9, 0.2, 0.3], start=1):
        sync.submit(make_checkpoint(tmp_path / "here", step, metrics={"m": score}))
    assert sync.close(30) == []
    assert names(url) == ["step-00000002", "step-00000004"]


def test_one_rotated_away_before_its_turn_is_left_out(unreliable: str, tmp_path: Path) -> None:
    warnings: list[str] = []
    Unreliable.gate.clear()
    sync = sync_to(unreliable, warnings)
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    for path in paths:
        sync.submit(path)
    checkpoint_files.remove(paths[1])
    Unreliable.gate.set()
    assert sync.close(30) == []
    assert not warnings
    assert names(unreliable) == ["step-00000001", "step-00000003"]


def test_closing_waits_no_longer_than_told(unreliable: str, tmp_path: Path) -> None:
    warnings: list[str] = []
    Unreliable.gate.clear()
    sync = sync_to(unreliable, warnings)
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2)]
    for path in paths:
        sync.submit(path)
    assert sync.close(0.2) == paths
    assert "2 checkpoints have not been copied" in warnings[0]
    assert "within 0 s" in warnings[0]


@pytest.mark.parametrize("damage", ["changed", "cut short", "gone"])
def test_a_damaged_copy_is_passed_over(tmp_path: Path, damage: str) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    sync = sync_to(url, [])
    for step in (1, 2):
        sync.submit(make_checkpoint(tmp_path / "here", step))
    sync.close(30)
    file = f"{url}/step-00000002/weights.safetensors"
    fs, _ = fsspec.url_to_fs(url)
    content = fs.cat_file(file)
    if damage == "gone":
        fs.rm_file(file)
    else:
        fs.pipe_file(file, content[:-1] if damage == "cut short" else b"X" + content[1:])
    warnings: list[str] = []
    (tmp_path / "new").mkdir()
    back = RemoteFolder(url).download_newest(tmp_path / "new", warnings.append)
    assert back == tmp_path / "new" / "step-00000001"
    assert "step-00000002" in warnings[0]
    assert "weights.safetensors" in warnings[0]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-00000001"]


def test_a_copy_takes_no_damaged_ones_name(url: str, tmp_path: Path) -> None:
    sync = sync_to(url, [])
    saved = make_checkpoint(tmp_path / "here", 1)
    sync.submit(saved)
    sync.close(30)
    (saved / "weights.safetensors").unlink()
    back = RemoteFolder(url).download_newest(tmp_path / "here", pytest.fail)
    assert back == tmp_path / "here" / "step-00000001-2"
    checkpoint_files.verify(back)


@pytest.mark.parametrize(
    "url", ["s3://key:hush@bucket/run", "simplecache::sftp://me:hush@host/run", "ftp://:hush@host/"]
)
def test_a_password_in_the_url_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="they are taken from the environment alone") as refusal:
        check_target(url, tmp_path)
    assert "hush" not in str(refusal.value)
    assert "key" not in str(refusal.value)


def test_what_cannot_be_a_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no protocol 'gopher'"):
        check_target("gopher://host/run", tmp_path)
    for same in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(ValueError, match="is the folder of the checkpoints itself"):
            check_target(same, tmp_path)

    def not_installed(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(remote.fsspec, "get_filesystem_class", not_installed)
    with pytest.raises(
        ValueError, match="sync_to: s3://bucket/run: the package for s3:// is not installed: Install s3fs"
    ):
        check_target("s3://bucket/run", tmp_path)
