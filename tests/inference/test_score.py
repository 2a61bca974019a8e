"""Test clap-ds score: cosines of files and captions, and their mean."""

import csv
from pathlib import Path

import numpy as np
import pytest

from clap_ds import score
from clap_ds.inference.model import Clap
from clap_ds.utils.errors import exit_code_of
from tests.inference.conftest import noise, write_sound


def test_scores_are_cosines_and_their_mean(
    clap: Clap,
    clap_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file's captions count together, so that a file with several has no more weight."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write_sound(tmp_path / f"{number}.wav", noise(0.5 + number) / (number + 1))
    pairs = [
        ("0.wav", "a loud tone"),
        ("0.wav", "a click"),
        ("1.wav", "a quiet tone"),
        ("2.wav", "a loud tone"),
    ]
    lines = [f"{name},{caption}\n" for name, caption in [*pairs, ("gone.wav", "a click")]]
    Path("list.csv").write_text("file,prompt\n" + "".join(lines))
    words = [str(clap_folder), "list.csv", "--caption_columns", "prompt", "--output", "scores.csv"]
    assert score.main(words) == 1
    cosines = [
        float((clap.embed_audio([name]) @ clap.embed_text([caption]).T)[0, 0])
        for name, caption in pairs
    ]
    _, *rows = csv.reader(Path("scores.csv").read_text().splitlines())
    assert [(file, caption) for file, caption, _ in rows] == pairs
    np.testing.assert_allclose([float(found) for *_, found in rows], cosines, atol=2e-6)
    of_files = [(cosines[0] + cosines[1]) / 2, *cosines[2:]]
    spread = 4.3027 * np.std(of_files, ddof=1) / 3**0.5  # Student's t of two degrees of freedom
    told = capsys.readouterr()
    assert told.out.startswith(f"CLAP score: {np.mean(of_files):.4f} ± {spread:.4f} ")
    assert "skipped 1 of 4 files; the first: gone.wav" in told.err
    Path("list.csv").write_text("file,caption\n0.wav,a click\n")
    assert exit_code_of(lambda: score.main(words[:2])) == 2
    assert "at least two usable files" in capsys.readouterr().err
