"""Stragglers in synthetic step times."""

import re
from typing import Any

import numpy as np
import pytest

from clap_ds.metrics.stragglers import KEPT_STEPS, Stragglers, rate_without, slow_ranks


def noise(kind: str, size: tuple[int, int], generator: np.random.Generator) -> Any:
    """Generate own times around 1 s, (steps, ranks), with steps that are slow on all ranks."""
    spread = {
        "normal": lambda: generator.normal(0, 0.1, size),
        "skew": lambda: np.exp(generator.normal(0, 0.3, size)) - 1,
        "now and then": lambda: (
            generator.normal(0, 0.02, size) + 2 * (generator.random(size) < 0.1)
        ),
    }[kind]()
    return np.maximum(0.1, 1 + spread) * (1 + generator.random((size[0], 1)))


@pytest.mark.parametrize("kind", ["normal", "skew", "now and then"])
@pytest.mark.parametrize(("ranks", "trials"), [(2, 200), (6, 200), (512, 4)])
def test_noise_alone_names_nobody_and_a_slow_rank_is_named(
    kind: str, ranks: int, trials: int
) -> None:
    generator = np.random.default_rng(1)
    for _ in range(trials):
        own_s = noise(kind, (30, ranks), generator)
        assert slow_ranks(own_s) == []
        order = generator.permutation(ranks)
        own_s = own_s**0.1  # a tenth of the noise
        own_s[:, order[0]] *= 1.4
        assert slow_ranks(own_s) == [order[0]]


def test_how_much_slower_a_slow_rank_is_and_how_long_that_must_be_known() -> None:
    own_s = 1 + np.random.default_rng(2).normal(0, 0.02, (300, 6))
    for factor, is_slow in {
        1.045: False,
        1.075: True,
        0.8: False,
    }.items():  # 3 spreads: 6% of a step, 2% of ten
        assert slow_ranks(own_s[:30] * [1, 1, 1, 1, factor, 1]) == [4] * is_slow, factor
    assert (
        slow_ranks(own_s**0 * [1, 1, 1.001, 1, 1.05, 1])
        == slow_ranks(own_s * [1, 1, 1.001, 1, 1.045, 1])
        == [4]
    )
    assert slow_ranks(own_s[:30] * [1, 1, 1, 1, 1.045, 1], before=[4]) == [
        4
    ]  # a reported rank stays slow for a while
    slow_now_and_then = own_s * np.where(
        (np.arange(300)[:, None] % 5 == 0) & (np.arange(6) == 1), 2, 1
    )
    assert slow_ranks(slow_now_and_then) == [1]  # like a data wait in every fifth step
    assert slow_ranks(own_s[:19] * [1, 2, 1, 1, 1, 1]) == slow_ranks(own_s[:, :1]) == []
    assert slow_ranks(own_s * [1, 1.5, 1, 1, 1, 1.2]) == [1, 5]


def test_the_cost_is_what_the_steps_would_be_shorter() -> None:
    """A step takes its slowest rank's own time plus 1 s; without rank 2, rank 0's 4 s count."""
    own_s = np.array([[4.0, 3.0, 8.0, 3.0]] * 5 + [[4.0, 3.0, 3.5, 3.0]] * 5)
    step_s = 1 + own_s.max(axis=1)
    assert rate_without([2], np.full(10, 24.0), step_s, own_s) == pytest.approx(24 / 5)
    assert rate_without([0, 2], np.full(10, 24.0), step_s, own_s) == pytest.approx(24 / 4)


@pytest.mark.parametrize("window", [1, 25])
def test_a_run_says_who_is_slow_once_and_that_it_is_over(
    window: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 3 is 0.3 s slower than the median rank, of which 0.2 s is data wait; rank 0 is slightly
    faster."""
    watched = Stragglers(["a", "a", "b", "b"])
    found = []
    for step in range(0, 3 * KEPT_STEPS, window):
        data_wait_s = np.full((window, 4), 0.1) + 0.2 * (np.arange(4) == 3) * (step < 300)
        own_s = (
            0.9
            + data_wait_s
            + 0.1 * (np.arange(4) == 3) * (step < 300)
            - 0.02 * (np.arange(4) == 0)
        )
        found.append(watched.add(8, own_s.max(axis=1), own_s, data_wait_s))
    ((slow,), cost) = found[299 // window].values()
    assert slow == pytest.approx(
        {"rank": 3, "host": "b", "lag_s": 0.3, "lag_percent": 30, "data_wait_s": 0.2}
    )
    assert cost == pytest.approx(8 / 1 - 8 / 1.3)
    assert [bool(each["stragglers"]) for each in found].index(True) == -(-20 // window) - 1
    assert (found[-1], watched.warnings) == (
        {"stragglers": [], "stragglers_cost_samples_per_s": 0},
        [],
    )
    first, last = capsys.readouterr().out.splitlines()
    assert all(
        part in first
        for part in ("1.8 samples/s", "rank 3 on b", "+300.0 ms", "+30.0%", "+200.0 ms")
    )
    assert "no stragglers" in last


def test_the_slowest_stragglers_are_listed_first_and_further_ones_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hosts = [f"node{rank}" for rank in range(15)]
    slow = {4: 1.1, 6: 1.5, 7: 1.3, 9: 1.2, 11: 1.6, 12: 1.4, 14: 1.7}
    own_s = np.tile([slow.get(rank, 1.0) for rank in range(15)], (30, 1))
    watched = Stragglers(hosts)
    fields = watched.add(15, own_s.max(axis=1), own_s, np.zeros_like(own_s))
    assert [each["rank"] for each in fields["stragglers"]] == [14, 11, 6, 12, 7, 9, 4]
    (warning,) = watched.warnings
    assert re.findall(r"rank (\d+) on node\1,", warning) == ["14", "11", "6", "12", "7"]
    assert warning.endswith("2 more")
