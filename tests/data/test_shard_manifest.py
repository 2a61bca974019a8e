import gzip
import os
import sys
import tarfile
from pathlib import Path

import pytest

from clap_ds.config.model import ClapConfig
from clap_ds.config.urls import check_url
from clap_ds.data.shard_assignment import expand_sources
from clap_ds.data.shard_manifest import (
    Item,
    ShardManifest,
    ShardRecord,
    expand_shards,
    fetch,
    front_end_of,
    kind_of,
    list_items,
    read_manifest,
    samples_of,
    write_manifest,
)
from tests.data.tars import marked_item, marked_items, put, write_tar


@pytest.mark.parametrize(
    "shards", ["a-{09..11}.tar", ["a-09.tar", "a-{10,11}.tar"], "a-*.tar", "file://a-*.tar"]
)
def test_patterns_name_files_in_order(tmp_path, monkeypatch, shards):
    monkeypatch.chdir(tmp_path)
    for number in (10, 9, 11):
        Path(f"a-{number:02d}.tar").touch()
    assert expand_shards(shards) == ["a-09.tar", "a-10.tar", "a-11.tar"]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("a-{08..12}.tar", r"a-08\.tar does not exist"),
        ("b-*.tar", "no file matches"),
        (".", "a folder"),
        ("pipe.*", r"pipe\.tar is not a regular file"),
        ({}, "empty list"),
        ("s3://bucket/a.tar", r"clap-ds\[s3\]"),
        ("s3://key:secret@bucket/a.tar", "s3 URL of bucket contains credentials"),
    ],
)
def test_missing_shards_are_named(tmp_path, monkeypatch, shards, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.tar")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=rf"clap\.data\.shards: .*{message}") as error:
        expand_sources(shards)
    assert "secret" not in str(error.value)


def test_url_with_container_has_no_credentials():
    check_url("memory://container@account/a.tar")


@pytest.mark.parametrize("number", ["-5", "1" + "0" * 16, "true"])
def test_manifest_with_impossible_number_is_refused(tmp_path, number):
    record = f'"items": {number}, "bytes": 2, "seconds": 0.5, "sha256": ""'
    (tmp_path / "manifest.json").write_text(f'{{"shards": {{"a.tar": {{{record}}}}}}}')
    with pytest.raises(ValueError, match=r"manifest\.json can't be read"):
        read_manifest(str(tmp_path))


def record_of(num_items: int) -> ShardRecord:
    return ShardRecord(num_items, bytes=0, seconds=0.0, sha256="")


def test_samples_are_counted_from_manifest_or_headers(tmp_path):
    """A sample has audio and a possible caption."""
    names = ("x.wav", "y.txt", "z.jpg", "e.FLAC", "e.json")
    write_tar(tmp_path / "0.tar", [*marked_item(1), *((name, b"") for name in names)])
    write_tar(tmp_path / "1.tar", marked_item(1))
    tars = [str(tmp_path / "0.tar"), str(tmp_path / "1.tar")]
    assert samples_of(tars) == [2, 1]
    write_manifest(tmp_path, ShardManifest({"1.tar": record_of(700)}))
    uncounted_bytes = Path(tars[0]).stat().st_size
    assert samples_of(tars, uncounted_bytes) == [2, 700]
    assert samples_of(tars, uncounted_bytes - 1) is None
    manifest = (tmp_path / "manifest.json").read_bytes()
    url = put("memory://counted/1.tar", b"")
    assert samples_of([url]) is None
    put("memory://counted/manifest.json", manifest)
    assert samples_of([url]) == [700]


@pytest.fixture
def folders(tmp_path: Path, micro: ClapConfig) -> Path:
    """Write manifests of several kinds and front ends."""
    front_end = front_end_of(micro.audio)
    shards = {"0.tar": record_of(1)}
    manifests = {
        # Its mel bins are left to the model.
        "wav": ShardManifest(shards, "waveform", front_end | {"mel_bins": 99}),
        "mel": ShardManifest(shards, "mel", front_end),
        "slow": ShardManifest(shards, "waveform", front_end | {"sample_rate": 16000}),
        "other": ShardManifest(shards, "mel", front_end | {"fmin": 0.0, "mel_bins": 99}),
        "filter": ShardManifest(shards, "waveform", front_end | {"resampling": "another"}),
    }
    for name, manifest in manifests.items():
        (tmp_path / name).mkdir()
        write_manifest(tmp_path / name, manifest)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "kind"),
    # `bare` has no manifest.
    [(["wav"], "waveform"), (["mel"], "mel"), (["wav", "bare"], "encoded")],
)
def test_kind_is_that_of_manifests(folders, micro, names, kind):
    assert kind_of([f"{folders}/{name}/0.tar" for name in names], micro) == kind


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["wav", "mel"], "can't be mixed"),
        (["slow"], "sample_rate is 16000, not 48000"),
        (["other"], "mel_bins is 99, not 16, fmin"),
    ],
)
def test_kind_that_does_not_fit_is_refused(folders, micro, names, message):
    with pytest.raises(ValueError, match=message):
        kind_of([f"{folders}/{name}/0.tar" for name in names], micro)


def test_another_resampling_filter_is_warned_of(folders, micro, capsys):
    tars = [f"{folders}/{name}/0.tar" for name in ("wav", "bare", "filter")]
    kind_of(tars, micro)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folders}/filter" in line
    assert "clap-ds shards prepare" in line


def test_manifest_of_others_is_ignored_and_invalid_one_refused():
    put("memory://other/manifest.json", b'["something else"]')
    assert read_manifest("memory://none") == read_manifest("memory://other") == ShardManifest({})
    put("memory://strange/manifest.json", b'{"shards": {}, "kind": "strange"}')
    with pytest.raises(ValueError, match=r"manifest.json can't be read: .* 'mel'.*strange"):
        read_manifest("memory://strange")


def read_items(path: Path) -> tuple[list[Item], list[str]]:
    """Return the items with contents, and the reported problems."""
    problems: list[str] = []
    items = list(list_items(str(path), lambda name, reason: problems.append(reason)))
    for item in items:
        fetch(item)
    return items, problems


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "a.tar", marked_items(range(3)))


def test_damaged_tar_is_reported_and_read_to_the_damage(tar):
    whole = tar.read_bytes()
    with tarfile.open(tar) as opened:
        members = opened.getmembers()
    # after the content of each item's two members
    ends = [member.offset_data + member.size for member in members[1::2]]
    closing = members[-1].offset_data + 512
    # truncated anywhere, or with a block of zeros in place of a header
    cases = [(whole[:cut], cut) for cut in (*range(512, closing, 300), closing)]
    for member in members[1:]:
        offset = member.offset
        cases.append((whole[:offset] + bytes(512) + whole[offset + 512 :], offset))
    for content, damage in cases:
        tar.write_bytes(content)
        items, problems = read_items(tar)
        texts = [item["txt"] for item in items if "txt" in item]
        assert texts == [b"tone 0", b"tone 1", b"tone 2"][: sum(end <= damage for end in ends)]
        assert len(problems) == 1
    # Some writers end with less padding.
    tar.write_bytes(whole[: closing + 300])
    assert read_items(tar)[1] == []


def test_unreadable_tar_is_reported(tar):
    write_tar(tar, [("a.wav", b""), ("a.txt", b""), ("a.wav", b"")])
    assert "duplicate file name" in read_items(tar)[1][0]
    tar.write_bytes(gzip.compress(tar.read_bytes()))
    assert "uncompressed" in read_items(tar)[1][0]
    tar.unlink()
    assert "No such file" in read_items(tar)[1][0]


def test_header_that_points_backwards_ends_tar(tar):
    header = tarfile.TarInfo("a.wav").tobuf()
    # a negative number of bytes, in base 256
    header = header[:124] + b"\xff" * 10 + b"\xf8\0" + b" " * 12 + header[148:]
    checksum = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    tar.write_bytes(header[:148] + b"%06o\0 " % checksum + header[156:] + bytes(1024))
    _, (problem,) = read_items(tar)
    assert "backwards" in problem


@pytest.mark.parametrize(
    ("kind", "size"),
    [(tarfile.XHDTYPE, 10**5), (tarfile.GNUTYPE_LONGNAME, 4 * 10**9)],
)
def test_huge_extended_header_is_reported(tar, kind, size):
    header = tarfile.TarInfo("a.wav")
    header.type = kind
    header.size = size
    tar.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + b"1" * 10**5)
    os.truncate(tar, size + 10**6)
    items, problems = read_items(tar)
    assert items == []
    assert "a header has more than" in problems[0]
