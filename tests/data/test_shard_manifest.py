import gzip
import io
import os
import re
import sys
import tarfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFile
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.config.model import ClapConfig
from clap_ds.data import shard_manifest
from clap_ds.data.shard_assignment import expand_sources
from clap_ds.data.shard_io import Kind, check_url
from clap_ds.data.shard_manifest import (
    FrontEnd,
    Item,
    Place,
    ShardManifest,
    ShardRecord,
    fetch,
    front_end_of,
    list_items,
    read_manifest,
    samples_of,
    write_manifest,
)  # fmt: skip
from tests.data.tars import marked_item, marked_items, marked_tars, put, write_tar


def test_patterns_name_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [str(write_tar(Path(f"a-{number:02d}.tar"), [])) for number in range(9, 12)]
    for shards in ("a-{09..11}.tar", ["a-09.tar", "a-{10,11}.tar"], "a-*.tar"):
        assert shard_manifest.expand_shards(shards) == names


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("a-{08..12}.tar", r"a-08\.tar does not exist"),
        ("b-*.tar", "no file matches"),
        (".", "a folder"),
        ("memory://nowhere/*.tar", "no file matches"),
        ("gopher://host/a.tar", "gopher"),
        ("s3://bucket/a.tar", "s3fs"),
        ("s3://key:secret@bucket/a.tar", "s3 URL of bucket contains credentials"),
    ],
)
def test_shards_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, shards: str | list[str] | dict[str, float], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=rf"clap\.data\.shards: .*{message}") as error:
        expand_sources(shards)
    assert "secret" not in str(error.value)
    check_url("memory://container@account/a.tar")  # no credentials


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *product(("items", "bytes", "seconds"), ("-5", "true", '"3"', "NaN", "1e999")),
        ("items", "1.0"),
        ("items", "1" + "0" * 16),
    ],
)
def test_a_manifest_with_an_impossible_number_is_refused(
    tmp_path: Path, field: str, value: str
) -> None:
    known = '"items": 1, "bytes": 2, "seconds": 0.5, "sha256": ""'
    record = re.sub(rf'"{field}": [^,]*', f'"{field}": {value}', known)
    (tmp_path / "manifest.json").write_text(f'{{"shards": {{"a.tar": {{{record}}}}}}}')
    with pytest.raises(ValueError, match=r"manifest\.json can't be read"):
        read_manifest(str(tmp_path))


def test_a_pipe_among_shards_is_named_as_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(ValueError, match=r"a\.tar is not a regular file"):
        shard_manifest.expand_shards(str(tmp_path / "*.tar"))


def test_samples_of(tmp_path: Path) -> None:
    """From the manifest, or else from local tars' items with audio and a possible caption."""
    marked_tars(tmp_path, 2, 5)
    partial = [
        ("x.wav", b"no caption"),
        ("y.txt", b"no audio"),
        ("z.jpg", b""),
        ("e.FLAC", b""),
        ("e.json", b""),
    ]
    write_tar(tmp_path / "002.tar", [*marked_item(1), *partial])
    tars = [str(tmp_path / f"{tar:03d}.tar") for tar in range(3)]
    assert samples_of(tars) == [5, 5, 2]
    write_manifest(
        tmp_path,
        ShardManifest({"000.tar": ShardRecord(items=700, bytes=0, seconds=0.0, sha256="")}),
    )
    assert samples_of(tars) == [700, 5, 2]
    unknown = sum(Path(tar).stat().st_size for tar in tars[1:])
    assert (samples_of(tars, unknown), samples_of(tars, unknown - 1)) == ([700, 5, 2], None)
    url = put("memory://unknown/a.tar", (tmp_path / "000.tar").read_bytes())
    assert samples_of([url]) is None
    put(
        "memory://unknown/manifest.json",
        (tmp_path / "manifest.json").read_bytes().replace(b"000.tar", b"a.tar"),
    )
    assert samples_of([url]) == [700]


def test_kind_of(tmp_path: Path, micro: ClapConfig) -> None:
    own = front_end_of(micro.audio)
    shards = {"000.tar": ShardRecord(1, 0, 0.0, "")}
    kinds: dict[str, tuple[Any, FrontEnd | None]] = {
        "bare": ("encoded", None),
        "plain": ("encoded", None),
        "wav": ("waveform", own | {"mel_bins": 99}),  # left to the model
        "mel": ("mel", own),
        "slow": ("waveform", own | {"sample_rate": 16000}),
        "other": ("mel", own | {"fmin": 0.0, "mel_bins": 99}),
    }
    for name, (kind, front_end) in kinds.items():
        marked_tars(tmp_path / name, 2, 1)
        if name != "bare":
            write_manifest(tmp_path / name, ShardManifest(shards, kind, front_end))

    def kind(*names: str) -> Kind:
        return shard_manifest.kind_of([f"{tmp_path}/{name}/000.tar" for name in names], micro)

    assert [kind("plain"), kind("bare"), kind("wav"), kind("mel")] == [
        "encoded",
        "encoded",
        "waveform",
        "mel",
    ]
    assert kind("wav", "bare") == kind("plain", "wav") == "encoded"
    for names, message in {
        ("wav", "mel"): "can't be mixed",
        ("slow",): "sample_rate is 16000, not 48000",
        ("other",): "mel_bins is 99, not 16, fmin",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            kind(*names)


@pytest.mark.parametrize("recorded", [{}, {"resampling": "another"}])
def test_kind_of_warns_of_shards_prepared_with_another_resampling_filter(
    tmp_path: Path, micro: ClapConfig, capsys: pytest.CaptureFixture[str], recorded: dict[str, str]
) -> None:
    former = {**front_end_of(micro.audio), **recorded}
    if not recorded:
        del former["resampling"]  # manifests before filters were recorded
    manifests: dict[str, tuple[Any, FrontEnd | None]] = {
        "now": ("waveform", front_end_of(micro.audio)),
        "bare": ("encoded", None),
        "former": ("waveform", former),
    }
    for name, (kind, front_end) in manifests.items():
        marked_tars(tmp_path / name, 1, 1)
        write_manifest(
            tmp_path / name, ShardManifest({"000.tar": ShardRecord(1, 0, 0.0, "")}, kind, front_end)
        )
    tars = [f"{tmp_path}/{name}/000.tar" for name in manifests]
    shard_manifest.kind_of(tars, micro)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/former" in line
    assert "clap-ds shards prepare" in line
    shard_manifest.kind_of(tars, micro, warns=False)
    shard_manifest.kind_of(tars[:2], micro)
    assert not capsys.readouterr().err


def test_only_a_manifest_that_is_not_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    put(
        "memory://flaky/manifest.json",
        b'{"shards": {"a": {"items": 7, "bytes": 0, "seconds": 0, "sha256": ""}}}',
    )
    read = MemoryFile.read
    failures = [ConnectionResetError("reset")] * 4
    monkeypatch.setattr(
        MemoryFile, "read", lambda *to: _raise(failures.pop()) if failures else read(*to)
    )
    assert read_manifest("memory://flaky").shards["a"].items == 7
    unreachable = FileNotFoundError("as fsspec raises it for HTTP")
    unreachable.__cause__ = ConnectionResetError("reset")
    for error in (unreachable.__cause__, unreachable):
        failures[:] = [error] * 5
        with pytest.raises(ValueError, match="reset"):
            read_manifest("memory://flaky")
    put("memory://strange/manifest.json", b'{"shards": {}, "kind": "strange"}')
    with pytest.raises(
        ValueError, match=r"manifest.json can't be read: .* 'waveform' or 'mel'.*strange"
    ):
        read_manifest("memory://strange")
    put("memory://other/manifest.json", b'["something else"]')
    assert read_manifest("memory://none") == read_manifest("memory://other") == ShardManifest({})


def _raise(error: Exception) -> bytes:
    raise error


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
