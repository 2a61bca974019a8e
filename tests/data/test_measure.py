"""The loader's measured rates are those of a known number of samples, bytes and seconds."""

import itertools
from pathlib import Path

import pytest

from clap_ds import shards
from clap_ds.config.settings import load_run
from clap_ds.data.batch import LoaderThroughput
from clap_ds.data.measure import average_bytes, count_samples, describe_rates
from clap_ds.data.shard_assignment import Source
from clap_ds.data.shard_manifest import expand_shards
from tests.data.tars import marked_tars


def test_samples_are_counted_after_warmup_until_seconds_have_passed():
    # Batches of 1, 2, 3, … samples; the clock is read before the first and after each.
    batches = (range(size) for size in itertools.count(1))
    times = iter([100.0, 100.4, 100.9, 101.5])
    assert count_samples(batches, 3, 1.0, clock=lambda: next(times)) == (4 + 5 + 6, 1.5)


def test_rates_of_rank_worker_and_step():
    text = describe_rates(LoaderThroughput(200.0, 4, "encoded"), 250_000.0, 1000)
    assert "per rank: 200.0 samples/s, 50.0 MB/s\n" in text
    assert "per worker, of 4: 50.0 samples/s\n" in text
    assert "1,000 samples per rank, 250.0 MB: 5 s" in text
    in_process = describe_rates(LoaderThroughput(200.0, 0, "encoded"), None, 1000)
    assert "per worker, of 0: 200.0 samples/s\nMB/s: unknown" in in_process


def test_bytes_per_sample_are_averaged_by_shares(tmp_path):
    sources = []
    expected = 0.0
    for num_items, share in ((5, 0.75), (2, 0.25)):
        folder = tmp_path / f"{num_items}"
        folder.mkdir()
        tars = expand_shards(marked_tars(folder, 1, num_items))
        sources.append(Source(tars, share))
        expected += share * Path(tars[0]).stat().st_size / num_items
    assert average_bytes(sources) == pytest.approx(expected)


def test_run_is_measured(write_run, tmp_path, tokenizer_dir, capsys):
    pattern = marked_tars(tmp_path, 2, 8)
    data = {"source": "webdataset", "shards": pattern, "tokenizer": tokenizer_dir}
    path = write_run(clap={"data": {**data, "num_workers": 1}})
    options = ["--rank", "2/2", "--seconds", "0.1", "--needed", "1e9"]
    assert shards.main(["measure", "--config", str(path), *options]) == 0
    printed = capsys.readouterr().out
    assert f"a step needs {load_run(path, 2).micro_batch} samples" in printed
    assert "the step will wait" in printed
