"""The loader's benchmark: a row from what the rounds of a set gave."""

import pytest

from benchmarks import loader
from clap_ds.data.loader_speed import Speed
from clap_ds.data.supply import Supply


def test_a_row_is_made_of_medians() -> None:
    speeds = [Speed(Supply(rate, 1, "encoded"), 1.5 * rate) for rate in (30.0, 33.0, 500.0)]
    row = loader.row("WAV", speeds)
    assert (row["per_s"], row["low"], row["high"], row["kb"]) == (33.0, 30.0, 500.0, 1500.0)
    assert row["workers"] == pytest.approx(1.25 * 3300 / 33)
