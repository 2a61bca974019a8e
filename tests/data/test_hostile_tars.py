"""Test tars made to hang their reader, exhaust its memory or crash it."""

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.data.tar_samples import list_items

GOOD = [("a.txt", b"one"), ("a.wav", b"two")]


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
    for start in range(0, len(content), 512):  # valid checksums, so that more than the first byte is read
        if content[start + 257 : start + 262] == b"ustar" and data.draw(st.booleans()):
            content[start + 148 : start + 156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(content[start : start + 512])
    path = tmp_path_factory.mktemp("fuzz") / "a.tar"
    path.write_bytes(content)
    assert len(list(list_items(str(path), lambda name, reason: None))) < 20
