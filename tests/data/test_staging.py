import errno
import multiprocessing
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from clap_ds.data.remote_files import RemoteFiles
from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, write_manifest
from clap_ds.data.staging import StagingFolder
from tests.data.conftest import OpenSource
from tests.data.tars import marked_tars


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path / "disk"))
    return tmp_path / "disk"


def content(staging: StagingFolder, shard: Path | str) -> bytes:
    return staging.open(str(shard), 1e9).read(0, 100)


def limit_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=free))


def test_shard_is_copied_once_per_host_until_it_changes(tmp_path: Path, disk: Path) -> None:
    shard = tmp_path / "0.tar"
    shard.write_bytes(b"first")
    ranks = [StagingFolder("$LOCAL_DISK"), StagingFolder("$LOCAL_DISK")]
    download = RemoteFiles.download
    with patch.object(RemoteFiles, "download", autospec=True, side_effect=download) as downloads:
        assert [content(rank, shard) for rank in ranks * 2] == [b"first"] * 4
        assert downloads.call_count == 1
        shard.write_bytes(b"again")
        os.utime(shard, ns=(1, 1))
        assert [content(rank, shard) for rank in ranks] == [b"again"] * 2
        assert downloads.call_count == 2
    for folder in disk.glob("clap_ds-*/**/"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        content(ranks[0], shard)


def test_full_disk_is_warned_of_once_and_source_is_read(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether or not the system's free space tells that it is full; also in forked workers."""
    shards = [tmp_path / f"{number}.tar" for number in range(3)]
    for number, shard in enumerate(shards):
        shard.write_bytes(bytes([number]) * 50)
    ranks = [StagingFolder("$LOCAL_DISK"), StagingFolder("$LOCAL_DISK")]
    limit_disk(monkeypatch, 60)
    assert content(ranks[0], shards[0]) == bytes(50)
    limit_disk(monkeypatch, 10)

    def read_all() -> None:
        for rank in ranks:
            assert [content(rank, shard)[0] for shard in shards] == [0, 1, 2]

    read_all()
    worker = multiprocessing.get_context("fork").Process(target=read_all)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    limit_disk(monkeypatch, 10**9)
    quota_error = OSError(errno.EDQUOT, "Disk quota exceeded")
    with patch.object(RemoteFiles, "download", side_effect=quota_error) as downloads:
        read_all()
    # each rank's two shards without a copy
    assert downloads.call_count == 2 * 2
    (warning,) = capfd.readouterr().err.splitlines()
    assert "room on the disk" in warning
    assert len(list(disk.glob("*/shards/*"))) == 1
    assert not list(disk.glob("*/locks/*.part"))


@pytest.mark.parametrize(
    ("ranks_per_host", "room_gb", "needed"),
    [(1, 4, None), (1, 0.5, "1.000 GB"), (2, 1.5, "2.000 GB"), (8, 1, "4.000 GB")],
)
def test_too_little_room_is_warned_of_before_first_batch(
    tmp_path: Path,
    open_source: OpenSource,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ranks_per_host: int,
    room_gb: float,
    needed: str | None,
) -> None:
    """Four ranks share four shards of 1 GB."""
    pattern = marked_tars(tmp_path / "source", 4, 8)
    records = {f"{tar:03d}.tar": ShardRecord(8, 10**9, 0.0, "") for tar in range(4)}
    write_manifest(tmp_path / "source", ShardManifest(records))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    limit_disk(monkeypatch, int(room_gb * 1e9))
    spec = {"rank": 1, "world_size": 4, "ranks_per_host": ranks_per_host}
    with open_source(pattern, stage_to="$LOCAL_DISK", **spec):
        warning = capfd.readouterr().err
    if needed is None:
        assert not warning
    else:
        assert f"n7: {disk}" in warning
        assert f"need {needed}" in warning


@pytest.mark.parametrize(
    ("stage_to", "reason"),
    [
        ("$NO_SUCH_DISK/x", r"\$NO_SUCH_DISK isn't set"),
        ("relative", "absolute"),
        ("$LOCAL_DISK/file/x", "Not a directory"),
    ],
)
def test_unusable_staging_folder_is_refused(disk: Path, stage_to: str, reason: str) -> None:
    disk.mkdir()
    (disk / "file").touch()
    with pytest.raises(ValueError, match=rf"clap\.data\.stage_to: .* on .*{reason}"):
        StagingFolder(stage_to)
