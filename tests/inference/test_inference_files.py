"""Test which files arguments name."""

import os
from pathlib import Path

import pytest

from clap_ds.inference.options import find_sources
from clap_ds.utils.errors import UserError
from tests.data.tars import marked_items, write_tar


def test_what_arguments_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("s/b.wav", "s/a/z.FLAC", "s/text.txt", "c.mp3", os.fsdecode(b"s/\xff.ogg")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    Path("list.csv").write_text("label,filename\ndog,s/b.wav\ncat,absent.wav\n")
    Path("bare.txt").write_text("c.mp3\ns/b.wav\n")
    write_tar(tmp_path / "0.tar", [*marked_items(range(2)), ("0005.png", b"")])
    for names, expected in (
        (["s"], ["s/a/z.FLAC", "s/b.wav", r"s/\xff.ogg"]),
        (["s/b.wav", "list.csv"], ["s/b.wav", "absent.wav"]),
        (["bare.txt"], ["c.mp3", "s/b.wav"]),
        (["*.tar"], ["0.tar: 0000", "0.tar: 0001", "0.tar: 0005"]),
    ):
        assert [*find_sources(names)] == expected, names
    for name in ("absent.wav", "x-*.tar"):
        with pytest.raises((UserError, ValueError)) as caught:
            find_sources([name])
        assert name in str(caught.value)
