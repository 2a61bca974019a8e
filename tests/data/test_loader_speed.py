import re
from pathlib import Path

import pytest

from clap_ds import shards
from clap_ds.config.errors import exit_code_of
from clap_ds.data import loader_speed
from clap_ds.data.loader_speed import Speed, read_files, row, workers_needed
from clap_ds.data.supply import Supply
from tests.data.tars import marked_item, marked_tars, put

SPEEDS = [
    Speed(Supply(samples, n, "encoded"), samples / 10, 2e3) for n, samples in ((1, 100.0), (2, 190.0), (4, 320.0))
]


@pytest.mark.parametrize(("needed", "workers"), [(80, 1), (81, 2), (152, 2), (256, 4), (257, 5), (640, 10)])
def test_workers_needed(needed: float, workers: int) -> None:
    """A quarter more than the step needs; beyond 4 workers, 80 samples/s each."""
    assert workers_needed(SPEEDS, needed) == workers
    assert row(SPEEDS[1]).split() == ["2", "190.0", "95.0", "19.00", "2000.0", "MB/s"]


def measure(*words: object) -> int:
    return exit_code_of(lambda: shards.main(["measure", *map(str, words)]))


def test_measures_more_and_more_workers(tmp_path: Path, tokenizer_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of remote tars the file system's own rate isn't known."""
    tars = marked_tars(tmp_path, 2, 8)
    (tmp_path / "tokenizer").symlink_to(tokenizer_dir)
    words = ["--preset", "micro", "--micro_batch", 4, "--seconds", 0.1]
    assert measure(tars, *words, "--max_workers", 3, "--needed_samples_per_s", 0.5) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if re.match(r" +\d", line)]
    assert [int(workers) for workers, *_ in rows] == [1, 2, 3]
    encoded_bytes = len(dict(marked_item(0))["0000.wav"])
    assert 1e6 * float(rows[0][3]) == pytest.approx(float(rows[0][1]) * encoded_bytes, rel=0.5)
    assert re.search(r"cores a GPU, with a margin of 25%: [\d,]+ at 624, [\d,]+ at 3,300, [\d,]+ at 4,500", printed)
    assert re.search(r"can give [\d,]+ clips/s, the step of their rank takes 0: enough$", printed)
    remote = put("memory://measured/a.tar", (tmp_path / "000.tar").read_bytes())
    assert measure(remote, *words, "--tokenizer", tokenizer_dir, "--max_workers", 1) == 0
    assert re.search(r"^ +1( +[\d.]+){3} +–$", capsys.readouterr().out, re.MULTILINE)
    assert measure("nowhere.tar", *words) == 2
    assert "clap.data.shards: 1 of the 1 files" in capsys.readouterr().err


def test_files_are_read_to_their_share_or_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 and 1 MiB, of which at most 2 are read of each: 3 MiB in two seconds of this clock."""
    monkeypatch.setattr(loader_speed, "_CHUNK_BYTES", 2**20)
    monkeypatch.setattr(loader_speed, "_MOST_BYTES", 2 * 2 * 2**20)
    ticks = iter([0.0, *[0.5] * 4, 2.0])
    monkeypatch.setattr(loader_speed.time, "perf_counter", lambda: next(ticks))
    paths = []
    for name, size in (("a.tar", 3 * 2**20), ("b.tar", 2**20)):
        (tmp_path / name).write_bytes(bytes(size))
        paths.append(str(tmp_path / name))
    assert read_files(paths, 1, 1.0) == pytest.approx(3 * 2**20 / 2e6)
