"""Which files are named, and a table that is made in parts: stopped, resumed, refused."""

import errno
import io
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clap_ds.config.errors import UserError
from clap_ds.inference import parts as module
from clap_ds.inference.files import find_sources
from clap_ds.inference.model import Row
from clap_ds.inference.parts import Parts
from clap_ds.inference.vectors import block_of, joined, read_table
from tests.data.tars import marked_items, write_tar
from tests.inference.test_vectors import ABOUT

BEGUN = replace(ABOUT, files="")


def test_what_arguments_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("s/b.wav", "s/a/z.FLAC", "s/text.txt", "c.mp3", os.fsdecode(b"s/\xff.ogg")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    Path("list.csv").write_text("label,filename\ndog,s/b.wav\ncat,absent.wav\n")
    Path("bare.txt").write_text("c.mp3\ns/b.wav\n")
    Path("headed.txt").write_text("sound\nc.mp3\n")
    write_tar(tmp_path / "0.tar", [*marked_items(range(2)), ("0005.png", b"")])
    for names, expected in (
        (["s"], ["s/a/z.FLAC", "s/b.wav", r"s/\xff.ogg"]),
        (["s/b.wav", "list.csv"], ["s/b.wav", "absent.wav"]),
        (["bare.txt"], ["c.mp3", "s/b.wav"]),
        (["headed.txt"], ["c.mp3"]),
        (["*.tar"], ["0.tar: 0000", "0.tar: 0001", "0.tar: 0005"]),
    ):
        assert [*find_sources(names)] == expected, names
    Path("two.csv").write_text("id,label\n1,dog\n")
    Path("empty").mkdir()
    for name, message in (
        ("absent.wav", "absent.wav: no such file or folder; expected a folder, an audio file"),
        ("s/text.txt", "s/text.txt: no rows in it"),
        ("two.csv", "two.csv: no column named path, audio_path, file"),
        ("empty", "empty: no audio files"),
        ("x-*.tar", "no file matches 'x-*.tar'"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            find_sources([name])


def made_of(name: str) -> list[Row]:
    """A row that only this file has; two of files with an even number, none that can be used of each fifth."""
    number = int(Path(name).stem)
    vector = None if number % 5 == 4 else np.eye(4, dtype=np.float32)[number % 4] * np.float32(number + 1)
    row = Row(name, 0.0, 10.0, vector, "audio is silent" if vector is None else "")
    return [row, replace(row, start_s=5.0, end_s=15.0)] if vector is not None and number % 2 == 0 else [row]


def embed(names: list[str], asked_for: list[str]) -> Iterator[Row]:
    for name in names:
        asked_for.append(name)
        yield from made_of(name)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(module, "PART_ROWS", 4)
    paths = [tmp_path / f"{number:03d}.wav" for number in range(30)]
    for path in paths:
        path.write_bytes(b"sound")
    return {str(path): path for path in paths}


def run(output: Path, files: dict[str, Any], world_size: int = 1, stop_after: int | None = None) -> list[str]:
    """As the command does on so many ranks, one after the other: files that were embedded; none where the table is there."""
    parts, asked_for = Parts(output, BEGUN), list[str]()
    try:
        if (begun := parts.begin(files)) is None:
            return []
        marks, todo = begun
        for rank in range(world_size):
            for number, _ in enumerate(parts.write(embed([*todo][rank::world_size], asked_for), marks)):
                if number == stop_after:
                    return asked_for
        num_rows, left_out = parts.join(marks)
    finally:
        parts.close()
    expected, found = [row for name in files for row in made_of(name)], joined(list(read_table(output)[2]))
    assert left_out == [(row.source, row.error) for row in expected if row.vector is None]
    assert num_rows == len(expected)
    for name, column in found._asdict().items():
        np.testing.assert_array_equal(column, getattr(block_of(expected, 4), name), err_msg=name)
    assert not parts.folder.exists()
    return asked_for


def test_any_number_of_ranks_goes_on_where_others_stopped(tmp_path: Path, files: dict[str, Any]) -> None:
    output = tmp_path / "vectors.npz"
    first = run(output, files, stop_after=17)
    assert not output.exists()
    second = run(output, files, world_size=3, stop_after=4)
    os.utime(tmp_path / "003.wav", (1, 1))
    third = run(output, files, world_size=2)
    assert {*first, *second, *third} == {*files}
    assert len(set(first) & set(third)) < 6, "no more than the last part and what has changed"
    assert str(tmp_path / "003.wav") in third
    assert run(output, files) == []


def test_slow_rows_are_kept_before_a_part_is_full(
    tmp_path: Path, files: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr(module, "PART_ROWS", 1000)
    monkeypatch.setattr(module, "monotonic", lambda: 20.0 * next(now))
    first = run(tmp_path / "vectors.npz", files, stop_after=17)
    second = run(tmp_path / "vectors.npz", files)
    assert 1 <= len({*first} & {*second}) <= 3, "no more than a minute's"


def test_what_others_made_is_refused(tmp_path: Path, files: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "vectors.npz"
    run(output, files, stop_after=20)
    monkeypatch.setitem(globals(), "BEGUN", replace(BEGUN, fingerprint="beef", overlap=0.0))
    with pytest.raises(
        ValueError, match=r"parts is there already: fingerprint 'f00d', now 'beef'; overlap 0.5, now 0.0"
    ):
        run(output, files)
    monkeypatch.undo()
    holder = Parts(output, BEGUN)
    holder.begin(files)
    with pytest.raises(ValueError, match="is held by host"):
        Parts(output, BEGUN).begin(files)
    holder.close()
    run(output, files)
    with pytest.raises(ValueError, match=r"vectors.npz is there already: of other files; delete it"):
        run(output, {name: path for name, path in files.items() if "001" not in name})


def test_a_full_disk_keeps_what_is_finished(
    tmp_path: Path, files: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, written = tmp_path / "vectors.npz", list[io.BufferedWriter]()

    def full(file: Any, *rest: Any, **more: Any) -> None:
        written.append(file)
        write_table(file, *rest, **more)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    write_table = module.write_table
    monkeypatch.setattr(module, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        run(output, files)
    assert sorted(path.suffix for path in output.with_name("vectors.npz.parts").iterdir()) == [".npz"] * 3
    monkeypatch.setattr(module, "write_table", write_table)
    again = run(output, files)
    assert len(again) < len(files)
