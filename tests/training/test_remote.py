"""Copies elsewhere: complete or not there, warned of when they fail, never in the way of training."""

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clap_ds.config.sections import CheckpointSettings
from clap_ds.training import remote
from clap_ds.training.remote import BackgroundSync, RemoteFolder, check_target
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
    for notes in (Unreliable.written, Unreliable.failures, Unreliable.short):
        notes.clear()
    Unreliable.gate.set()
    yield f"unreliable://{uuid.uuid4().hex}"
    Unreliable.gate.set()


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "elsewhere") if request.param == "local" else f"memory://{uuid.uuid4().hex}/deep"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)


def copy(url: str, *checkpoints: Path, keep_last: int = 3, keep_best: int = 0) -> tuple[list[Path], list[str]]:
    """Copy these: those that did not arrive, and the warnings."""
    warnings: list[str] = []
    rule = CheckpointSettings(keep_last=keep_last, keep_best=keep_best, best_by="m")
    sync = BackgroundSync(url, rule, warnings.append)
    for checkpoint in checkpoints:
        sync.submit(checkpoint)
    return sync.close(30), warnings


def bring_back(url: str, folder: Path) -> tuple[Path | None, list[str]]:
    """What is brought into a new folder, and the warnings."""
    folder.mkdir()
    warnings: list[str] = []
    return RemoteFolder(url).download_newest(folder, warnings.append), warnings


def names(url: str) -> list[str]:
    return sorted(RemoteFolder(url).read_all())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_there_and_back_is_the_same(url: str, tmp_path: Path) -> None:
    assert bring_back(url, tmp_path / "empty") == (None, [])
    saved = [make_checkpoint(tmp_path / "here", step) for step in (1, 2)]
    assert copy(url, *saved) == ([], [])
    back, warnings = bring_back(url, tmp_path / "new")
    assert (back, warnings) == (tmp_path / "new" / "step-00000002", [])
    assert back is not None
    assert contents(back) == contents(saved[1])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-00000002"]


def test_the_manifest_goes_last_and_nothing_twice(unreliable: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 1)
    assert copy(unreliable, path, path) == ([], [])
    assert [path.rsplit("/", 1)[1] for path in Unreliable.written] == [
        "mp_rank_00_model_states.pt", "weights.safetensors", "manifest.json",
    ]  # fmt: skip


def test_it_tries_again_and_says_so(unreliable: str, tmp_path: Path) -> None:
    Unreliable.failures.extend([1, 0])
    left, warnings = copy(unreliable, make_checkpoint(tmp_path, 1))
    assert left == []
    assert len(warnings) == 2
    for part in ("copying step-00000001", "the network is down", "next attempt"):
        assert part in warnings[0]
    assert names(unreliable) == ["step-00000001"]


def test_what_arrives_cut_short_is_sent_again(unreliable: str, tmp_path: Path) -> None:
    Unreliable.short.append("weights.safetensors")
    left, warnings = copy(unreliable, make_checkpoint(tmp_path / "here", 1))
    assert left == []
    assert "weights.safetensors arrived with 7000 of 7001 bytes" in warnings[0]
    back, warnings = bring_back(unreliable, tmp_path / "new")
    assert back is not None
    assert warnings == []


def test_an_upload_that_breaks_off_is_none_and_is_warned_of(unreliable: str, tmp_path: Path) -> None:
    first, second = (make_checkpoint(tmp_path / "here", step) for step in (1, 2))
    assert copy(unreliable, first) == ([], [])
    Unreliable.failures.extend([1] + [0] * 20)  # one file of the second arrives
    left, warnings = copy(unreliable, second)
    assert left == [second]
    assert "given up" in warnings[-2]
    assert "1 checkpoints have not been copied" in warnings[-1]
    assert second.name in warnings[-1]
    back, _ = bring_back(unreliable, tmp_path / "new")
    assert back is not None
    assert back.name == first.name
    Unreliable.failures.clear()
    copy(unreliable, make_checkpoint(tmp_path / "here", 3))
    assert not fsspec.url_to_fs(unreliable)[0].exists(f"{unreliable}/{second.name}")  # leftovers are cleared


def test_copies_are_rotated_as_locally(url: str, tmp_path: Path) -> None:
    scores = enumerate([0.1, 0.9, 0.2, 0.3], start=1)
    saved = [make_checkpoint(tmp_path / "here", step, metrics={"m": score}) for step, score in scores]
    assert copy(url, *saved, keep_last=1, keep_best=1) == ([], [])
    assert names(url) == ["step-00000002", "step-00000004"]


def test_one_rotated_away_before_its_turn_is_left_out(unreliable: str, tmp_path: Path) -> None:
    Unreliable.gate.clear()
    sync = BackgroundSync(unreliable, CheckpointSettings(), pytest.fail)
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    for path in paths:
        sync.submit(path)
    deadline = time.monotonic() + 30
    while not sync.is_copying(paths[0]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not sync.is_copying(paths[1])
    checkpoint_files.remove(paths[1])
    Unreliable.gate.set()
    assert sync.close(30) == []
    assert names(unreliable) == ["step-00000001", "step-00000003"]


def test_closing_waits_no_longer_than_its_limit(unreliable: str, tmp_path: Path) -> None:
    warnings: list[str] = []
    Unreliable.gate.clear()
    sync = BackgroundSync(unreliable, CheckpointSettings(), warnings.append)
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2)]
    for path in paths:
        sync.submit(path)
    assert sync.close(0.2) == paths
    assert "2 checkpoints have not been copied" in warnings[0]
    assert "within 0 s" in warnings[0]


@pytest.mark.parametrize("damage", ["changed", "cut short", "gone", "no manifest to read"])
def test_a_damaged_copy_is_passed_over(tmp_path: Path, damage: str) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    copy(url, *(make_checkpoint(tmp_path / "here", step) for step in (1, 2)))
    name = "manifest.json" if damage == "no manifest to read" else "weights.safetensors"
    file = f"{url}/step-00000002/{name}"
    fs, _ = fsspec.url_to_fs(url)
    content = fs.cat_file(file)
    if damage == "gone":
        fs.rm_file(file)
    else:
        fs.pipe_file(file, b"X" + content[1:] if damage == "changed" else content[:-1])
    back, warnings = bring_back(url, tmp_path / "new")
    assert back == tmp_path / "new" / "step-00000001"
    assert "step-00000002" in warnings[0]
    assert name in warnings[0]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-00000001"]


def test_a_copy_takes_no_damaged_ones_name(url: str, tmp_path: Path) -> None:
    saved = make_checkpoint(tmp_path / "here", 1)
    copy(url, saved)
    (saved / "weights.safetensors").unlink()
    back = RemoteFolder(url).download_newest(tmp_path / "here", pytest.fail)
    assert back == tmp_path / "here" / "step-00000001-2"
    checkpoint_files.verify(back)


CREDENTIALS = "they are taken from the environment alone"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://key:hush@bucket/run", CREDENTIALS),
        ("simplecache::sftp://me:hush@host/run", CREDENTIALS),
        ("gopher://host/run", "no protocol 'gopher'"),
        ("/checkpoints", "is the folder of the checkpoints itself"),
        ("file:///checkpoints", "is the folder of the checkpoints itself"),
    ],
)
def test_what_cannot_be_a_target_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"clap\.checkpoint\.sync_to: .*{reason}") as refusal:
        check_target(url, Path("/checkpoints"))
    assert "hush" not in str(refusal.value)
