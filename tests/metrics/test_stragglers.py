"""Stragglers in synthetic step times."""

import re

import numpy as np
import pytest

from clap_ds.metrics.stragglers import KEPT_STEPS, MIN_STEPS, Stragglers, rate_without, slow_ranks

# 300 steps of six ranks with a standard deviation of 2%.
OWN_S = 1 + np.random.default_rng(2).normal(0, 0.02, (300, 6))


@pytest.mark.parametrize(
    ("own_s", "factors", "slow"),
    [
        # Two steps are added up, so that three standard deviations are 4.2%.
        (OWN_S[:30], [1, 1, 1, 1, 1.035, 1], []),
        (OWN_S[:30], [1, 1, 1, 1, 1.075, 1], [4]),
        # 20 steps are added up.
        (OWN_S, [1, 1, 1.001, 1, 1.045, 1], [4]),
        (OWN_S, [1, 1.5, 1, 1, 1, 1.2], [1, 5]),
        # No noise, but at least 3%.
        (np.ones((300, 6)), [1, 1, 1.001, 1, 1.05, 1], [4]),
        (OWN_S[: MIN_STEPS - 1], [1, 2, 1, 1, 1, 1], []),
    ],
)
def test_slow_ranks_exceed_noise_and_a_minimum(own_s, factors, slow):
    assert slow_ranks(own_s * factors) == slow


def test_slow_ranks_include_previous_ones_at_half_the_limit():
    own_s = OWN_S[:30] * [1, 1, 1, 1, 1.035, 1]
    assert slow_ranks(own_s, previous=[4]) == [4]


def test_rate_without_slow_ranks_has_the_next_slowest_ranks_time():
    """A step takes its slowest rank's own time plus 1 s; without rank 2, rank 0's 4 s count."""
    own_s = np.array([[4.0, 3.0, 8.0, 3.0]] * 5 + [[4.0, 3.0, 3.5, 3.0]] * 5)
    step_s = 1 + own_s.max(axis=1)
    samples = np.full(10, 24.0)
    assert rate_without([2], samples, step_s, own_s) == pytest.approx(24 / 5)
    assert rate_without([0, 2], samples, step_s, own_s) == pytest.approx(24 / 4)


def test_stragglers_are_listed_by_lag_up_to_five():
    # Ranks 1 to 6 are slower by 10 to 60%, as a minority of 15 ranks.
    own_s = np.ones((30, 15))
    own_s[:, 1:7] += np.arange(1, 7) / 10
    stragglers = Stragglers([f"node{rank}" for rank in range(15)])
    stragglers.add(15, own_s.max(axis=1), own_s, np.zeros_like(own_s))
    (warning,) = stragglers.warnings
    assert re.findall(r"rank (\d+) on node\1,", warning) == ["6", "5", "4", "3", "2"]
    assert warning.endswith("1 more")


def test_stragglers_are_printed_when_they_begin_and_end(capsys):
    """For 300 steps rank 3 is 0.3 s slower than the median rank, of which 0.2 s is data wait; rank
    0 is slightly faster."""
    stragglers = Stragglers(["a", "a", "b", "b"])
    records = []
    window = 25
    for step in range(0, 3 * KEPT_STEPS, window):
        data_wait_s = np.full((window, 4), 0.1)
        own_s = np.tile([0.98, 1.0, 1.0, 1.0], (window, 1))
        if step < 300:
            data_wait_s[:, 3] += 0.2
            own_s[:, 3] += 0.3
        records.append(stragglers.add(8, own_s.max(axis=1), own_s, data_wait_s))
    slow_record = records[299 // window]
    (straggler,) = slow_record["stragglers"]
    assert straggler == pytest.approx(
        {"rank": 3, "host": "b", "lag_s": 0.3, "lag_percent": 30, "data_wait_s": 0.2}
    )
    assert slow_record["stragglers_cost_samples_per_s"] == pytest.approx(8 / 1 - 8 / 1.3)
    assert records[-1] == {"stragglers": [], "stragglers_cost_samples_per_s": 0}
    assert stragglers.warnings == []
    begin, end = capsys.readouterr().out.splitlines()
    assert "1.8 samples/s: rank 3 on b, +300.0 ms/step (+30.0%), data wait +200.0 ms" in begin
    assert "no stragglers" in end
