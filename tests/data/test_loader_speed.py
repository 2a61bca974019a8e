import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from clap_ds import shards
from clap_ds.config.errors import exit_code_of
from clap_ds.data.loader_speed import Speed, read_files, row, verdict, workers_needed
from tests.data.tars import marked_item, marked_tars, put

SPEEDS = [Speed(1, 100.0, 10.0, 1500.0, 9e3), Speed(2, 190.0, 19.0, 2000.0, 9e3), Speed(4, 320.0, 32.0, 1900.0, 9e3)]


@pytest.mark.parametrize(("needed", "workers"), [(80, 1), (81, 2), (152, 2), (256, 4), (257, 5), (640, 10)])
def test_workers_needed(needed: float, workers: int) -> None:
    """A quarter more than the step needs; beyond 4 workers, 80 samples/s each. A row has the rates of clips and bytes."""
    assert workers_needed(SPEEDS, needed) == workers
    assert row(SPEEDS[1]).split() == ["2", "190.0", "95.0", "19.00", "2000.0", "20000", "9000.0", "90000"]
    takes = f"takes {'about ' * (workers > 4)}{workers} worker(s) per rank"
    assert takes in verdict(SPEEDS, needed=needed, ranks_per_host=1, cores=8)


@pytest.mark.parametrize(
    ("needed", "cores", "said"),
    [
        (150, 12, "\n8 worker(s) beside 4 training process(es) on this host's 12 cores: enough\n"),
        (150, 11, "NOT enough\n"),
        (4999, 11, "\nthey need 2,000 MB/s of the file system; cold, it gave 2,000 MB/s to 2 reader(s): enough"),
        (5001, 11, "it gave 2,000 MB/s to 2 reader(s): NOT enough"),
    ],
)
def test_verdict(needed: float, cores: int, said: str) -> None:
    """Four ranks need four times as much; clips are of 0.1 MB; the most that the file system gave counts."""
    assert said in verdict(SPEEDS, needed=needed, ranks_per_host=4, cores=cores)


def measure(*words: object) -> int:
    return exit_code_of(lambda: shards.main(["measure", *map(str, words)]))


@pytest.fixture
def run_json(tmp_path: Path, tokenizer_dir: str, write_run: Callable[..., Path]) -> Path:
    data = {"source": "shards", "shards": marked_tars(tmp_path, 2, 8), "tokenizer": tokenizer_dir}
    return write_run(clap={"data": data})


def test_measures_more_and_more_workers(tmp_path: Path, run_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"samples_per_s_per_gpu": {"median": 0.5}}))
    words = ["--deepspeed_config", run_json, "--seconds", 0.3, "--max_workers", 3, "--run_directory", tmp_path]
    assert measure(*words) == 0
    printed = capsys.readouterr().out
    assert [int(workers) for workers in re.findall(r"^ +(\d)(?: +[\d.]+){7}$", printed, re.MULTILINE)] == [1, 2, 3]
    assert re.search(r"cores a GPU, with a margin of 25%: [\d,]+ at 624, [\d,]+ at 3,300, [\d,]+ at 4,500", printed)
    assert "the step needs 0.5 samples/s per rank; with a margin of 25% that takes 1 worker(s) per rank" in printed


def test_tars_can_be_named_without_a_run(
    tmp_path: Path, tokenizer_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prepared ones say for which model; of remote ones the files' rates aren't known."""
    tars = marked_tars(tmp_path / "sounds", 2, 8)
    (tmp_path / "sounds" / "tokenizer").symlink_to(tokenizer_dir)
    words = ["--micro_batch", 4, "--seconds", 0.3, "--max_workers", 1]
    assert measure(tars, *words, "--preset", "micro") == 0
    rates = capsys.readouterr().out.splitlines()[2].split()
    encoded_bytes = len(dict(marked_item(0))["0000.wav"])
    assert 1e6 * float(rates[3]) == pytest.approx(float(rates[1]) * encoded_bytes, rel=0.5)
    prepare = ["prepare", tars, str(tmp_path / "mel"), "--kind", "mel", "--preset", "micro"]
    assert exit_code_of(lambda: shards.main(prepare)) == 0
    assert measure(f"{tmp_path}/mel/*.tar", *words) == 0
    assert measure(f"{tmp_path}/mel/*.tar", *words, "--preset", "demo") == 2
    differences = "mel_bins is 16 in the shards, 64 in the model, fmax is 14000 in the shards, 8000 in the model"
    assert f"{differences}; it fits preset micro" in capsys.readouterr().err
    remote = put("memory://measured/a.tar", (tmp_path / "sounds/000.tar").read_bytes())
    words = ["--tokenizer", tokenizer_dir, "--preset", "micro", *words]
    assert measure(remote, *words, "--needed_samples_per_s", 0.1) == 0
    printed = capsys.readouterr()
    assert re.search(r"^ +1( +[\d.]+){3}( +– +–){2}$", printed.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"data": {"source": "synthetic"}}, [], "clap.data.source: expected shards, found synthetic"),
        ({"data": {"source": "shards", "shards": "nowhere.tar", "tokenizer": "x"}}, [], "shards: 1 of the 1 files"),
        ({}, ["--run_directory", "nowhere"], "no such file"),
        ({}, ["more.tar"], "expected tars, or --deepspeed_config"),
        ({}, ["--preset", "micro"], "--preset: --deepspeed_config says that"),
    ],
)
def test_what_cannot_be_measured(
    write_run: Callable[..., Path], run_json: Path, capsys: pytest.CaptureFixture[str],
    changes: dict[str, object], words: list[str], message: str,
) -> None:  # fmt: skip
    path = write_run(clap=changes) if changes else run_json
    assert measure("--deepspeed_config", path, *words) == 2
    assert message.lower() in capsys.readouterr().err.lower()


def test_files_are_read_to_their_share_or_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 and 1 MiB, of which a second of this clock lets 2 and 1 be read: 3 MiB in a second."""
    monkeypatch.setattr("clap_ds.data.loader_speed._CHUNK_BYTES", 2**20)
    monkeypatch.setattr("clap_ds.data.loader_speed._MOST_BYTES", 2 * 2 * 2**20)
    ticks = iter([0.0, *[0.5] * 4, 1.0, 1.0, *[1.5] * 3, 3.0])
    monkeypatch.setattr("clap_ds.data.loader_speed.time.perf_counter", lambda: next(ticks))
    paths = []
    for name, size in (("a.tar", 3 * 2**20), ("b.tar", 2**20)):
        (tmp_path / name).write_bytes(bytes(size))
        paths.append(str(tmp_path / name))
    assert read_files(paths, 1, 1.0) == pytest.approx((3 * 2**20 / 1e6, 3 * 2**20 / 2e6))
