"""Tars that were made to hang, fill or end their reader: what can be read of them is used, and the rest is told."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.data.tar_items import list_items, read_items

GOOD = [("a.txt", b"one"), ("a.wav", b"two")]


def _header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def _file(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    return _header(name, len(content), kind) + content + bytes(-len(content) % 512)


def _pax(field: str) -> bytes:
    """A header of a further field, of fewer than 90 bytes."""
    return _file("pax", f"{len(field) + 4} {field}\n".encode(), tarfile.XHDTYPE)


FIRST = b"".join(_file(*each) for each in GOOD)
LAST = _file("z.txt", b"never met")
ATTACKS: dict[str, Callable[[], bytes]] = {
    "negative size": lambda: _header("b.txt", -512) + LAST,
    "a header that leads back to itself": lambda: _pax("size=-1536") + _file("b.txt", b"") + LAST,
    "chained headers": lambda: 20_000 * _pax("comment=x") + LAST,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_rest_is_told_and_what_was_before_is_used(tmp_path: Path, attack: str) -> None:
    path, told = tmp_path / "a.tar", list[str]()
    path.write_bytes(FIRST + ATTACKS[attack]() + bytes(1024))
    items = list(read_items(str(path), lambda name, reason: told.append(reason)))
    assert [item["__key__"] for item in items if {"txt", "wav"} <= item.keys()] == ["a"]
    assert told


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_is_changed_it_ends_and_nothing_escapes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in (*GOOD, ("ü" * 80 + ".txt", b"three")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    content = bytearray(buffer.getvalue()[:6144])
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    for start in range(0, len(content), 512):  # right checksums, so that more than the first byte is looked at
        if content[start + 257 : start + 262] == b"ustar" and data.draw(st.booleans()):
            content[start + 148 : start + 156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(content[start : start + 512])
    path = tmp_path_factory.mktemp("fuzz") / "a.tar"
    path.write_bytes(content)
    assert len(list(list_items(str(path), lambda name, reason: None))) < 20
