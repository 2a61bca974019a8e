"""A configuration against itself: the runs are made and compared, and verdicts counted."""

import json
import random
import re
from pathlib import Path

import pytest

from benchmarks import a_a
from clap_ds.config.errors import UserError
from tests.analysis.samples import run

STAND_IN = """
import json, sys
from pathlib import Path
config = json.loads(Path(sys.argv[1]).read_text())
folder = Path(config["clap"]["output"]["root"]) / "run-20260101T000000Z"
folder.mkdir()
number = int(folder.parent.name)
windows = [100.0 + number + (window * 7) % 5 for window in range(config["clap"]["bench"]["windows"])]
summary = {"state": "failed" if number == config["failing"] else "completed", "preset": "micro", "error": "no luck"}
mean = len(windows) / sum(1 / rate for rate in windows)
summary |= {"num_nodes": 1, "world_size": 1, "samples_per_s_per_gpu": {"mean": mean, "windows": windows}}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps({"clap": {}, "failing": 0}))
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(a_a, "ONE_RANK", [a_a.sys.executable, str(tmp_path / "stand_in.py"), a_a.CONFIG])
    options = ["--config", "config.json", "--folder", "out", "--output", "kept/a_a.md", "--set", "clap.bench.windows=6"]
    return [str(tmp_path / word) if ("." in word and "=" not in word) or word == "out" else word for word in options]


def test_runs_are_compared_in_pairs_and_in_threes_and_kept(arguments: list[str], tmp_path: Path) -> None:
    assert a_a.main([*arguments, "--runs", "6"]) == 0
    kept = json.loads((tmp_path / "kept" / "a_a.json").read_text())
    assert [(row["comparisons"], row["verdicts"]) for row in kept["found"]] == [(15, 0), (15, 0), (20, 0)]
    assert [len(row["windows"]) for row in kept["runs"]] == [6] * 6
    text = " ".join((tmp_path / "kept" / "a_a.md").read_text().split())
    assert re.search(r"\| 1 \| 102\.65 \| \d+\.\d\d–\d+\.\d\d \| 95 % interval of 6 windows \|", text)
    assert str(tmp_path) not in text.partition("\n\n")[2]


def test_a_run_that_fails_and_too_few_are_refused(arguments: list[str]) -> None:
    with pytest.raises(UserError, match="run 2 of 3 is failed: no luck"):
        a_a.main([*arguments, "--runs", "3", "--set", "failing=2"])
    with pytest.raises(UserError, match="--runs 1: expected at least 2"):
        a_a.main([*arguments, "--runs", "1"])


def test_verdicts_are_counted() -> None:
    """Of runs of two kinds, in groups of three: some are of one kind each, and then there is a difference."""
    generator = random.Random(0)
    runs = [run(1, rate * generator.gauss(1, 1e-3)) for rate in (100.0, 200.0) for _ in range(3)]
    _, _, threes = a_a.compare_with_itself(runs, 40)
    assert 1 <= threes["verdicts"] == sum("B is " in said for said in threes["said"]) < 20
    assert threes["excluding"] == threes["verdicts"]
