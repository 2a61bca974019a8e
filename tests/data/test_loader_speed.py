import re
from pathlib import Path

import pytest

from clap_ds import shards
from clap_ds.config.errors import exit_code_of
from tests.data.tars import marked_tars


def measure(*words: object) -> int:
    return exit_code_of(lambda: shards.main(["measure", *map(str, words)]))


def test_measures_more_and_more_workers(tmp_path: Path, tokenizer_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    tars = marked_tars(tmp_path, 2, 8)
    (tmp_path / "tokenizer").symlink_to(tokenizer_dir)
    words = ["--preset", "micro", "--seconds", 0.1]
    assert measure(tars, *words, "--max_workers", 3, "--target_samples_per_s", 0.5) == 0
    printed = capsys.readouterr().out
    rows = [list(map(float, line.split())) for line in printed.splitlines() if re.match(r" +\d", line)]
    assert [workers for workers, *_ in rows] == [1, 2, 3]
    assert all(rate == pytest.approx(each * workers, abs=0.1 * workers) for workers, rate, each in rows)
    assert re.search(r"[\d,]+ at 624, [\d,]+ at 3,300, [\d,]+ at 4,500", printed)
    assert printed.endswith("enough\n")
