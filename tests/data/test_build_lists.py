"""Test lists of audio files with captions in common formats, and errors for invalid ones."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from clap_ds.data.build_shards.caption_lists import (
    Entry,
    add_columns,
    read_entries,
    rows_of,
)
from clap_ds.utils.errors import UserError


def options_of(options: str = "") -> Namespace:
    parser = ArgumentParser()
    add_columns(parser)
    return parser.parse_args(options.split())


def read(path: Path, options: str = "") -> list[Entry]:
    return read_entries(path, options_of(options))


def captions_in(path: Path, options: str = "") -> dict[str, list[str]]:
    return {entry.path.name: entry.captions for entry in read(path, options)}


AB = {"a.wav": ["x"], "b.wav": ["y"]}
LISTS = {
    # file name, content, options, captions by audio file
    "excel": (
        "x.csv", "\ufeffpath;caption;;\r\na.wav;Glöckchen, nah;;\r\nb.wav;y;;\r\n;;;\r\n\r\n", "",
        {"a.wav": ["Glöckchen, nah"], "b.wav": ["y"]},
    ),
    "clotho": (
        "x.csv", 'file_name,caption_1,caption_2\n"a,  b\'s.wav",x,y\nc &#39;d.wav,z,w\n', "",
        {"a,  b's.wav": ["x", "y"], "c &#39;d.wav": ["z", "w"]},
    ),
    "sep of excel": ("x.csv", "sep=;\r\npath;caption\r\na.wav;x\r\nb.wav;y\r\n", "", AB),
    "delimiter in a heading": ("x.csv", 'path;caption;"tags, a, b, c"\na.wav;x;1\nb.wav;y;2\n', "", AB),
    "duplicate headings of pandas": ("x.csv", "path,caption,caption.1\na.wav,x,y\n", "", {"a.wav": ["x", "y"]}),
    "rows of a file": ("x.csv", "file,caption_1,caption_2\na.wav,x,\n./a.wav,z,y\n", "", {"a.wav": ["x", "z", "y"]}),
    "jsonl": (
        "x.jsonl", '{"path": "a.wav", "captions": ["x", "y", "x"]}\n\n{"path": "b.wav", "text": "z"}', "",
        {"a.wav": ["x", "y"], "b.wav": ["z"]},
    ),
    "json array": ("x.json", '[{"path": "a.wav", "captions": ["x"]},\n {"path": "b.wav", "text": "y"}]', "", AB),
    "wavcaps": (
        "x.json", '{"data": [\n{"id": "a", "caption": "x"}, {"id": "b", "caption": "y"}]}', "--audio_column {id}.wav", AB,
    ),
    "to_json of the hub": ("x.json", '{"path": "a.wav", "caption": "x"}\n{"path": "b.wav", "caption": "y"}\n', "", AB),
    "index of pandas": ("x.csv", ",path,caption\n0,a.wav,x\n1,b.wav,y\n", "", AB),
    "esc50": (
        "x.csv", "filename,fold,category\n1-100032-A-36.wav,1,vacuum_cleaner\n", "--caption_columns category",
        {"1-100032-A-36.wav": ["vacuum cleaner"]},
    ),
    "template of columns": (
        "x.csv", "youtube_id,start_time,caption\nvfY_TJq7n_U,130,Rustling\n", "--audio_column {youtube_id}_{start_time}.wav",
        {"vfY_TJq7n_U_130.wav": ["Rustling"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "options", "captions"), LISTS.values(), ids=LISTS)
def test_list_in_common_format_has_captions(tmp_path, name, content, options, captions):
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert captions_in(tmp_path / name, options) == captions


def test_multilabel_column_becomes_list(tmp_path):
    (tmp_path / "list.csv").write_text('path,labels\n0.wav,"Car_horn, Music"\n')
    (entry,) = read(tmp_path / "list.csv", "--caption_columns labels --multilabel_column labels")
    assert entry.more["labels"] == ["Car_horn", "Music"]
    assert entry.captions == ["Car horn", "Music"]


@pytest.mark.parametrize("source", ["a.txt", "a.wav", "list.csv"])
def test_file_outside_folder_needs_follow_links(tmp_path, source):
    """Links of others could make a private file public. The folder itself may be a link, and a
    list's paths absolute."""
    target = tmp_path / "target"
    private = tmp_path / "private.wav"
    target.mkdir()
    sounds = tmp_path / "sounds"
    sounds.symlink_to(target)
    for name in "ab":
        (target / f"{name}.wav").touch()
        (target / f"{name}.txt").write_text(name)
    (target / ("a.wav" if source == "list.csv" else source)).rename(private)
    if source == "list.csv":
        sounds /= source
        sounds.write_text(f"path,caption\n../private.wav,x\n{target}/b.wav,y\n")
    else:
        (target / source).symlink_to(private)
    problems = {entry.path.name: entry.problem for entry in read(sounds)}
    assert problems.pop("b.wav") == ""
    (problem,) = problems.values()
    assert "--follow_links" in problem
    assert [entry.problem for entry in read(sounds, "--follow_links")] == ["", ""]


@pytest.mark.parametrize(
    ("suffix", "content", "captions", "problem"),
    [
        ("txt", "a sound\n\nanother\n", ["a sound", "another"], ""),
        ("json", '{"text": ["A dog barks.", "A bark"]}', ["A dog barks.", "A bark"], ""),
        ("text", "a sound", [], "expected a.txt or a.json"),
        ("txt", "", [], "empty caption"),
    ],
)
def test_folder_has_caption_files_beside_audio(tmp_path, suffix, content, captions, problem):
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / "a.wav").touch()
    (tmp_path / "within" / f"a.{suffix}").write_text(content)
    (entry,) = read(tmp_path)
    assert entry.captions == captions
    assert problem in entry.problem


MISTAKES = [
    # content, options or suffix, message; CSV by default
    ("path,caption\n", "", "no rows"),
    ("url,caption\nx,y\n", "", "--audio_column"),
    ("path,caption\nx,y\n", "--caption_columns captoin", "did you mean 'caption'"),
    ("path,caption\na.wav,b\n\na.wav,b,c\n", "", "list.csv:4"),
    ("path,caption\nx,Gl\u00f6ckchen\n", "", "UTF-8"),
    ('{"path": "x"\n', "jsonl", "list.jsonl:1: expected a JSON object"),
    ('[{"path": "x", "text": "a", "text": "b"}]', "json", "'text' appears twice"),
    ('["x"]', "json", "array of objects"),
    ("path,caption,a note,A  Note\na.wav,x,y,z\n", "", "'anote'"),
    ("path,caption,\na.wav,x,\nb.wav,y,z\n", "", "list.csv:3: 'z' is in a column without a heading"),
    ('path,caption\na.wav,"x\ny"\nb.wav\n', "", "list.csv:4: expected 2 fields"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "options", "message"), MISTAKES)
def test_malformed_list_is_refused(tmp_path, content, options, message):
    suffix = options if options.startswith("json") else "csv"
    path = tmp_path / f"list.{suffix}"
    path.write_bytes(content.encode("cp1252"))
    with pytest.raises(UserError, match=message):
        read(path, "" if suffix == options else options)


QUOTES = [
    # rows, and the first line of the row with unmatched quotes
    ('a.wav,x\nb.wav,"not closed\nc.wav,"a caption, with a comma"\n', 3),
    ('a.wav,"one\ntwo ""three"""\nb.wav,x\nc.wav,"bad" quote\n', 5),
]


@pytest.mark.parametrize(("rows", "line"), QUOTES)
def test_csv_with_unmatched_quote_names_line_of_row(tmp_path, rows, line):
    path = tmp_path / "list.csv"
    path.write_text(f"path,caption\n{rows}")
    with pytest.raises(UserError, match=rf"list.csv:{line}: quotes"):
        rows_of(path)
