"""Test lists of audio files with captions in common formats, and errors for invalid ones."""

import json
from pathlib import Path

import pytest

from clap_ds.data.build_shards.caption_lists import rows_of
from clap_ds.utils.errors import UserError
from tests.data.builds import items_by_source, reasons_in, run, tone
from tests.data.tars import wav


def described_in(folder: Path) -> dict[str, dict[str, object]]:
    return {name: json.loads(item["json"]) for name, item in items_by_source(folder).items()}


LISTS = {  # list name, content, encoding, options, captions by audio file name
    "excel": (
        "x.csv", "path;caption;;\r\n{};Glöckchen, nah;;\r\n{};Regen;;\r\n;;;\r\n\r\n", "utf-8-sig", "",
        {"a.wav": "Glöckchen, nah", "b.wav": "Regen"},
    ),
    "names_as_in_clotho": (
        "x.csv", 'file_name,caption_1,caption_2\n"{}",x,y\n{},z,w\n', "utf-8", "",
        {"a,  b's.wav": ["x", "y"], "c &#39;d.wav": ["z", "w"]},
    ),
    "sep_of_excel": ("x.csv", "sep=;\r\npath;caption\r\n{};x\r\n{};y\r\n", "utf-8", "", {"a.wav": "x", "b.wav": "y"}),
    "delimiter_in_a_heading": (
        "x.csv", 'path;caption;"tags, a, b, c"\n{};x, y;1\n{};z;2\n', "utf-8", "", {"a.wav": "x, y", "b.wav": "z"},
    ),
    "headings_as_pandas_numbers_them": (
        "x.csv", "path,caption,caption.1\n{},x,y\n{},z,w\n", "utf-8", "", {"a.wav": ["x", "y"], "b.wav": ["z", "w"]},
    ),
    "descriptions_beside_captions": (
        "x.csv", "path,description,caption\n{},no,x\n{},no,y\n", "utf-8", "", {"a.wav": "x", "b.wav": "y"},
    ),
    "tabs": ("x.tsv", "path\tcaption\n{}\tx, y\n{}\tz\n", "utf-8", "", {"a.wav": "x, y", "b.wav": "z"}),
    "two_rows_of_a_file": (
        "x.csv", "file,caption_1,caption_2\na.wav,x,\n{},z,y\n{},w,\n", "utf-8", "", {"a.wav": list("xzy"), "b.wav": "w"},
    ),
    "jsonl": (
        "x.jsonl", '{{"path": "{}", "captions": ["x", "y", "x"]}}\n\n{{"path": "{}", "text": "z"}}',
        "utf-8", "", {"a.wav": list("xy"), "b.wav": "z"},
    ),
    "json_array": (
        "x.json", '[{{"path": "{}", "captions": ["x", "y"]}},\n {{"path": "{}", "text": "z"}}]',
        "utf-8-sig", "", {"a.wav": list("xy"), "b.wav": "z"},
    ),
    "wavcaps": (
        "x.json", '{{"num_captions_per_audio": 1, "data": [\n{{"id": "1", "caption": "x"}}, {{"id": "2", "caption": "y"}}]}}',
        "utf-8", "--audio_column {id}.wav", {"1.wav": "x", "2.wav": "y"},
    ),
    "hub_to_json": (
        "x.json", '{{"path": "{}", "caption": "x"}}\n{{"path": "{}", "caption": "y"}}\n', "utf-8", "",
        {"a.wav": "x", "b.wav": "y"},
    ),
    "pandas_index": ("x.csv", ",path,caption\n0,{},x\n1,{},y\n", "utf-8", "", {"a.wav": "x", "b.wav": "y"}),
    "esc50": (
        "meta/esc50.csv", "filename,fold,target,category,take\n{},1,36,vacuum_cleaner,A\n{},1,0,dog,B\n", "utf-8",
        "--caption_columns category --audio_root audio", {"1-100032-A-36.wav": "vacuum cleaner", "b.wav": "dog"},
    ),
    "put_together": (
        "val.csv", "youtube_id,start_time,caption\nvfY_TJq7n_U,130,Rustling\n", "utf-8",
        "--audio_column {youtube_id}_{start_time}.wav", {"vfY_TJq7n_U_130.wav": "Rustling"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "encoding", "options", "captions"), LISTS.values(), ids=LISTS
)
def test_lists_as_others_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, encoding: str, options: str,
    captions: dict[str, str | list[str]],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    folder = Path("audio" if "--audio_root" in options else ".")
    folder.mkdir(exist_ok=True)
    for number, file in enumerate(captions):
        (folder / file).write_bytes(wav(tone(number)))
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(content.format(*captions).encode(encoding))
    assert run(name, "out", *options.split()) == 0
    described = described_in(Path("out"))
    assert {name: each["caption"] for name, each in described.items()} == captions
    assert not reasons_in(Path("out"))
    if "category" in options:  # for zero-shot evaluation
        assert described["1-100032-A-36.wav"]["category"] == "vacuum_cleaner"


def test_names_in_a_cell_become_a_list(tmp_path: Path) -> None:
    (tmp_path / "0.wav").write_bytes(wav(tone(0)))
    (tmp_path / "list.csv").write_text('fname,labels\n0,"Car_horn, Music"\n')
    options = (
        tmp_path / "list.csv",
        "--audio_column",
        "{fname}.wav",
        "--caption_columns",
        "labels",
    )
    assert run(*options, "--multilabel_column", "labels", "--", tmp_path / "out") == 0
    found = described_in(tmp_path / "out")["0.wav"]
    assert (found["labels"], found["caption"]) == (["Car_horn", "Music"], ["Car horn", "Music"])


@pytest.mark.parametrize("source", ["a.txt", "a.wav", "list.csv"])
def test_what_leads_out_of_a_folder_is_packed_only_if_asked(tmp_path: Path, source: str) -> None:
    """Links of others could make a private file public. The folder itself may be a link, and a
    list's paths absolute."""
    theirs = tmp_path / "theirs"
    private = tmp_path / "private.wav"
    theirs.mkdir()
    (tmp_path / "sounds").symlink_to(theirs)
    for name in "ab":
        (theirs / f"{name}.wav").write_bytes(wav(tone(ord(name))))
        (theirs / f"{name}.txt").write_text(name)
    sounds = tmp_path / "sounds"
    (theirs / ("a.wav" if source == "list.csv" else source)).rename(private)
    if source == "list.csv":
        sounds /= source
        sounds.write_text(f"path,caption\n../private.wav,x\n{theirs}/b.wav,y\n")
    else:
        (theirs / source).symlink_to(private)
    assert run(sounds, tmp_path / "out") == 0
    assert {*described_in(tmp_path / "out")} == {"b.wav"}
    assert "--follow_links" in str(reasons_in(tmp_path / "out"))
    assert run(sounds, tmp_path / "all", "--follow_links") == 0
    assert len(described_in(tmp_path / "all")) == 2


def test_a_folder_has_caption_files_beside_its_audio(tmp_path: Path) -> None:
    folder = tmp_path / "audio"
    text = {"text": ["A dog barks.", "A bark"], "tag": ["dog"]}
    (folder / "within").mkdir(parents=True)
    files = {  # name: caption file's name and content, captions or reason for skipping
        "within/lines": ("txt", "a sound\n\nanother\n", {"caption": ["a sound", "another"]}),
        "laion": ("json", json.dumps(text), {"caption": text["text"], "tag": ["dog"]}),
        "none": ("text", "a sound", "expected none.txt"),
        "blank": ("txt", "", "empty caption"),
        "twice": ("json", '{"text": "a", "text": "b"}', "'text' appears twice"),
    }
    for number, (name, (suffix, content, _)) in enumerate(files.items()):
        (folder / f"{name}.wav").write_bytes(wav(tone(number)))
        (folder / f"{name}.{suffix}").write_text(content)
    assert run(folder, tmp_path / "out") == 0
    found = described_in(tmp_path / "out")
    assert {each.pop("source") for each in found.values()} == set(found)
    assert found == {
        f"{Path(name).name}.wav": each
        for name, (*_, each) in files.items()
        if isinstance(each, dict)
    }
    reasons = reasons_in(tmp_path / "out")
    assert len(reasons) == 3
    for name, reason in reasons.items():
        assert str(files[Path(name).stem][2]) in reason


MISTAKES = [  # list content, options, message; CSV by default
    ("path,caption\n", "", "no rows"),
    ("url,caption\nx,y\n", "", "--audio_column"),
    ("path,caption\nx,y\n", "--caption_columns captoin", "did you mean 'caption'"),
    ('path,caption\na.wav,wind\nb.wav,"rain\nfalls\n', "", "quotes"),
    ("path,caption\na.wav,b\n\na.wav,b,c\n", "", "list.csv:4"),
    ("path,caption\nx,Gl\u00f6ckchen\n", "", "UTF-8"),
    ("path,caption\nx,y\n", "", "none of 1 items are usable; the first: {folder}/x"),
    ('{"path": "x"\n', "jsonl", "list.jsonl:1: expected a JSON object"),
    (
        '{"path": "x"}\n{"path": "x", "text": "a", "text": "b"}\n',
        "jsonl",
        "list.jsonl:2: expected a JSON object: field 'text'",
    ),
    ('[{"path": "x", "text": "a", "text": "b"}]', "json", "'text' appears twice"),
    ('[{"path": "x"},\n{"path" "y"}]', "json", "line 2"),
    ('["x"]', "json", "array of objects"),
    ("[]", "json", "no rows"),
    ("path,caption,caption\na.wav,x,y\n", "", "several columns are named 'caption'"),
    ("path,path,caption\na.wav,b.wav,y\n", "", "'path'"),
    ("path, Caption ,caption\na.wav,x,y\n", "", "'caption'"),
    ("path,caption,a note,A  Note\na.wav,x,y,z\n", "", "'anote'"),
    (
        "path,caption,\na.wav,x,\nb.wav,y,z\n",
        "",
        "list.csv:3: 'z' is in a column without a heading",
    ),
    ('path,caption\na.wav,"x\ny"\nb.wav\n', "", "list.csv:4: expected 2 fields"),
]


@pytest.mark.parametrize(("content", "options", "message"), MISTAKES)
def test_lists_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, options: str, message: str
) -> None:
    is_option = options.startswith("-") or not options
    path = tmp_path / f"list.{'csv' if is_option else options}"
    path.write_bytes(content.encode("cp1252"))
    assert run(path, tmp_path / "out", *(options.split() if is_option else [])) == 2
    assert message.replace("{folder}", str(tmp_path)) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


QUOTES = [
    # rows, and the first line of the row with unmatched quotes
    ('a.wav,x\nb.wav,y\nc.wav,z\nd.wav,"bad" quote\n', 5),
    ('a.wav,x\nb.wav,"never closed\nc.wav,z\n', 3),
    ('a.wav,x\nb.wav,"not closed\nc.wav,"a caption, with a comma"\n', 3),
    ('a.wav,"one\ntwo ""three"""\nb.wav,x\nc.wav,"bad" quote\n', 5),
    ('\n\na.wav,a 5" nail\n\nb.wav,"bad" quote\n', 6),
]


@pytest.mark.parametrize(("delimiter", "line_end"), [(",", "\n"), (";", "\r\n"), ("\t", "\r")])
@pytest.mark.parametrize(("rows", "line"), QUOTES)
def test_csv_with_unmatched_quote_names_line_of_row(
    tmp_path: Path, rows: str, line: int, delimiter: str, line_end: str
) -> None:
    path = tmp_path / "list.csv"
    content = f"path,caption\n{rows}".replace(",", delimiter).replace("\n", line_end)
    path.write_bytes(content.encode("utf-8-sig"))
    with pytest.raises(UserError, match=rf"list.csv:{line}: quotes"):
        rows_of(path)
