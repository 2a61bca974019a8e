import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.loader_speed import Speed, main, verdict
from tests.data.tars import marked_item, marked_tars

SPEEDS = [Speed(1, 100.0, 10.0), Speed(2, 190.0, 19.0), Speed(4, 320.0, 32.0)]


@pytest.mark.parametrize(
    ("needed", "workers"), [(10, 1), (80, 1), (81, 2), (152, 2), (250, 4), (256, 4), (257, 5), (640, 10)]
)
def test_workers_needed(needed: float, workers: int) -> None:
    """A quarter more than the step needs; beyond 4 workers, 80 samples/s each."""
    assert f" {workers} worker(s) per rank" in verdict(SPEEDS, needed=needed, ranks_per_host=1, cores=8)


def test_verdict_says_whether_the_cores_suffice() -> None:
    text = verdict(SPEEDS, needed=150, ranks_per_host=4, cores=12)
    assert "takes 2 worker(s) per rank" in text
    assert "make 8 workers beside 4 training process(es); it has 12 cores for them: enough" in text
    assert "NOT enough" in verdict(SPEEDS, needed=150, ranks_per_host=4, cores=11)
    assert "takes about 10 worker(s)" in verdict(SPEEDS, needed=640, ranks_per_host=1, cores=11)


@pytest.fixture
def run_json(tmp_path: Path, tokenizer_dir: str, write_run: Callable[..., Path]) -> Path:
    data = {"source": "shards", "shards": marked_tars(tmp_path, 2, 8), "tokenizer": tokenizer_dir}
    return write_run(clap={"data": data})


def test_measures_up_to_as_many_workers_as_there_are_shards(
    tmp_path: Path, run_json: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"samples_per_s_per_gpu": {"median": 0.5}}))
    arguments = ["--deepspeed_config", str(run_json), "--seconds", "1", "--max_workers", "3"]
    arguments += ["--run_directory", str(tmp_path), "--json", str(tmp_path / "speeds.json")]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ +2( +[\d.]+){4}$", printed, re.MULTILINE)
    assert "3 workers: not measured: too few shards for 3 workers" in printed
    assert "the step needs 0.5 samples/s per rank; with a margin of 25% that takes 1 worker(s) per rank" in printed
    figures = json.loads((tmp_path / "speeds.json").read_text())
    assert [speed["num_workers"] for speed in figures["speeds"]] == [1, 2]
    for speed in figures["speeds"]:
        encoded_bytes = len(dict(marked_item(0))["0000.wav"])
        assert speed["mb_per_s"] == pytest.approx(speed["samples_per_s"] * encoded_bytes / 1e6, rel=0.5)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"data": {"source": "synthetic"}}, [], "clap.data.source: expected shards, found synthetic"),
        ({"data": {"source": "shards", "shards": "nowhere.tar", "tokenizer": "x"}}, [], "shards: 1 of the 1 files"),
        ({}, ["--run_directory", "nowhere"], "no such file"),
    ],
)
def test_what_cannot_be_measured(
    write_run: Callable[..., Path], run_json: Path, capsys: pytest.CaptureFixture[str],
    changes: dict[str, object], arguments: list[str], message: str,
) -> None:  # fmt: skip
    path = write_run(clap=changes) if changes else run_json
    assert main(["--deepspeed_config", str(path), *arguments]) == 2
    assert message.lower() in capsys.readouterr().err.lower()
