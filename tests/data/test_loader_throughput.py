"""What a run says of its loader, by hand-worked cases."""

import pytest

from clap_ds.data.front_end import Kind
from clap_ds.data.loader_throughput import Supply, verdict


@pytest.mark.parametrize(
    ("supply", "needed", "said"),
    [
        ((1000.0, 4, "encoded"), 800.0, "can give 1,000 clips/s, the step of their rank takes 800: enough"),
        ((1000.0, 4, "encoded"), 900.0, ": less than 25% more. clap.data.num_workers 5 would do"),
        ((1000.0, 4, "encoded"), 2000.0, "num_workers 10 would do (20 worker(s) beside 2"),
        ((1000.0, 4, "waveform"), 3000.0, "22 cores: NOT enough); prepared shards"),
        ((50.0, 0, "encoded"), 25.0, "makes each step 50% longer"),
    ],
)
def test_verdict(supply: tuple[float, int, Kind], needed: float, said: str) -> None:
    text = verdict(Supply(*supply), needed, ranks_per_host=2, cores=22)
    assert said in text
    assert "--kind mel" not in text or supply[2] != "mel"
