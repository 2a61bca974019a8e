"""Test reports about the data loader."""

import pytest

from clap_ds.data.batch import Kind
from clap_ds.data.loader_throughput import LoaderThroughput, describe


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
