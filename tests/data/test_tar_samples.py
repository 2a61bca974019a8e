import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.data.tar_samples import Item, Place, fetch, list_items
from tests.data.tars import marked_item, marked_items, write_tar


def items_of(path: Path) -> tuple[list[Item], list[str]]:
    reported: list[str] = []
    items = list(list_items(str(path), lambda name, reason: reported.append(reason)))
    for item in items:
        fetch(item)
    return items, reported


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "a.tar", marked_items(range(3)))


def test_contents_left_in_the_tar_are_fetched_later(tar: Path) -> None:
    """Even if it was deleted. It is closed with the last reference to an item."""
    before = len(os.listdir("/proc/self/fd"))
    listed = list(list_items(str(tar), pytest.fail))
    assert all(
        isinstance(item[extension], Place) for item in listed for extension in ("wav", "txt")
    )
    tar.unlink()
    for item in listed:
        fetch(item)
    contents = [marked_item(number) for number in range(3)]
    assert [(item["wav"], item["txt"]) for item in listed] == [
        (wav, text) for (_, wav), (_, text) in contents
    ]
    del listed, item
    assert len(os.listdir("/proc/self/fd")) == before


def test_damage_anywhere_is_told_and_costs_what_is_behind_it(tar: Path, tmp_path: Path) -> None:
    """Truncated anywhere, with a changed byte in any header, or with blocks of zeros."""
    whole = tar.read_bytes()
    damaged = tmp_path / "damaged.tar"
    expected = [item["txt"] for item in items_of(tar)[0]]
    with tarfile.open(tar) as opened:
        members = opened.getmembers()
    closing = members[-1].offset_data + 512
    cuts = [*range(512, len(whole), 300), *(member.offset for member in members[1:]), closing]
    cases = {whole[:cut]: sum(m.offset_data + m.size <= cut for m in members) // 2 for cut in cuts}
    for number, offset in enumerate(member.offset for member in members):
        for content in (bytes([0xFF]) + whole[offset + 1 : offset + 512], bytes(512)):
            cases[whole[:offset] + content + whole[offset + 512 :]] = number // 2
    for content, num_items in cases.items():
        damaged.write_bytes(content)
        items, reported = items_of(damaged)
        assert [item["txt"] for item in items if "txt" in item] == expected[:num_items]
        assert len(reported) == (len(content) <= closing or len(content) == len(whole)), reported


def test_what_cannot_be_read_at_all_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("a.wav", "a.txt", "a.wav"):
            tar.addfile(tarfile.TarInfo(name))
    assert "duplicate file name" in items_of(path)[1][0]
    path.write_bytes(gzip.compress(path.read_bytes()))
    items, (reason,) = items_of(path)
    assert items == []
    assert "uncompressed" in reason
    path.unlink()
    assert "No such file" in items_of(path)[1][0]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_is_changed_in_a_tar_it_ends_and_nothing_escapes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in (*marked_item(1), ("ü" * 80 + ".txt", b"three")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    content = bytearray(buffer.getvalue()[:8192])
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    for start in range(
        0, len(content), 512
    ):  # valid checksums, so that more than the first byte is read
        if content[start + 257 : start + 262] == b"ustar" and data.draw(st.booleans()):
            content[start + 148 : start + 156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(content[start : start + 512])
    path = tmp_path_factory.mktemp("fuzz") / "a.tar"
    path.write_bytes(content)
    assert len(list(list_items(str(path), lambda name, reason: None))) < 20


@pytest.mark.parametrize(
    ("kind", "size"),
    [(tarfile.XHDTYPE, 10**5), (tarfile.XGLTYPE, 4 * 10**9), (tarfile.GNUTYPE_LONGNAME, 4 * 10**9)],
)
def test_extended_headers_that_take_all_time_or_memory_are_reported(
    tar: Path, kind: bytes, size: int
) -> None:
    header = tarfile.TarInfo("a.wav")
    header.type = kind
    header.size = size
    tar.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + b"1" * 10**5)
    os.truncate(tar, size + 10**6)
    items, reported = items_of(tar)
    assert items == []
    assert "a header has more than" in reported[0]
