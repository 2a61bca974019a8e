"""Test `clap-ds embed`, `classify`, `search` and `score` with a micro model and synthetic
sounds."""

import csv
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet

import clap_ds
from clap_ds.config.model import load_preset
from clap_ds.inference import commands
from clap_ds.inference.commands import classify, embed, score, search
from clap_ds.inference.options import find_sources
from clap_ds.inference.vectors import read_table, write_table
from clap_ds.model.clap import ClapModel
from clap_ds.utils.errors import UserError, exit_code_of
from tests import processes
from tests.data.tars import marked_items, write_tar
from tests.inference.conftest import noise, write_sound
from tests.weights.fake_checkpoints import checkpoint_of

PAGE = (processes.ROOT / "docs" / "inference.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def workspace(tmp_path: Path, tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a checkpoint `run` and `sounds`: three of 1 to 3 windows and an unusable
    one."""
    torch.manual_seed(0)
    checkpoint_of(ClapModel(load_preset("micro")), tmp_path / "run", 1, Path(tokenizer_dir))
    (tmp_path / "sounds").mkdir()
    for name, seconds in (("high", 1), ("low", 2), ("z", 3)):
        write_sound(tmp_path / "sounds" / f"{name}.wav", noise(seconds) / seconds)
    # The name would color a terminal.
    (tmp_path / "sounds" / "not\x1b[31m.wav").write_text("no sound")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def table(workspace: Path) -> Path:
    """Add `v.parquet` with a row per window of the sounds."""
    embed(["run", "sounds", "--output", "v.parquet", "--pooling", "none"])
    return workspace


def read_csv(path: str) -> list[list[str]]:
    return list(csv.reader(Path(path).read_text().splitlines()))


def test_sources_are_found_in_folders_lists_and_tars(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s" / "a").mkdir(parents=True)
    for name in ("s/b.wav", "s/a/z.FLAC", "s/text.txt", "c.mp3", os.fsdecode(b"s/\xff.ogg")):
        (tmp_path / name).touch()
    Path("list.csv").write_text("label,filename\ndog,s/b.wav\ncat,absent.wav\n")
    Path("bare.txt").write_text("c.mp3\ns/b.wav\n")
    write_tar(tmp_path / "0.tar", [*marked_items(range(2)), ("5.png", b"")])
    names = [*find_sources(["s", "c.mp3", "list.csv", "bare.txt", "*.tar"])]
    assert names[:3] == ["s/a/z.FLAC", "s/b.wav", r"s/\xff.ogg"]
    assert names[3:] == ["c.mp3", "absent.wav", "0.tar: 0000", "0.tar: 0001", "0.tar: 5"]
    with pytest.raises(UserError, match=r"absent\.wav"):
        find_sources(["absent.wav"])


def test_classify_writes_the_likeliest_labels(workspace):
    labels = ["dog", "low_hum", "siren"]
    options = ["--labels", " dog,low_hum, siren", "--top", "2", "--template", "a {}"]
    assert classify(["run", "sounds", *options, "--output", "labels.csv"]) == 1
    *_, unusable, last = read_csv("labels.csv")
    assert unusable[4:] == [""] * 4
    (probabilities,) = clap_ds.load("run").classify("sounds/z.wav", labels, ["a {}"])
    first, second, _ = np.argsort(-probabilities)
    assert last[4::2] == [labels[first], labels[second]]
    assert float(last[5]) == pytest.approx(probabilities[first], abs=1e-6)


def test_search_finds_the_nearest_windows(table):
    search(["v.parquet", "--sound", "sounds/high.wav", "--top", "1", "--output", "nearest.csv"])
    header, nearest = read_csv("nearest.csv")
    assert header == ["file", "start_s", "end_s", "score"]
    assert nearest == ["sounds/high.wav", "0.0", "1.0", "1.0"]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("embed", "run sounds --output v.npz", "v.npz: requires"),
        ("classify", "run sounds --labels dog,", "at least two labels"),
        ("search", "v.parquet", "expected either TEXT"),
        ("search", "v.parquet dog --model other", "another model"),
    ],
)
def test_mistake_is_a_user_error(table, tokenizer_dir, capsys, name, line, message):
    checkpoint_of(ClapModel(load_preset("micro")), table / "other", 1, Path(tokenizer_dir))
    command = getattr(commands, name)
    assert exit_code_of(lambda: command(line.split())) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["model", "tokenizer", "preset"])
def test_table_naming_a_foreign_model_is_rejected(table, capsys, option):
    metadata, _ = read_table(Path("v.parquet"))
    foreign = replace(metadata, **{option: "open_clip:hf-hub:some/one"})
    with Path("foreign.parquet").open("wb") as file:
        write_table(file, foreign, [])
    assert exit_code_of(lambda: search(["foreign.parquet", "dog"])) == 2
    assert f"pass --{option} open_clip:hf-hub:some/one" in capsys.readouterr().err


def test_score_is_the_mean_of_files_cosines(workspace, capsys):
    """A file's captions count together, so that a file with several has no more weight."""
    pairs = {
        "sounds/high.wav": ["a loud tone", "a click"],
        "sounds/low.wav": ["a quiet tone"],
        "sounds/z.wav": ["a loud tone"],
    }
    with Path("list.csv").open("w") as file:
        file.write("file,caption\ngone.wav,a click\n")
        for name, captions in pairs.items():
            file.writelines(f"{name},{caption}\n" for caption in captions)
    assert score(["run", "list.csv", "--output", "scores.csv"]) == 1
    clap = clap_ds.load("run")
    file_scores = []
    for name, captions in pairs.items():
        cosines = clap.embed_audio([name]) @ clap.embed_text(captions).T
        file_scores.append(cosines.mean())
    assert read_csv("scores.csv")[-1][:2] == ["sounds/z.wav", "a loud tone"]
    assert float(read_csv("scores.csv")[-1][2]) == pytest.approx(file_scores[-1], abs=2e-6)
    # Student's t of two degrees of freedom.
    half_width = 4.3027 * np.std(file_scores, ddof=1) / 3**0.5
    printed = capsys.readouterr().out
    assert printed.startswith(f"CLAP score: {np.mean(file_scores):.4f} ± {half_width:.4f} ")
    # An interval needs two files.
    Path("list.csv").write_text("file,caption\nsounds/low.wav,a click\n")
    assert exit_code_of(lambda: score(["run", "list.csv"])) == 2


def test_command_lines_in_docs_run(workspace, capsys):
    Path("CHECKPOINT").symlink_to("run")
    Path("shards").mkdir()
    write_tar(workspace / "shards" / "0.tar", marked_items(range(3)))
    Path("list.csv").write_text("label,file\nlow,bark.wav\n")
    Path("labels.txt").write_text("dog\nrain\n")
    Path("bark.wav").write_bytes(Path("sounds/low.wav").read_bytes())
    section = PAGE.partition("## A linear probe")[0]
    for line in re.findall(r"^\$ clap-ds (.*)$", section, re.MULTILINE):
        name, *arguments = shlex.split(line)
        code = getattr(commands, name)(arguments)
        assert code == (None if name == "search" else 1), line
    assert len(read_csv("found.csv")) == 11
    printed = capsys.readouterr()
    assert "12 rows from 8 files" in printed.out
    assert r"skipped 1 of 8 files; the first: sounds/not\x1b[31m.wav" in printed.err
    for name in ("part_0", "part_1"):
        Path(f"{name}.parquet").write_bytes(Path("vectors.parquet").read_bytes())
    exec(PYTHON[1], {})
    assert parquet.read_metadata("vectors.parquet").num_rows == 2 * 12
