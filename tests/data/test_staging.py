import errno
import multiprocessing
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from clap_ds.data.remote_files import RemoteFiles
from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, write_manifest
from clap_ds.data.staging import StagingFolder
from tests.data.tars import marked_tars


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path / "disk"))
    return tmp_path / "disk"


def content(staging: StagingFolder, shard: Path | str) -> bytes:
    return staging.open(str(shard), 1e9).read(0, 100)


def limit_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=free))


def test_shard_is_copied_once_per_host_until_it_changes(tmp_path, disk):
    shard = tmp_path / "0.tar"
    shard.write_bytes(b"first")
    ranks = [StagingFolder("$LOCAL_DISK"), StagingFolder("$LOCAL_DISK")]
    assert [content(rank, shard) for rank in ranks] == [b"first"] * 2
    assert len(list(disk.glob("*/shards/*"))) == 1
    shard.write_bytes(b"again")
    os.utime(shard, ns=(1, 1))
    assert [content(rank, shard) for rank in ranks] == [b"again"] * 2
    assert len(list(disk.glob("*/shards/*"))) == 2
    for folder in disk.glob("clap_ds-*/**/"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_full_disk_is_warned_of_once_and_source_is_read(tmp_path, disk, monkeypatch, capfd):
    """Whether or not the system's free space tells that it is full; also in forked workers."""
    shards = [tmp_path / f"{number}.tar" for number in range(3)]
    for number, shard in enumerate(shards):
        shard.write_bytes(bytes([number]) * 50)
    staging = StagingFolder("$LOCAL_DISK")
    limit_disk(monkeypatch, 60)
    assert content(staging, shards[0]) == bytes(50)
    limit_disk(monkeypatch, 10)

    def read_all() -> None:
        assert [content(staging, shard)[0] for shard in shards] == [0, 1, 2]

    read_all()
    worker = multiprocessing.get_context("fork").Process(target=read_all)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    (warning,) = capfd.readouterr().err.splitlines()
    assert "room on the disk" in warning
    assert len(list(disk.glob("*/shards/*"))) == 1
    assert not list(disk.glob("*/locks/*.part"))


def test_exceeded_quota_ends_copying(tmp_path, disk, monkeypatch):
    """Nothing tells how much is left of it."""
    downloads = []

    def exceed_quota(self: RemoteFiles, *arguments: object, max_bytes: float) -> None:
        downloads.append(max_bytes)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(RemoteFiles, "download", exceed_quota)
    staging = StagingFolder("$LOCAL_DISK")
    for number in range(2):
        (tmp_path / f"{number}.tar").write_bytes(b"shard")
        assert content(staging, tmp_path / f"{number}.tar") == b"shard"
    assert downloads[0] > 0 > downloads[1]


@pytest.mark.parametrize(("ranks_per_host", "warning"), [(1, ""), (2, "need 2.000 GB")])
def test_too_little_room_is_warned_of_before_first_batch(
    tmp_path, open_source, disk, monkeypatch, capfd, ranks_per_host, warning
):
    """Each of four ranks reads a shard of 1 GB."""
    pattern = marked_tars(tmp_path / "source", 4, 8)
    records = {f"{tar:03d}.tar": ShardRecord(8, 10**9, 0.0, "") for tar in range(4)}
    write_manifest(tmp_path / "source", ShardManifest(records))
    limit_disk(monkeypatch, 15 * 10**8)
    spec = {"world_size": 4, "ranks_per_host": ranks_per_host}
    open_source(pattern, stage_to="$LOCAL_DISK", **spec).close()
    printed = capfd.readouterr().err
    assert warning in printed
    assert bool(printed) == bool(warning)


@pytest.mark.parametrize(
    ("stage_to", "reason"),
    [
        ("$NO_SUCH_DISK/x", r"\$NO_SUCH_DISK isn't set"),
        ("relative", "absolute"),
        ("$LOCAL_DISK/file/x", "Not a directory"),
    ],
)
def test_unusable_staging_folder_is_refused(disk, stage_to, reason):
    disk.mkdir()
    (disk / "file").touch()
    with pytest.raises(ValueError, match=rf"clap\.data\.stage_to: .* on .*{reason}"):
        StagingFolder(stage_to)
