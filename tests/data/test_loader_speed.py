import re
from pathlib import Path
from unittest import mock

import pytest

from clap_ds import shards
from clap_ds.config.errors import exit_code_of
from clap_ds.data import loader_speed
from tests.data.tars import marked_tars


def measure(*words: object) -> int:
    return exit_code_of(lambda: shards.main(["measure", *map(str, words)]))


def test_measures_more_and_more_workers(tmp_path: Path, tokenizer_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    tars = marked_tars(tmp_path, 2, 8)
    (tmp_path / "tokenizer").symlink_to(tokenizer_dir)
    words = ["--preset", "micro", "--micro_batch", 4, "--seconds", 0.1]
    assert measure(tars, *words, "--max_workers", 3, "--target_samples_per_s", 0.5) == 0
    printed = capsys.readouterr().out
    rows = [list(map(float, line.split())) for line in printed.splitlines() if re.match(r" +\d", line)]
    assert [workers for workers, *_ in rows] == [1, 2, 3]
    assert all(rate == pytest.approx(each * workers, abs=0.1 * workers) for workers, rate, each in rows)
    assert re.search(r"[\d,]+ at 624, [\d,]+ at 3,300, [\d,]+ at 4,500", printed)
    assert printed.endswith("enough\n")


def test_the_first_batch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 50 s while workers start, and every other one 1 s."""
    now, pieces = [0.0], mock.MagicMock(kind="mel", prepared="mel")
    pieces.__next__.side_effect = lambda: now.append(now[-1] + (1.0 if now[-1] else 50.0))
    monkeypatch.setattr(loader_speed, "WebDatasetStream", lambda *_: pieces)
    monkeypatch.setattr(loader_speed, "time", mock.Mock(perf_counter=lambda: now[-1]))
    assert loader_speed.measure(mock.Mock(), mock.Mock(micro_batch=4), 3.0).samples_per_s == 4.0
