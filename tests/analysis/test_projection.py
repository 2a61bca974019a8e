"""The model on the published tables, held to what is claimed of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.analysis.projection import (
    Setting,
    at_rate,
    engine_methods,
    errors_points,
    fit_measured,
    log_linear_efficiency,
    node_counts_of,
    prediction_bands,
    read_measured,
    transfer,
    what_ifs,
)
from clap_ds.analysis.published import PUBLISHED_DIR
from clap_ds.analysis.runs import InputError
from clap_ds.analysis.step_model import Machine, Method, StepModel
from clap_ds.analysis.table import Row, write_csv

SETTING = Setting(Machine(), Method())
TINY, BASE = (read_measured(PUBLISHED_DIR / f"jupiter_htsat_{size}.csv") for size in ("tiny", "base"))


@pytest.mark.parametrize("measured", [TINY, BASE], ids=["tiny", "base"])
def test_the_whole_table_is_fitted_within_one_point(measured) -> None:  # type: ignore[no-untyped-def]
    assert max(map(abs, errors_points(fit_measured(measured, SETTING), measured))) < 1.0


@pytest.mark.parametrize(("measured", "limit"), [(TINY, 1.0), (BASE, 2.5)], ids=["tiny", "base"])
def test_small_scales_foretell_large_ones_better_than_log_plus_linear(measured, limit: float) -> None:  # type: ignore[no-untyped-def]
    small = measured.up_to(16)
    assert [nodes for nodes, _ in small.rates] == [1, 2, 4, 8, 16]
    errors = errors_points(fit_measured(small, SETTING), measured)[5:]
    assert max(map(abs, errors)) < limit
    nodes, rate = measured.rates[-1]
    rival = log_linear_efficiency(small, nodes) - measured.efficiency_percent(rate)
    assert rival < -4
    assert abs(errors[-1]) < abs(rival) / 2


def test_the_rival_misses_tiny_by_about_five_and_a_half_points() -> None:
    assert log_linear_efficiency(TINY.up_to(16), 128) - 87.3 == pytest.approx(-5.6, abs=0.2)


def test_tinys_delays_unchanged_describe_base() -> None:
    moved = transfer(fit_measured(TINY, SETTING), BASE, SETTING)
    errors = errors_points(moved, BASE)
    assert errors[0] == pytest.approx(0, abs=1e-9)
    assert moved.delay_s == fit_measured(TINY, SETTING).delay_s
    assert max(map(abs, errors)) < 1.3


def test_bands_widen_with_distance_and_hold_most_of_what_was_held_out() -> None:
    held = 0
    for measured in (TINY, BASE):
        bands = prediction_bands(measured.up_to(16), SETTING, [32, 64, 128, 1024])
        widths = [high - low for low, high in bands.values()]
        assert widths == sorted(widths)
        held += sum(bands[n][0] <= measured.efficiency_percent(rate) <= bands[n][1] for n, rate in measured.rates[5:])
    assert held >= 5


def test_bands_are_the_same_every_time_and_absent_for_three_scales() -> None:
    assert prediction_bands(TINY, SETTING, [512]) == prediction_bands(TINY, SETTING, [512])
    assert prediction_bands(TINY.up_to(4), SETTING, [512]) == {}


def test_bands_vanish_without_noise() -> None:
    model = StepModel(TINY.workload, SETTING.machine, SETTING.method, 0.95, 0.004, window_s=0.5)
    exact = replace(TINY, rates=tuple((nodes, model.rate(nodes)) for nodes, _ in TINY.rates))
    low, high = prediction_bands(exact, SETTING, [1024])[1024]
    assert high - low < 1e-6


def test_what_ifs_go_the_way_physics_says() -> None:
    found = what_ifs(fit_measured(TINY, SETTING))
    base = found["as fitted"]
    assert found["without overlap of the all-reduce"].rate(256) < base.rate(256)
    assert found["exact local loss"].rate(256) > base.rate(256)
    assert found["links a quarter as fast"].rate(256) < base.rate(256)
    assert found["links a quarter as fast"].rate(1) == base.rate(1)
    faster = found["compute twice as fast"]
    assert faster.rate(256) > base.rate(256)
    assert faster.efficiency_percent(256) < base.efficiency_percent(256)
    assert found["a quarter of the delays"].efficiency_percent(256) > base.efficiency_percent(256)
    open_air = Setting(SETTING.machine, Method(overlap=False))
    exposed = what_ifs(fit_measured(TINY, open_air))
    assert exposed["bf16 all-reduce"].rate(256) > exposed["as fitted"].rate(256)
    assert exposed["with overlap of the all-reduce"].rate(256) > exposed["as fitted"].rate(256)


@pytest.mark.parametrize("nodes", [128, 1024])
def test_exact_loss_and_overlap_each_help_and_both_help_most(nodes: int) -> None:
    model = fit_measured(TINY, SETTING)
    for step in (model, at_rate(model, 3300.0, 1, False), at_rate(model, 3300.0, 1, True)):
        rates = {name: replace(step, method=method).rate(nodes) for name, method in engine_methods().items()}
        assert rates["neither"] < min(rates["exact local loss"], rates["overlapped all-reduce"])
        assert rates["both"] == max(rates.values())
        assert rates["both"] > max(rates["exact local loss"], rates["overlapped all-reduce"])


def test_a_faster_step_has_the_rate_asked_for_and_scales_worse() -> None:
    model = fit_measured(TINY, SETTING)
    same, shrunk = (at_rate(model, 3300.0, 1, delays_shrink) for delays_shrink in (False, True))
    assert same.rate(1) == pytest.approx(3300)
    assert shrunk.rate(1) == pytest.approx(3300)
    assert same.delay_s == model.delay_s
    assert shrunk.delay_s == pytest.approx(model.delay_s * model.rate(1) / 3300)
    assert same.efficiency_percent(128) < shrunk.efficiency_percent(128) < model.efficiency_percent(128)
    with pytest.raises(InputError, match="alone take longer"):
        at_rate(model, 1e6, 1, False)


def test_gpus_that_fill_no_whole_node_are_left_out() -> None:
    assert node_counts_of(TINY, [2, 4, 6, 8, 4096]) == [1, 2, 1024]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([Row(1, 4, 10.0, 40.0, model="htsat_tiny_roberta_base", batch_per_gpu=8)], "at least two"),
        ([Row(1, 4, 10.0, 40.0, model="micro", batch_per_gpu=8), Row(2, 8, 9.0, 72.0, model="micro", batch_per_gpu=8)],
         "--num_parameters"),
        ([Row(n, 4 * n, 9.0, 36.0 * n, model="htsat_tiny_roberta_base") for n in (1, 2)], "no batch_per_gpu"),
        ([Row(1, 4, 9.0, 36.0, model="htsat_tiny_roberta_base", batch_per_gpu=8),
          Row(2, 4, 9.0, 36.0, model="htsat_tiny_roberta_base", batch_per_gpu=8)], "different numbers of GPUs per node"),
        ([Row(n, 4 * n, 9.0, 36.0 * n, model=f"m{n % 2}", batch_per_gpu=8) for n in (1, 2, 3, 4)], "2 series"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_projected_are_refused(tmp_path: Path, rows: list[Row], said: str) -> None:
    write_csv(tmp_path / "t.csv", rows)
    with pytest.raises(InputError, match=said):
        read_measured(tmp_path / "t.csv")


def test_sizes_can_be_given(tmp_path: Path) -> None:
    rows = [Row(n, 2 * n, 9.0 - n, 2 * n * (9.0 - n), model="micro", batch_per_gpu=8) for n in (1, 2)]
    write_csv(tmp_path / "t.csv", rows)
    workload = read_measured(tmp_path / "t.csv", 1e6, 64).workload
    assert (workload.num_parameters, workload.joint_dim, workload.gpus_per_node) == (1e6, 64, 2)
