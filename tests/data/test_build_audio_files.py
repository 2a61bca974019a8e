import io
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from clap_ds.data.shard_making import audio_files
from clap_ds.data.shard_making.audio_files import merge_same
from clap_ds.data.shard_making.caption_lists import Entry
from tests.data.builds import RATE, broken_in, items_by_source, run, tone, write_list
from tests.data.tars import items_in, wav

NOISE = np.random.default_rng(0).uniform(-0.5, 0.5, 8 * RATE)


def encoded(file_format: str, subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, NOISE, RATE, format=file_format, subtype=subtype)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "folder", "socket", "device", "dangling link"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody writes to would be waited for without end."""
    path = write_list(tmp_path, 2, "audio/odd.wav,odd\n")
    odd = tmp_path / "audio" / "odd.wav"
    if "pipe" in kind:
        os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        match kind:
            case "folder":
                odd.mkdir()
            case "socket":
                monkeypatch.chdir(odd.parent)  # a socket's path is short
                listener.bind("odd.wav")
            case _:
                odd.symlink_to({"device": "/dev/zero", "dangling link": "nowhere"}.get(kind, "../pipe"))
    assert run(path, tmp_path / "out") == 0
    assert ("No such file" if kind == "dangling link" else "isn't a regular file") in broken_in(tmp_path / "out")[
        "odd.wav"
    ]
    with (
        pytest.raises(audio_files.BrokenItemError),
        audio_files.open_regular(odd),
    ):  # as if put there after it was looked at
        pass


def test_files_that_are_the_same_are_one_item(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By whatever path they are reached; captions and other columns of all of them are kept."""
    more = "./audio/../audio/clip 00.wav,again,2\nlink/clip 01.wav,linked,2\nhard.wav,hard,2\ncopy.wav,copied,3\n"
    path = write_list(tmp_path, 4, more)
    path.write_text(path.read_text().replace("path,caption", "path,caption,take").replace("wav\n", "wav,1\n"))
    (tmp_path / "link").symlink_to("audio")
    os.link(tmp_path / "audio" / "clip 02.wav", tmp_path / "hard.wav")
    (tmp_path / "copy.wav").write_bytes((tmp_path / "audio" / "clip 02.wav").read_bytes())
    assert run(path, tmp_path / "out", "--held_out", 0.5) == 0
    printed = capsys.readouterr().out
    assert "4 file(s) hold the same as another" in printed
    assert f"copy.wav (= {tmp_path}/audio/clip 02.wav)" in printed
    found = {}
    for names, item in items_by_source(tmp_path / "out").items():
        described = json.loads(item["json"])
        found[names] = (described["caption"], described["take"])
    assert found == {
        "clip 00.wav": (["a tone clip 00.wav", "again"], ["1", "2"]),
        "clip 01.wav": (["a tone clip 01.wav", "linked"], ["1", "2"]),
        "clip 02.wav = hard.wav = copy.wav": (["a tone clip 02.wav", "hard", "copied"], ["1", "2", "3"]),
        "clip 03.wav": ("a tone clip 03.wav", "1"),
    }


def test_only_files_as_long_as_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whole only where their start is the same; what differs elsewhere stays two items."""
    long = NOISE.astype(np.float32).tobytes()
    nearly = long[:-1] + bytes([long[-1] ^ 1])
    contents = {"alone": b"x", "long": long, "nearly": nearly, "other": long[::-1], "same": long}
    entries = []
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        entries.append(Entry(tmp_path / name, [name]))
    read: dict[str, set[str]] = {"_start": set(), "_content": set()}
    for step, names in read.items():
        look = getattr(audio_files, step)
        monkeypatch.setattr(audio_files, step, lambda e, names=names, look=look: (names.add(e.path.name), look(e))[1])
    merged = merge_same(entries, 2)
    assert [(entry.path.name, entry.captions) for entry in merged] == [
        ("alone", ["alone"]), ("long", ["long", "same"]), ("nearly", ["nearly"]), ("other", ["other"])
    ]  # fmt: skip
    assert read == {"_start": {"long", "nearly", "other", "same"}, "_content": {"long", "nearly", "same"}}


FORMATS = [
    ("WAV", "PCM_16"), ("WAV", "FLOAT"), ("RF64", None), ("W64", None), ("AIFF", None), ("FLAC", None), ("MP3", None),
    ("OGG", "VORBIS"), ("OGG", "OPUS"),
]  # fmt: skip


@pytest.mark.parametrize(("file_format", "subtype"), FORMATS)
def test_files_whose_end_is_missing_are_broken(tmp_path: Path, file_format: str, subtype: str | None) -> None:
    content = encoded(file_format, subtype)
    cuts = {"whole": content, "most": content[: len(content) * 19 // 20], "third": content[: len(content) // 3]}
    rows = ""
    for name, cut in cuts.items():
        suffix = {"RF64": "wav"}.get(file_format, file_format.lower())
        (tmp_path / f"{name}.{suffix}").write_bytes(cut)
        rows += f"{name}.{suffix},{name}\n"
    (tmp_path / "list.csv").write_text("path,caption\n" + rows)
    assert run(tmp_path / "list.csv", tmp_path / "out") == 0
    assert [json.loads(item["json"])["caption"] for item in items_in(tmp_path / "out").values()] == ["whole"]
    reasons = broken_in(tmp_path / "out")
    assert len(reasons) == 2
    assert all("breaks off" in reason or "lost sync" in reason for reason in reasons.values())


def with_size(content: bytes, change: Callable[[int], int]) -> bytes:
    """A WAV whose header says another size of its data."""
    at = content.index(b"data") + 4
    return content[:at] + struct.pack("<I", change(int.from_bytes(content[at : at + 4], "little"))) + content[at + 4 :]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda size: 0xFFFFFFFF, None),  # ffmpeg to a pipe
        (lambda size: 0x7FFFF000, None),  # sox to a pipe
        (lambda size: size + 44, None),  # the header counted in
        (lambda size: size + 100, "breaks off: 256000 of the 256100 bytes"),
        (lambda size: 0, "a header that states 0 bytes"),
    ],
)
def test_sizes_in_the_headers_of_wavs(tmp_path: Path, change: Callable[[int], int], reason: str | None) -> None:
    (tmp_path / "a.wav").write_bytes(with_size(wav(NOISE, RATE, "PCM_16"), change))
    (tmp_path / "b.wav").write_bytes(wav(tone(1), RATE))
    (tmp_path / "list.csv").write_text("path,caption\na.wav,a\nb.wav,b\n")
    assert run(tmp_path / "list.csv", tmp_path / "out") == 0
    assert reason in broken_in(tmp_path / "out")["a.wav"] if reason else not broken_in(tmp_path / "out")
