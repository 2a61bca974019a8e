"""What a run says of its loader, by hand-worked cases."""

import pytest

from clap_ds.data.supply import Supply, verdict


@pytest.mark.parametrize(
    ("supply", "needed", "said"),
    [
        (
            Supply(1000.0, 4, "encoded"),
            800.0,
            "4 worker(s) can give 1,000 clips/s, the step of their rank takes 800: enough",
        ),
        (Supply(1000.0, 4, "encoded"), 900.0, ": just enough; 5 would have a margin of 25%"),
        (
            Supply(1000.0, 4, "encoded"),
            2000.0,
            "num_workers 10 would do (20 worker(s) beside 2 training process(es) on this host's 22 cores: enough)",
        ),
        (Supply(1000.0, 4, "waveform"), 3000.0, "22 cores: NOT enough); or read prepared shards"),
        (Supply(50.0, 0, "encoded"), 25.0, "makes each step 50% longer"),
    ],
)
def test_verdict(supply: Supply, needed: float, said: str) -> None:
    assert said in verdict(supply, needed, ranks_per_host=2, cores=22)


def test_mel_shards_are_not_to_be_prepared_again() -> None:
    assert "prepare" not in verdict(Supply(10.0, 1, "mel"), 100.0, ranks_per_host=1, cores=8)
