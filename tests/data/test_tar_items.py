import gzip
from pathlib import Path

import pytest

from clap_ds.data.tar_items import ContentReader, Item, Place, fetch, read_items
from tests.data.tars import marked_item, marked_items, put, write_tar


def items_of(path: Path, *, leave: bool = False) -> tuple[list[Item], list[str]]:
    reported: list[str] = []
    items = list(read_items(str(path), lambda name, reason: reported.append(reason), leave=lambda member: leave))
    return items, reported


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "a.tar", marked_items(range(3)))


def test_content_left_in_the_tar_is_fetched_later(tar: Path) -> None:
    read, left = items_of(tar)[0], items_of(tar, leave=True)[0]
    assert read[1]["wav"] == dict(marked_item(1))["0001.wav"]
    assert all(isinstance(item[name], Place) for item in left for name in ("wav", "txt"))
    for item in left:
        fetch(item)
    assert left == read


def test_damaged_tars_give_the_same_items_either_way(tar: Path, tmp_path: Path) -> None:
    """Cut anywhere, or with a byte changed in any header: places in the order of passes must not depend on what was read."""
    whole = tar.read_bytes()
    damaged = tmp_path / "damaged.tar"
    changed = [bytearray(whole) for _ in range(len(whole) // 512)]
    for block, content in enumerate(changed):
        content[512 * block + 150] ^= 0xFF  # in a header's checksum
    for content in [*(whole[:size] for size in range(512, len(whole), 128)), *changed]:
        damaged.write_bytes(content)
        read, left = items_of(damaged), items_of(damaged, leave=True)
        assert [item["__key__"] for item in read[0]] == [item["__key__"] for item in left[0]]
        assert read[1] == left[1]


def test_content_of_any_tar_can_be_left_and_read_in_any_order(tar: Path, tmp_path: Path) -> None:
    expected = items_of(tar)[0]
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress(tar.read_bytes()))
    at_once, reported = items_of(
        packed, leave=True
    )  # what is compressed is read at once, where it isn't wanted in any order
    assert [item["wav"] for item in at_once] == [item["wav"] for item in expected]
    assert not reported
    url = put("memory://tar_items/a.tar", tar.read_bytes())
    reader = ContentReader()
    for shard in (str(tar), str(packed), url):
        items = list(read_items(shard, pytest.fail, leave=lambda member: member.endswith(".wav"), any_order=True))
        assert [item["txt"] for item in items] == [item["txt"] for item in expected]
        for left, read in reversed(list(zip(items, expected, strict=True))):
            assert reader.read(shard, left["wav"]) == read["wav"]
        place = items[-1]["wav"]
        with pytest.raises(EOFError, match="the tar ends within it"):
            reader.read(shard, place._replace(size=20000))
    reader.close()
    packed.write_bytes(packed.read_bytes()[:-50])
    assert len(items_of(packed)[1]) == 1
