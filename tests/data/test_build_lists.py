"""Lists of audio files with captions: as others write them, and how those that can't be read are refused."""

import json
import os
import re
from pathlib import Path
from unicodedata import normalize
from unittest import mock

import pytest

from tests.data.builds import items_by_source, reasons_in, run, tone
from tests.data.tars import wav


def described_in(folder: Path) -> dict[str, dict[str, object]]:
    return {name: json.loads(item["json"]) for name, item in items_by_source(folder).items()}


COMPOSED = "vaw.äw.wav"  # backwards, too
DECOMPOSED = normalize("NFD", COMPOSED)
ROWS = "Dateiname;Caption;Art;;\r\n{};Glöckchen, nah;bell;;\r\n{};Regen;;;\r\n;;;;\r\n\r\n"
READ = {"a.wav": "Glöckchen, nah", "b.wav": "Regen"}
EXCEL = "--audio_column Dateiname"
LINES = 'rain\r\n\r\nfalls, then thunder\r\nsays "boom"'
LISTS = {  # name of the list and its content, encoding, options, captions by the names of audio files
    "excel": ("x.csv", ROWS, "utf-8-sig", EXCEL, READ),
    "excel_cp1252": ("x.csv", ROWS, "cp1252", f"{EXCEL} --encoding cp1252", READ),
    "excel_unicode_text": ("x.txt", ROWS.replace(";", "\t"), "utf-16", EXCEL, READ),
    "excel_says_its_separator": (
        "x.csv", 'sep=;\r\nFile Name;caption\r\n.\\{};"a, b, c, d"\r\n.\\{};e\r\n', "utf-16-le", "",
        {"a.wav": "a, b, c, d", "b.wav": "e"},
    ),
    "other_byte_order": ("x.tsv", "path\tcaption\n{}\tx\n{}\ty\n", "utf-16-be", "", {"a.wav": "x", "b.wav": "y"}),
    "umlauts": (  # on the disk in one character and in two, in the list the other way round
        "x.csv", f"path,caption\n{DECOMPOSED},x\n{COMPOSED[::-1]},y\n", "utf-8", "",
        {COMPOSED: "x", normalize("NFD", COMPOSED[::-1]): "y"},
    ),
    "pandas": ("x.csv", ",path,caption\n0,{},x\n1,{},y\n", "utf-8", "", {"a.wav": "x", "b.wav": "y"}),
    "several_lines": (
        "x.csv", 'path,caption\r\n{},"' + LINES.replace('"', '""') + '"\r\n{},6 feet of 6" pipes', "utf-8", "",
        {"a.wav": LINES, "b.wav": '6 feet of 6" pipes'},
    ),
    "two_rows_of_a_file": (
        "x.csv", "file|caption_1|caption_2\na.wav|x|\n{}|z|y\n{}|w|\n", "utf-8", "", {"a.wav": list("xzy"), "b.wav": "w"},
    ),
    "jsonl": (
        "x.jsonl", '{{"path": "{}", "captions": ["x", "y", "x"]}}\n\n{{"path": "{}", "text": "z"}}',
        "utf-8", "", {"a.wav": list("xy"), "b.wav": "z"},
    ),
    "esc50": (
        "meta/esc50.csv", "filename,fold,target,category,take\n{},1,36,vacuum_cleaner,A\n{},1,0,dog,B\n", "utf-8",
        "--caption_columns category --audio_root audio", {"1-100032-A-36.wav": "vacuum cleaner", "b.wav": "dog"},
    ),
    "audiocaps": (
        "val.csv",
        'audiocap_id,youtube_id,start_time,caption\n97151,vfY_TJq7n_U,130,Rustling\n10,tdWhHV3X25Q,60,"Applause, then"\n',
        "utf-8", "--audio_column {youtube_id}_{start_time}.wav --audio_root audio",
        {"vfY_TJq7n_U_130.wav": "Rustling", "tdWhHV3X25Q_60.wav": "Applause, then"},
    ),
    "clotho": (
        "clotho.csv", 'file_name,caption_1,caption_2,caption_3\n{},p,q,r\n{},u,"w, w",x\n',
        "utf-8", "--audio_root audio", {"Distorted AM Radio noise.wav": list("pqr"), "b.wav": ["u", "w, w", "x"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "encoding", "options", "captions"), LISTS.values(), ids=LISTS)
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


def test_a_path_whose_folder_and_file_spell_umlauts_unlike(tmp_path: Path) -> None:
    """A folder made by hand holds files that were unpacked from a Mac's archive; the list is from Windows."""
    folder = tmp_path / normalize("NFC", "Töne")
    folder.mkdir()
    (folder / normalize("NFD", "바람 ä.wav")).write_bytes(wav(tone(0)))
    (tmp_path / "list.csv").write_text("path,caption\n" + normalize("NFC", "Töne\\바람 ä.wav") + ",wind\n")
    assert run(tmp_path / "list.csv", tmp_path / "out") == 0
    assert [each["caption"] for each in described_in(tmp_path / "out").values()] == ["wind"]


def test_several_names_in_a_cell_are_warned_of_and_become_a_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As FSD50K's, also where each name stands in one cell only; neither a text with commas is warned of, nor numbers."""
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(wav(tone(number)))
    rows = [
        '0,"Car_horn, Music","hum, click","1,5",Bark|Dog',
        '1,Music,hum,"5,1",',
        '2,"Music, Car_horn","loud, high",5,Cat',
    ]
    (tmp_path / "list.csv").write_text("\n".join(["fname,labels,title,level,animals", *rows]))
    options = (tmp_path / "list.csv", "--audio_column", "{fname}.wav", "--caption_columns", "labels")
    assert run(*options, "--list_column", "label", "--", tmp_path / "no") == 2
    assert (
        "no column 'label'; there are fname, labels, title, level, animals; name one by --list"
        in capsys.readouterr().err
    )
    assert run(*options, "--", tmp_path / "one") == 0
    assert re.findall("--list_column ([a-z]+)", capsys.readouterr().err) == ["labels", "animals"]
    assert run(*options, "--list_column", "labels", "animals", "--", tmp_path / "several") == 0
    assert "warning" not in capsys.readouterr().err
    found = described_in(tmp_path / "several")["0.wav"]
    assert (found["labels"], found["caption"]) == (["Car_horn", "Music"], ["Car horn", "Music"])


def test_a_folder_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may read any: so as the system says it to others."""
    (closed := tmp_path / "closed").mkdir()
    denied, scan = mock.Mock(side_effect=PermissionError(13, "Permission denied", str(closed))), os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (denied if str(path) == str(closed) else scan)(path))
    assert run(tmp_path, tmp_path / "out") == 2
    assert f"{closed} can't be read: Permission denied" in capsys.readouterr().err


def test_a_folder_has_caption_files_beside_its_audio(tmp_path: Path) -> None:
    folder, text = (
        tmp_path / "audio",
        {"text": ["A dog barks.", "A bark"], "tag": ["dog"], "original_data": {"title": "x"}},
    )
    (folder / "within").mkdir(parents=True)
    files = {  # name: name and content of a caption file, what is read or why it is left out
        "within/lines": ("txt", "a sound\n\nanother\n", {"caption": ["a sound", "another"]}),
        "laion": ("json", json.dumps(text), {"caption": text["text"], "tag": ["dog"], "original_data": {"title": "x"}}),
        "none": ("text", "a sound", "expected none.txt, or none.json with an object, beside it"),
        "blank": ("txt", "", "empty caption"),
        "list": ("json", "[]", "expected list.txt, or list.json with an object"),
        "cut": ("json", "{", "captions can't be read: Expecting property name"),
    }
    for number, (name, (suffix, content, _)) in enumerate(files.items()):
        (folder / f"{name}.wav").write_bytes(wav(tone(number)))
        (folder / f"{name}.{suffix}").write_text(content)
    assert run(folder, tmp_path / "out") == 0
    found = described_in(tmp_path / "out")
    assert {each.pop("source") for each in found.values()} == set(found)
    assert found == {f"{Path(name).name}.wav": each for name, (*_, each) in files.items() if isinstance(each, dict)}
    reasons = reasons_in(tmp_path / "out")
    assert len(reasons) == 4
    for name, reason in reasons.items():
        assert str(files[Path(name).stem][2]) in reason


MISTAKES = [  # content of a list, options, message; in a CSV unless it says otherwise
    ("", "", "no rows in it"),
    ("path,caption\n", "", "no rows in it"),
    ("url,caption\nx,y\n", "", "no column named path, audio_path, file, filename, file_name, audio, wav, filepath, file_path;"),
    ("url,caption\nx,y\n", "", "there are url, caption; name one by --audio_column (also put together, such as '{id}.wav')"),
    ("path,words\nx,y\n", "", "no column named caption, text, description, …; there are path, words; name one by --capt"),
    ("path,caption\nx,y\n", "--caption_columns titel", "no column 'titel'; there are path, caption; name one by --caption_col"),
    ("path,caption\nx,y\n", "--audio_column {id}.wav", "no column 'id'; there are path, caption; name one by --audio_column"),
    ("path,caption,caption\nx,y,z\n", "", "two columns are named 'caption'"),
    ('path,"caption\nx,y\n', "", "list.csv:1: its quotes don't match"),
    ('path,caption\na.wav,wind\nb.wav,"rain\nfalls\n', "", "list.csv:3: its quotes don't match"),
    ('path,caption\na.wav,"rain" falls\n', "", "list.csv:2: its quotes don't match"),
    ('path,caption\na.wav,"rain\nb.wav,wind\nc.wav,a 6" pipe\n', "", "list.csv:2: its quotes don't match"),
    ('path,caption\na.wav,"rain\nb.wav,wind\nc.wav,a pipe of 6"\n', "", "list.csv:2: expected 2 (path, caption), none with an"),
    ("path,caption\na.wav\n", "", "found 1 field(s): 'a.wav'; a field with a delimiter"),
    ("path,caption\na.wav,b\n\na.wav,b,c\n", "", "list.csv:4: expected 2 (path, caption)"),
    ("id,caption\nx,y\n,z\n", "--audio_column id", "list.csv:3: no path in id"),
    ("path,caption\nx,Gl\u00f6ckchen\n", "", "can't decode byte 0xf6 in position 17: invalid start byte; name another"),
    ("path,caption\nx,y\n", "--encoding klingon", "unknown encoding: klingon; name another encoding by --encoding"),
    ("path,caption\nx,y\n", "", "none of 1 items can be used, the first: {folder}/x: audio file can't be read"),
    ('{"path": "x"\n', "jsonl", "list.jsonl:1: not valid JSON"),
    ('\n"1"\n', "jsonl", "list.jsonl:2: expected an object"),
    ("x", "xlsx", "expected a folder, or a list"),
]  # fmt: skip


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
