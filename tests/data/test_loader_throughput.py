import pytest

from clap_ds.data.loader_throughput import LoaderThroughput, describe
from clap_ds.data.shard_io import Kind


@pytest.mark.parametrize(
    ("throughput", "needed", "said"),
    [
        (
            (1000.0, 4, "encoded"),
            800.0,
            "can load 1,000 clips/s, their rank's step needs 800: enough",
        ),
        ((1000.0, 4, "encoded"), 900.0, ": margin below 25%. Set clap.data.num_workers to 5"),
        ((1000.0, 4, "encoded"), 2000.0, "Set clap.data.num_workers to 10; prepared"),
        ((1000.0, 4, "waveform"), 3000.0, "more than this host's 22 cores for 2 rank(s)"),
        ((50.0, 0, "encoded"), 25.0, "makes each step 50% longer"),
    ],
)
def test_verdict(throughput: tuple[float, int, Kind], needed: float, said: str) -> None:
    assert said in describe(LoaderThroughput(*throughput), needed, ranks_per_host=2, cores=22)
