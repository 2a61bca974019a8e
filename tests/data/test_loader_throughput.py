"""Test measurements and reports of the data loader's throughput."""

import re
from pathlib import Path

import pytest

from clap_ds import shards
from clap_ds.data.loader_throughput import LoaderThroughput, describe
from clap_ds.data.shard_io import Kind
from tests.data.tars import marked_tars


@pytest.mark.parametrize(
    ("throughput", "needed", "said"),
    [
        ((1000.0, 4, "encoded"), 800.0, "can load 1,000 clips/s, their rank's step needs 800: enough"),
        ((1000.0, 4, "encoded"), 900.0, ": margin below 25%. Set clap.data.num_workers to 5"),
        ((1000.0, 4, "encoded"), 2000.0, "num_workers to 10 (20 worker(s) and 2"),
        ((1000.0, 4, "waveform"), 3000.0, "22 cores: NOT enough); prepared shards"),
        ((50.0, 0, "encoded"), 25.0, "makes each step 50% longer"),
    ],
)
def test_verdict(throughput: tuple[float, int, Kind], needed: float, said: str) -> None:
    text = describe(LoaderThroughput(*throughput), needed, ranks_per_host=2, cores=22)
    assert said in text
    assert "--kind mel" not in text or throughput[2] != "mel"


def test_measures_more_and_more_workers(tmp_path: Path, tokenizer_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    tars = marked_tars(tmp_path, 2, 8)
    (tmp_path / "tokenizer").symlink_to(tokenizer_dir)
    options = "--preset micro --seconds 0.1 --max_workers 3 --target_samples_per_s 0.5"
    shards.main(["measure", tars, *options.split()])
    printed = capsys.readouterr().out
    rows = [list(map(float, line.split())) for line in printed.splitlines() if re.match(r" +\d", line)]
    assert [workers for workers, *_ in rows] == [1, 2, 3]
    assert all(rate == pytest.approx(each * workers, abs=0.1 * workers) for workers, rate, each in rows)
    assert re.search(r"[\d,]+ at 624, [\d,]+ at 3,300, [\d,]+ at 4,500", printed)
    assert printed.endswith("enough\n")
