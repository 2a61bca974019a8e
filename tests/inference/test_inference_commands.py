"""clap-embed, clap-label and clap-search as users type them, on a micro model and made-up sounds."""

import csv
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import clap_ds
from clap_ds import label, search
from clap_ds.config.errors import exit_code_of
from clap_ds.config.model import load_preset
from clap_ds.inference.vectors import Block, joined, read_table
from clap_ds.model.clap import ClapModel
from tests import processes
from tests.data.tars import marked_items, write_tar
from tests.training.training_commands import environment
from tests.weights.fake_checkpoints import checkpoint_of

RATE, EMBED = 48000, processes.ROOT / "clap_ds" / "embed.py"


@pytest.fixture
def here(tmp_path: Path, tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint `run` and `sounds`: three of 1 to 3 windows and one that can't be used."""
    torch.manual_seed(0)
    checkpoint_of(ClapModel(load_preset("micro")), tmp_path / "run", 1, Path(tokenizer_dir))
    (tmp_path / "sounds").mkdir()
    rng = np.random.default_rng(0)
    for number, name in enumerate(("=1+1", "low", "z")):
        soundfile.write(tmp_path / "sounds" / f"{name}.wav", rng.standard_normal((number + 1) * RATE) / 9, RATE)
    (tmp_path / "sounds" / "not\x1b[31m.wav").write_text("no sound")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def embed(*options: str | Path, world_size: int = 1, code: int = 0, checkpoint: str = "run") -> str:
    """What that many ranks wrote."""
    ranks = processes.ranks([EMBED, checkpoint, *options], world_size, env=environment(), cwd=Path.cwd())
    assert [rank.wait() for rank in ranks] == [code] * world_size, "".join(rank.stderr for rank in ranks)
    assert "Traceback" not in "".join(rank.stderr for rank in ranks)
    return "".join(rank.stdout + rank.stderr for rank in ranks)


def table(path: str) -> Block:
    return joined(list(read_table(Path(path))[2]))


@pytest.mark.end_to_end
def test_two_ranks_make_the_table_that_one_makes(here: Path) -> None:
    told = embed("sounds", "--output", "v.parquet", "--windows", "each", world_size=2, code=1)
    assert told.count(r"1 of 4 files can't be used, the first: sounds/not\x1b[31m.wav: audio can't be decoded") == 1
    assert "v.parquet: 7 rows of 4 files" in told
    embed("sounds", "--output", "alone.npz", "--windows", "each", "--max_left_out", "0.3")
    found, alone = table("v.parquet"), table("alone.npz")
    for name in Block._fields:
        np.testing.assert_array_equal(getattr(found, name), getattr(alone, name), err_msg=name)
    rows = list(clap_ds.load("run", device="cpu").iter_windows(sorted(here.glob("sounds/*"))))
    np.testing.assert_array_equal([row.start_s for row in rows], found.start_s)
    np.testing.assert_array_equal(
        np.stack([row.vector for row in rows if row.vector is not None]), found.vector[found.error == ""]
    )
    again = embed("sounds", "--output", "v.parquet", "--windows", "each", code=1)
    assert (
        "1 of 4 files can't be used" in again.partition("v.parquet is there already, of these files by this model")[2]
    )
    refused = embed("sounds", "--output", "v.parquet", code=2)
    assert "v.parquet is there already: windows 'each', now 'mean'; delete it, or name another --output" in refused


def test_labels_are_those_of_classify(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["dog", "low_hum", "siren"]
    asked = ["run", "sounds", "--labels", " dog,low_hum, siren", "--top", "2", "--template", "a {}"]
    assert label.main(asked) == 1
    shown = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert shown[0] == ["file", "start_s", "end_s", "error", "label_1", "probability_1", "label_2", "probability_2"]
    assert [row[0] for row in shown[1:]] == [
        "sounds/=1+1.wav",
        "sounds/low.wav",
        "sounds/not\x1b[31m.wav",
        "sounds/z.wav",
    ]
    assert [shown[2][2], shown[3][3][:22], shown[3][4:]] == ["2.0", "audio can't be decoded", [""] * 4]
    expected = clap_ds.load("run").classify("sounds/z.wav", names, ["a {}"])[0]
    likeliest = sorted(range(3), key=lambda n: -expected[n])[:2]
    assert shown[4][4::2] == [names[n] for n in likeliest]
    np.testing.assert_allclose([float(cell) for cell in shown[4][5::2]], expected[likeliest], rtol=0, atol=1e-6)


@pytest.fixture
def made(here: Path) -> Path:
    """With `v.npz`, a row for each window of the sounds."""
    from clap_ds.inference.parts import Parts
    from clap_ds.inference.vectors import About

    clap = clap_ds.load("run")
    about = About(str(Path(clap.source).resolve()), clap.fingerprint, clap.dim, "each", 0.0, "fp32", None, None, "0")
    parts, files = Parts(here / "v.npz", about), {str(path): path for path in sorted(here.glob("sounds/*.wav"))}
    marks, _ = parts.begin(files) or ({}, {})
    assert len(list(parts.write(clap.iter_windows(files.values()), marks))) == 4
    parts.join(marks)
    return here


def test_search_by_text_and_by_sound(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search.main(["v.npz", "a loud tone", "--top", "3", "--output", "found.csv"])
    header, *found = csv.reader(io.StringIO((made / "found.csv").read_text()))
    rows = table("v.npz")
    scores = rows.vector @ clap_ds.load("run").embed_text("a loud tone")[0]
    order = [n for n in np.argsort(-scores) if not np.isnan(scores[n])][:3]
    assert header == ["file", "start_s", "end_s", "score"]
    assert [(row[0], float(row[1])) for row in found] == [(rows.file[n], rows.start_s[n]) for n in order]
    np.testing.assert_allclose([float(row[3]) for row in found], scores[order], rtol=0, atol=1e-6)
    search.main(["v.npz", "--sound", "sounds/=1+1.wav", "--top", "1"])
    assert capsys.readouterr().out.startswith(" 1.0000       0.00 – 1.00 s  ")
    label.main(["run", "v.npz", "--labels", "dog,rain", "--max_left_out", "1", "--output", "labels.csv"])
    assert len((made / "labels.csv").read_text().splitlines()) == 1 + 7


def test_a_mistake_is_one_line(made: Path, tokenizer_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint_of(ClapModel(load_preset("micro")), made / "other", 1, Path(tokenizer_dir))
    (made / "few.txt").write_text("dog\n\n")
    for main, words, message in (
        (search.main, "v.npz", "expected a text to look for, or --sound FILE"),
        (search.main, "v.npz dog --sound a.wav", "expected a text to look for, or --sound FILE"),
        (search.main, "v.npz --sound a.wav", "--sound a.wav: no such file"),
        (search.main, "v.csv dog", "table v.csv: expected a name that ends in .parquet or .npz"),
        (search.main, "v.npz dog --model other", "v.npz holds vectors of another model"),
        (
            search.main,
            "v.npz dog --output /nowhere/found.csv",
            "--output /nowhere/found.csv: expected a file in a folder",
        ),
        (label.main, "run sounds", "expected --labels A,B,… or --labels_file FILE"),
        (
            label.main,
            "run sounds --labels dog,rain,dog",
            "--labels: expected two labels or more, each once, found 'dog' twice",
        ),
        (
            label.main,
            "run sounds --labels_file few.txt",
            "--labels_file few.txt: expected two labels or more, each once, found 1",
        ),
        (label.main, "run absent --labels a,b", "absent: no such file or folder; expected a folder"),
        (label.main, "other v.npz --labels a,b", "v.npz holds vectors of another model"),
        (label.main, "absent sounds --labels a,b", "absent: no such file or folder; expected"),
    ):
        assert exit_code_of(lambda main=main, words=words: main(words.split())) == 2, words  # type: ignore[misc]
        assert f"error: {message}" in capsys.readouterr().err
    (made / "run").rename(made / "moved")
    assert exit_code_of(lambda: search.main(["v.npz", "dog"])) == 2
    assert "its model isn't at" in capsys.readouterr().err
    search.main(["v.npz", "dog", "--model", "moved"])


@pytest.mark.end_to_end
def test_the_lines_of_the_docs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (processes.ROOT / "docs" / "using.md").read_text().split("## From the command line")[1].split("\n## ")[0]
    (here / "CHECKPOINT").symlink_to("run")
    (here / "shards").mkdir()
    write_tar(here / "shards" / "0.tar", marked_items(range(3)))
    (here / "list.csv").write_text("label,file\nlow,bark.wav\n")
    (here / "labels.txt").write_text("dog\nrain\n")
    (here / "bark.wav").write_bytes((here / "sounds" / "low.wav").read_bytes())
    for line in re.findall(r"^\$ (.*)$", page, re.MULTILINE):
        command, *words = shlex.split(line)
        if command == "clap-embed":
            assert "12 rows of 8 files" in embed(*words[1:], checkpoint=words[0], code=1)
        else:
            code = {"clap-label": label, "clap-search": search}[command].main(words)
            assert code == (1 if command == "clap-label" else None)
            assert not (shown := capsys.readouterr().out) or len(shown.splitlines()) == 11, line
    assert len((here / "found.csv").read_text().splitlines()) == 11
