import json
import os
from pathlib import Path

import pytest

from tests.data.builds import broken_in, items_by_source, run, tone, write_clips
from tests.data.tars import wav


def captions_in(folder: Path) -> dict[str, str | list[str]]:
    return {name: json.loads(item["json"])["caption"] for name, item in items_by_source(folder).items()}


def write(folder: Path, content: str, encoding: str = "utf-8", name: str = "list.csv") -> Path:
    """A list of a.wav to c.wav, which are there."""
    for number, letter in enumerate("abc"):
        (folder / f"{letter}.wav").write_bytes(wav(tone(number)))
    path = folder / name
    path.write_bytes(content.encode(encoding))
    return path


MALFORMED = {  # rows under path,caption: reasons by line, files of the rows that are left
    "more fields": ("a.wav,rain, then thunder\nb.wav,wind\n", {2: "3 field(s), expected 2 (path, caption): 'a.wav,rain"}, "b"),
    "fewer fields": ("a.wav\nb.wav,wind\nc.wav;rain\n", {2: "1 field(s), expected 2", 4: "1 field(s), expected"}, "b"),
    "open to a quote later on": (
        'a.wav,"rain\nb.wav,wind\nc.wav,a pipe of 6"\n', {2: "no closing quote before line 3): 'a.wav,\"rain'"}, "bc",
    ),
    "open to the end": ('a.wav,wind\nb.wav,"rain\nfalls\n', {3: "its quotes don't match", 4: "1 field(s)"}, "a"),
    "open to a later row's": ('a,"rain\nb,"wind\nc.wav,hail\n', dict.fromkeys((2, 3), "its quotes don't match"), "c"),
    "text after a quote": ('a.wav,"rain" falls\nb.wav,wind\n', {2: "its quotes don't match"}, "b"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "reasons", "left"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_rows_are_refused_by_line_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str, reasons: dict[int, str], left: str
) -> None:
    path, out = write(tmp_path, "path,caption\n" + rows), tmp_path / "out"
    assert run(path, out) == 2
    refused = capsys.readouterr().err
    assert f"{len(reasons)} of {len(reasons) + len(left)} rows can't be used:" in refused
    assert all(word in refused for word in ("double quotes", "--delimiter", "--lenient"))
    assert not out.exists()
    assert run(path, out, "--lenient") == 0
    assert f"{len(reasons)} malformed rows left out" in capsys.readouterr().out
    assert set(items_by_source(out)) == {f"{name}.wav" for name in left}
    broken = broken_in(out)
    assert broken.keys() == {f"list.csv:{line}" for line in reasons}
    for line, reason in reasons.items():
        assert reason in broken[f"list.csv:{line}"]
        assert f"{path}:{line}: {broken[f'list.csv:{line}']}" in refused


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_captions_of_several_lines_are_kept(tmp_path: Path, line_break: str) -> None:
    """Also where one of the lines has as many delimiters as a row, quotes, or nothing."""
    caption = line_break.join(["rain", "", "falls, then thunder", 'says "boom"', "end"])
    quoted = caption.replace('"', '""')
    rows = ["path,caption", f'a.wav,"{quoted}"', f'"b.wav","wind, {quoted}"', 'c.wav,6 feet of 6" pipes', ""]
    assert run(write(tmp_path, line_break.join(rows)), tmp_path / "out") == 0
    expected = {"a.wav": caption, "b.wav": f"wind, {caption}", "c.wav": '6 feet of 6" pipes'}
    assert captions_in(tmp_path / "out") == expected


ROWS = "Dateiname;Caption;Art;;\r\n{};Glöckchen, nah;bell;;\r\n{};Regen;;;\r\n;;;;\r\n\r\n"
READ = ["a.wav", "b.wav"], ["Glöckchen, nah", "Regen"]
EXCEL = "--audio_column Dateiname"
LISTS = {  # name of the list and its content, encoding, options, names of audio files, captions
    "excel": ("x.csv", ROWS, "utf-8-sig", EXCEL, *READ),
    "excel_cp1252": ("x.csv", ROWS, "cp1252", f"{EXCEL} --encoding cp1252", *READ),
    "excel_unicode_text": ("x.txt", ROWS.replace(";", "\t"), "utf-16", EXCEL, *READ),
    "tabs, named": ("x.tsv", "path\tcaption\n{}\tx, ; |\n{}\ty\n", "utf-8", r"--delimiter \t", READ[0], ["x, ; |", "y"]),
    "pandas": ("x.csv", ",path,caption\n0,{},x\n1,{},y\n", "utf-8", "", ["a.wav", "b.wav"], ["x", "y"]),
    "two rows of a file": (
        "x.csv", "file|caption_1|caption_2\na.wav|x|\n{}|z|y\n{}|w|\n", "utf-8", "", READ[0], [list("xzy"), "w"],
    ),
    "jsonl": (
        "x.jsonl", '{{"path": "{}", "captions": ["x", "y", "x"]}}\n\n{{"path": "{}", "text": "z"}}',
        "utf-8", "", READ[0], [list("xy"), "z"],
    ),
    "esc50": (
        "meta/esc50.csv",
        "filename,fold,target,category,esc10,src_file,take\n{},1,36,vacuum_cleaner,False,100032,A\n{},1,0,dog,True,100032,B\n",
        "utf-8", "--caption_columns category --audio_root audio", ["1-100032-A-36.wav", "b.wav"], ["vacuum cleaner", "dog"],
    ),
    "audiocaps": (
        "val.csv",
        'audiocap_id,youtube_id,start_time,caption\n97151,vfY_TJq7n_U,130,Rustling\n10,tdWhHV3X25Q,60,"Applause, then"\n',
        "utf-8", "--audio_column {youtube_id}_{start_time}.wav --audio_root audio",
        ["vfY_TJq7n_U_130.wav", "tdWhHV3X25Q_60.wav"], ["Rustling", "Applause, then"],
    ),
    "clotho": (
        "clotho.csv",
        "file_name,caption_1,caption_2,caption_3,caption_4,caption_5\n{},p,q,r,s,t\n{},u,v,\"w, w\",x,y\n",
        "utf-8", "--audio_root audio", ["Distorted AM Radio noise.wav", "b.wav"], [list("pqrst"), ["u", "v", "w, w", "x", "y"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "encoding", "options", "files", "captions"), LISTS.values(), ids=LISTS)
def test_lists_as_others_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, encoding: str, options: str,
    files: list[str], captions: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    folder = Path("audio" if "--audio_root" in options else ".")
    folder.mkdir(exist_ok=True)
    for number, file in enumerate(files):
        (folder / file).write_bytes(wav(tone(number)))
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(content.format(*files).encode(encoding))
    assert run(name, "out", *options.split()) == 0
    assert captions_in(Path("out")) == dict(zip(files, captions, strict=True))
    assert not broken_in(Path("out"))


def test_classes_stay_in_the_json(tmp_path: Path) -> None:
    """Those that became captions, and those beside captions in LAION's files."""
    folder = tmp_path / "audio"
    write_clips(folder, 2)
    described = {"text": ["A dog barks.", "A bark"], "tag": ["dog", "bark"], "original_data": {"title": "Bark"}}
    for path in folder.glob("*.wav"):
        path.with_suffix(".json").write_text(json.dumps(described))
    list_ = tmp_path / "list.csv"
    list_.write_text("path,category\naudio/clip 00.wav,church_bells\n")
    assert run(list_, tmp_path / "classes", "--caption_columns", "category") == 0
    (item,) = (json.loads(item["json"]) for item in items_by_source(tmp_path / "classes").values())
    assert (item["caption"], item["category"]) == ("church bells", "church_bells")
    assert run(folder, tmp_path / "laion") == 0
    for item in (json.loads(item["json"]) for item in items_by_source(tmp_path / "laion").values()):
        assert item["caption"] == described["text"]
        assert (item["tag"], item["original_data"]) == (described["tag"], described["original_data"])


THIRTEEN = "path,caption\n" + "a,b,c\n" * 13 + "a.wav,b\n"
MISTAKES = [  # content of a CSV, options, message
    ("", "", "empty; expected a line of column names"),
    ("path,caption\n", "", "no rows"),
    ("url,caption\nx,y\n", "", "no column of audio files (named path, audio_path, file,"),
    ("url,caption\nx,y\n", "", "there are url, caption; name it by --audio_column, or how it is made of columns"),
    ("path,words\nx,y\n", "", "there are path, words; name them by --caption_columns"),
    ("path,caption\nx,y\n", "--caption_columns titel", "no column 'titel'; there are path, caption; name another by --cap"),
    ("path,caption\nx,y\n", "--audio_column {id}.wav", "no column 'id'; there are path, caption; name another by --audio"),
    ("path,caption\nx,y\n", "--held_out 0.5 --group_column who", "no column 'who'; there are path, caption; name another"),
    ("path,caption,caption\nx,y,z\n", "", "two columns are named 'caption'"),
    ('path,"caption\nx,y\n', "", "list.csv:1: its quotes don't match"),
    (THIRTEEN, "", "13 of 14 rows"),
    (THIRTEEN, "", "list.csv:11: 3 field(s), expected 2 (path, caption): 'a,b,c'\n       and 3 more"),
    ("id,caption\nx,y\n,z\n", "--audio_column id", "none of 2 items can be used, the first: "),
    ("path,caption\nx,Gl\u00f6ckchen\n", "", "list.csv:2: byte 0xf6 isn't UTF-8; name the file's encoding by --encoding"),
    ("path,caption\nx,y\n", "--encoding klingon", "no encoding 'klingon'"),
]  # fmt: skip
MISTAKEN_LISTS = [
    ("list.jsonl", '{"path": "x"\n', "list.jsonl:1: not valid JSON"),
    ("list.jsonl", '\n"1"\n', "list.jsonl:2: expected an object"),
    ("list.xlsx", "x", "expected a folder, or a list"),
]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [("list.csv", *mistake) for mistake in MISTAKES] + [(*mistake[:2], "", mistake[2]) for mistake in MISTAKEN_LISTS],
)
def test_lists_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, options: str, message: str
) -> None:
    assert run(write(tmp_path, content, "cp1252", name), tmp_path / "out", *options.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_list_that_is_a_pipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "list.csv")
    assert run(tmp_path / "list.csv", tmp_path / "out") == 2
    assert "not a regular file" in capsys.readouterr().err
