import gzip
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from clap_ds.data import tar_items
from clap_ds.data.tar_items import ContentReader, Item, Place, count_samples, fetch, read_items
from tests.data.tars import marked_item, marked_items, put, write_tar


def items_of(path: Path, *, leave: bool = False) -> tuple[list[Item], list[str]]:
    reported: list[str] = []
    items = list(read_items(str(path), lambda name, reason: reported.append(reason), leave_audio=leave))
    return items, reported


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "a.tar", marked_items(range(3)))


def test_audio_left_in_the_tar_is_fetched_later(tar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, left = items_of(tar)[0], items_of(tar, leave=True)[0]
    assert read[1]["wav"] == dict(marked_item(1))["0001.wav"]
    assert all(isinstance(item["wav"], Place) and item["txt"] == b"tone %d" % n for n, item in enumerate(left))
    fetch(left[0])
    tar.unlink()
    monkeypatch.setattr(tar_items, "_MOST_READ_AT_ONCE", 100)
    for item in left[1:]:
        fetch(item)  # mapped
    assert isinstance(left[1]["wav"], memoryview)
    assert left == read


def test_tars_are_closed_when_nothing_of_them_is_held(tar: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    items = [items_of(tar, leave=True)[0][1] for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 5
    items.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_tar_cut_while_its_audio_waits_costs_that_audio(tar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = items_of(tar, leave=True)[0]
    os.truncate(tar, 1024)
    for most_read_at_once in (2**22, 100):
        monkeypatch.setattr(tar_items, "_MOST_READ_AT_ONCE", most_read_at_once)
        with pytest.raises(EOFError, match="the tar ends within it"):
            fetch(items[1])


def test_the_disk_is_asked_ahead_for_what_will_be_read(tar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: asked.append(start))
    monkeypatch.setattr(tar_items, "_READ_AHEAD_BYTES", 4096)
    monkeypatch.setattr(tar_items, "_ASKED_FOR_BYTES", 1024)
    assert count_samples(str(tar)) == 3
    assert not asked
    found = read_items(str(tar), pytest.fail, leave_audio=True)
    next(found)
    assert asked == list(range(0, asked[-1] + 1, 1024))
    assert 4096 <= asked[-1] + 1024 < tar.stat().st_size
    last = list(found)[-1]["wav"]
    assert asked == list(range(0, asked[-1] + 1, 1024))
    assert asked[-1] + 1024 >= last.start + last.size


def test_damaged_tars_give_the_same_items_either_way(tar: Path, tmp_path: Path) -> None:
    """Cut anywhere, or with a byte changed in any header: places in the order of passes must not depend on what was read."""
    whole = tar.read_bytes()
    damaged = tmp_path / "damaged.tar"
    changed = [bytearray(whole) for _ in range(len(whole) // 512)]
    for block, content in enumerate(changed):
        content[512 * block + 150] ^= 0xFF  # in a header's checksum
    for content in [*(whole[:size] for size in range(512, len(whole), 300)), *changed]:
        damaged.write_bytes(content)
        read, left = items_of(damaged), items_of(damaged, leave=True)
        assert [item["__key__"] for item in read[0]] == [item["__key__"] for item in left[0]]
        assert read[1] == left[1]
        assert_read_as_by_tarfile(damaged)


def assert_read_as_by_tarfile(path: Path) -> None:
    """Members, their content and what is said of damage are tarfile's own."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar_items, "group_by_keys", lambda members, handler: members)
        found = items_of(path)
        patch.setattr(tar_items, "_plain_member", lambda opened: None)
        assert items_of(path) == found


def add(tar: tarfile.TarFile, name: str, content: bytes = b"x" * 700, **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("global_headers", [{}, {"path": "one.wav"}])
def test_all_that_tarfile_writes_is_read_as_it_reads_it(
    tmp_path: Path, form: int, global_headers: dict[str, str]
) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=form, pax_headers=global_headers) as tar:
        for place, name in enumerate(["a.wav", "größe/ü.txt", "d" * 90 + "/" + "n" * 90 + ".wav", "n" * 100, "b.WAV"]):
            add(tar, name, bytes([place]) * (511 + place), uid=place * 10**5)
        add(tar, "time.wav", mtime=1700000000.25 if form == tarfile.PAX_FORMAT else 2**33 - 1)
        add(tar, "surrogate\udce9.wav", mode=0o7777, uname="ü" * 8, mtime=0)
        if form != tarfile.USTAR_FORMAT:
            add(tar, "user.wav", uid=2**31, gid=2**40)
            add(tar, "x" * 300 + ".txt", mtime=12.5)
        add(tar, "folder", b"", type=tarfile.DIRTYPE)
        add(tar, "link.wav", b"", type=tarfile.SYMTYPE, linkname="a.wav")
        add(tar, "old.wav", type=tarfile.AREGTYPE)
        add(tar, "contiguous.wav", type=tarfile.CONTTYPE)
        add(tar, "fifo.wav", b"", type=tarfile.FIFOTYPE)
        add(tar, "strange.wav", type=b"Z")
        add(tar, "last.txt")
    assert_read_as_by_tarfile(path)
    whole = path.read_bytes()
    for number in range(0, 0 if global_headers else len(whole), 512):
        path.write_bytes(whole[:number] + bytes(reversed(whole[number : number + 512])) + whole[number + 512 :])
        assert_read_as_by_tarfile(path)
        path.write_bytes(whole[: number + 300])
        assert_read_as_by_tarfile(path)


@pytest.mark.parametrize(("form", "mtime"), [(tarfile.USTAR_FORMAT, 1700000000), (tarfile.PAX_FORMAT, 1700000000.123)])
def test_headers_as_usual_need_no_tarfile(
    form: int, mtime: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this project's tars, and of WebDataset's writer, whose times are fractions, in PAX headers."""
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        for number in range(4):
            add(tar, f"{number}.wav", mtime=mtime, uname="someone")
    read = tarfile.TarInfo.fromtarfile.__func__
    asked: list[int] = []
    noted = classmethod(lambda cls, tar: asked.append(tar.offset) or read(cls, tar))
    monkeypatch.setattr(tar_items._Header, "fromtarfile", noted)
    assert len(items_of(tmp_path / "a.tar")[0]) == 4
    assert sum(offset > 0 for offset in asked) == 1  # after the first, only the end


@pytest.mark.skipif(not shutil.which("tar"), reason="no tar here")
@pytest.mark.parametrize("form", ["v7", "ustar", "gnu", "pax", "oldgnu"])
def test_what_gnu_tar_writes_is_read_as_by_tarfile(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.wav", "a.txt", "sub/b.wav"):
        (folder / name).write_bytes(b"content" * 100)
    with open(folder / "sparse.wav", "wb") as file:
        file.truncate(2**20)
        file.write(b"start")
        file.seek(2**19)
        file.write(b"middle")
    sparse = ["--sparse"] if form in ("gnu", "pax", "oldgnu") else []
    subprocess.run(["tar", f"--format={form}", *sparse, "-cf", tmp_path / "a.tar", "."], cwd=folder, check=True)
    assert_read_as_by_tarfile(tmp_path / "a.tar")
    items = {item["__key__"].removeprefix("./"): item for item in items_of(tmp_path / "a.tar", leave=True)[0]}
    fetch(items["sparse"])
    assert items["sparse"]["wav"] == (folder / "sparse.wav").read_bytes()
    assert items["a"]["txt"] == b"content" * 100


def test_content_of_any_tar_can_be_left_and_read_in_any_order(tar: Path, tmp_path: Path) -> None:
    expected = items_of(tar)[0]
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress(tar.read_bytes()))
    at_once, reported = items_of(packed, leave=True)  # what is compressed is read at once, where order matters
    assert [item["wav"] for item in at_once] == [item["wav"] for item in expected]
    assert not reported
    url = put("memory://tar_items/a.tar", tar.read_bytes())
    reader = ContentReader()
    for shard in (str(tar), str(packed), url):
        items = list(read_items(shard, pytest.fail, any_order=True))
        assert [item["txt"] for item in items] == [item["txt"] for item in expected]
        for left, read in reversed(list(zip(items, expected, strict=True))):
            assert reader.read(shard, left["wav"]) == read["wav"]
        place = items[-1]["wav"]
        with pytest.raises(EOFError, match="the tar ends within it"):
            reader.read(shard, place._replace(size=20000))
    reader.close()
    packed.write_bytes(packed.read_bytes()[:-50])
    assert len(items_of(packed)[1]) == 1


def test_zeros_within_a_tar_are_told(tmp_path: Path) -> None:
    """As a disk or a copy may leave them: they look like the tar's end."""
    path = write_tar(tmp_path / "a.tar", [(f"{n}.txt", b"x" * 600) for n in range(9)])
    content = bytearray(path.read_bytes())
    content[3 * 1536 : 6 * 1536] = bytes(3 * 1536)
    path.write_bytes(content)
    reported: list[str] = []
    items = list(read_items(str(path), lambda name, reason: reported.append(reason)))
    assert [item["__key__"] for item in items] == ["0", "1", "2"]
    (reason,) = reported
    assert "zeros end it at byte 4,608, there is more from byte 9,216 on" in reason
