"""Test `clap-ds embed`, `classify` and `search` with a micro model and synthetic sounds."""

import csv
import io
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from pyarrow import parquet

import clap_ds
from clap_ds import classify, embed, search
from clap_ds.config.model import load_preset
from clap_ds.inference.audio_windows import EmbeddingRow
from clap_ds.inference.vectors import About, read_table, write_table
from clap_ds.model.clap import ClapModel
from clap_ds.utils.errors import exit_code_of
from tests import processes
from tests.data.tars import marked_items, write_tar
from tests.weights.fake_checkpoints import checkpoint_of

RATE = 48000
PAGE = (processes.ROOT / "docs" / "inference.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(tmp_path: Path, tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a checkpoint `run` and `sounds`: three of 1 to 3 windows and an unusable
    one."""
    torch.manual_seed(0)
    checkpoint_of(ClapModel(load_preset("micro")), tmp_path / "run", 1, Path(tokenizer_dir))
    (tmp_path / "sounds").mkdir()
    rng = np.random.default_rng(0)
    for number, name in enumerate(("=1+1", "low", "z")):
        soundfile.write(
            tmp_path / "sounds" / f"{name}.wav", rng.standard_normal((number + 1) * RATE) / 9, RATE
        )
    (tmp_path / "sounds" / "not\x1b[31m.wav").write_text("no sound")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_labels_are_those_of_classify(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["dog", "low_hum", "siren"]
    asked = ["run", "sounds", "--labels", " dog,low_hum, siren", "--top", "2", "--template", "a {}"]
    assert classify.main(asked) == 1
    shown = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert [row[0][7:10] for row in shown[1:]] == ["=1+", "low", "not", "z.w"]
    assert shown[3][4:] == [""] * 4
    expected = clap_ds.load("run").classify("sounds/z.wav", names, ["a {}"])[0]
    likeliest = sorted(range(3), key=lambda n: -expected[n])[:2]
    assert shown[4][4::2] == [names[n] for n in likeliest]
    np.testing.assert_allclose(
        [float(cell) for cell in shown[4][5::2]], expected[likeliest], rtol=0, atol=1e-6
    )


@pytest.fixture
def made(here: Path) -> Path:
    """Add `v.parquet` with a row per window of the sounds."""
    embed.main(["run", "sounds", "--output", "v.parquet", "--pooling", "none"])
    return here


def test_search_by_text_and_by_sound(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clap = clap_ds.load("run")
    rows = [row for row in clap.iter_windows(sorted(Path("sounds").glob("*"))) if not row.error]
    scores = np.stack([row.vector for row in rows]) @ clap.embed_text("a loud tone")[0]
    search.main(["v.parquet", "a loud tone", "--top", "3", "--output", "found.csv"])
    _, *found = csv.reader(io.StringIO((made / "found.csv").read_text()))
    for (file, start_s, _, score), n in zip(found, np.argsort(-scores)[:3], strict=True):
        assert (file.removeprefix("'"), float(start_s)) == (rows[n].source, rows[n].start_s)
        assert float(score) == pytest.approx(scores[n], abs=1e-6)
    capsys.readouterr()
    search.main(["v.parquet", "--sound", "sounds/=1+1.wav", "--top", "1"])
    assert capsys.readouterr().out.endswith("=1+1.wav,0.0,1.0,1.0\n")


def test_a_mistake_is_one_line(
    made: Path, tokenizer_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint_of(ClapModel(load_preset("micro")), made / "other", 1, Path(tokenizer_dir))
    for main, words, message in (
        (embed.main, "run sounds --output v.npz", "v.npz: requires"),
        (search.main, "v.parquet", "expected either TEXT"),
        (search.main, "v.parquet dog --model other", "another model"),
    ):
        assert exit_code_of(lambda main=main, words=words: main(words.split())) == 2, words  # type: ignore[misc]
        assert message in capsys.readouterr().err
    (made / "run").rename(made / "moved")
    search.main(["v.parquet", "dog", "--model", "moved"])


@pytest.mark.parametrize("name", ["model", "tokenizer", "preset"])
def test_a_table_names_no_place_of_its_choice(
    made: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    about, _ = read_table(Path("v.parquet"))
    with Path("theirs.parquet").open("wb") as file:
        write_table(file, replace(about, **{name: "open_clip:hf-hub:some/one"}), [])
    assert exit_code_of(lambda: search.main(["theirs.parquet", "dog"])) == 2
    assert f"pass --{name} open_clip:hf-hub:some/one" in capsys.readouterr().err


def test_the_lines_of_the_docs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "CHECKPOINT").symlink_to("run")
    (here / "shards").mkdir()
    write_tar(here / "shards" / "0.tar", marked_items(range(3)))
    (here / "list.csv").write_text("label,file\nlow,bark.wav\n")
    (here / "labels.txt").write_text("dog\nrain\n")
    (here / "bark.wav").write_bytes((here / "sounds" / "low.wav").read_bytes())
    for line in re.findall(r"^\$ (.*)$", PAGE.partition("## A linear probe")[0], re.MULTILINE):
        program, name, *words = shlex.split(line)
        assert program == "clap-ds"
        code = {"embed": embed, "classify": classify, "search": search}[name].main(words)
        assert code == (None if name == "search" else 1), line
    assert len((here / "found.csv").read_text().splitlines()) == 11
    told = capsys.readouterr()
    assert "12 rows from 8 files" in told.out
    assert r"skipped 1 of 8 files; the first: sounds/not\x1b[31m.wav" in told.err
    for name in ("part_0", "part_1"):
        (here / f"{name}.parquet").write_bytes((here / "vectors.parquet").read_bytes())
    exec(PYTHON[1], {})
    assert parquet.read_metadata("vectors.parquet").num_rows == 2 * 12


def test_the_probe_of_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = np.array([f"audio/{n}.wav" for n in range(60)])
    rng = np.random.default_rng(0)
    vectors = np.eye(8, dtype=np.float32)[np.arange(60) % 3] + rng.normal(0, 0.1, (60, 8)).astype(
        np.float32
    )
    about = About("m", "f", 8, "mean", 0.0, "fp32", None, None, "0")
    with open("esc50.parquet", "wb") as file:
        rows = [
            EmbeddingRow(name, 0, 1, vector) for name, vector in zip(names, vectors, strict=True)
        ]
        write_table(
            file,
            about,
            [*rows[:7], EmbeddingRow(names[7], 0, 0, error="audio is silent"), *rows[8:]],
        )
    (meta := tmp_path / "ESC-50-master" / "meta").mkdir(parents=True)
    rows = "".join(f"{n}.wav,{n // 12 + 1},{'abc'[n % 3]}\n" for n in range(60))
    (meta / "esc50.csv").write_text("filename,fold,category\n" + rows)
    exec(PYTHON[2], {})
    assert capsys.readouterr().out == "100.00% ± 0.00% over 5 folds, 59 clips\n"
