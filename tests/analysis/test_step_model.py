"""The step model's terms against simulations and closed forms, and what is claimed of it on the published tables."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import loss_bench
from clap_ds.analysis.project import render
from clap_ds.analysis.step_model import (
    ALL_LAWS,
    STEP_MODEL,
    WORKLOADS,
    Machine,
    Method,
    Series,
    StepModel,
    Workload,
    all_gather_s,
    all_reduce_s,
    read_series,
)
from clap_ds.analysis.table import Row, write_csv
from clap_ds.config.errors import UserError
from tests.analysis import samples

WORK = Workload(batch_per_gpu=616, joint_dim=512, num_parameters=156.2e6)
NO_LATENCY = Machine(node_bytes_per_s=1e9, gpu_bytes_per_s=1e30, latency_s=0.0)
TRUTH = StepModel(WORK, Machine(), Method(), 0.95, 0.004, window_s=0.5)
TINY, BASE = (read_series(path, Machine(), Method()) for path in (samples.TINY, samples.BASE))


def terms_s(nodes: int, window_s: float, machine: Machine = NO_LATENCY, **method: object) -> dict[str, float]:
    changed = replace(Method(), **method)  # type: ignore[arg-type]
    return StepModel(WORK, machine, changed, window_s=window_s).known_terms_s(nodes)


def series(rates: list[tuple[int, float]], errors: tuple[float, ...] = ()) -> Series:
    return Series("", WORK, tuple(rates), errors=errors)


def of_law(grown: Callable[[float], float], nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> list[tuple[int, float]]:
    """Rates of steps of 0.95 s and a tenth of what has `grown`."""
    return [(count, 616 / (0.95 + 0.1 * grown(count))) for count in nodes]


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_all_reduce_sends_each_chunk_of_a_ring_twice_but_once_to_no_one(nodes: int) -> None:
    assert all_reduce_s(6e9, nodes, 4, NO_LATENCY) == pytest.approx(2 * (nodes - 1) * 6.0 / nodes)


def test_latency_is_that_of_a_tree_once_a_ring_is_longer() -> None:
    machine = Machine(node_bytes_per_s=1e30, gpu_bytes_per_s=1e30, latency_s=1.0)
    assert [all_reduce_s(1, nodes, 4, machine) for nodes in (2, 3, 128)] == pytest.approx([2, 4, 14])


def test_all_gather_at_512_ranks_moves_the_645_mb_of_bf16_features() -> None:
    features = 2 * 616 * 512 * 2
    assert all_gather_s(features, 128, 4, NO_LATENCY) == pytest.approx(0.645, rel=0.01)


def test_one_node_uses_only_its_own_links() -> None:
    slow = Machine(node_bytes_per_s=1.0, gpu_bytes_per_s=1e9, latency_s=100.0)
    assert all_reduce_s(4e9, 1, 4, slow) == pytest.approx(6.0)
    assert all_gather_s(1e9, 1, 4, slow) == pytest.approx(3.0)


def test_what_each_method_changes() -> None:
    base, alone = terms_s(128, 0.5, Machine()), terms_s(128, 0.5, Machine(), overlap=False)
    assert alone["gradient all-reduce"] == pytest.approx(all_reduce_s(4 * 156.2e6, 128, 4, Machine()))
    assert base["gradient all-reduce"] == pytest.approx(all_reduce_s(25e6, 128, 4, Machine()))
    short = terms_s(128, 0.001, Machine())["gradient all-reduce"]
    assert short == pytest.approx(alone["gradient all-reduce"] - 0.001)
    halved = terms_s(128, 0.5, Machine(), overlap=False, gradient_bytes=2)["gradient all-reduce"]
    assert halved == pytest.approx(all_reduce_s(2 * 156.2e6, 128, 4, Machine()))
    exact = terms_s(128, 0.5, Machine(), loss="exact_local")["feature exchange"]
    assert base["feature exchange"] / 2 < exact < 0.51 * base["feature exchange"]
    # The last bucket is what overlap leaves.
    assert terms_s(2, 1e9, bucket_bytes=5e6)["gradient all-reduce"] == pytest.approx(5e6 / 1e9)


def test_an_early_gather_hides_half_the_features_as_far_as_the_text_tower_lasts() -> None:
    # A backward window of 3 ms goes with a forward pass of 2 ms, half of it the text tower's.
    for window_s, hidden_s in ((6.0, 7 * 4 * 2 * 616 * 512 * 2 / 1e9 / 2), (0.003, 0.001)):
        late, early = (terms_s(8, window_s, loss="exact_local", early_gather=early) for early in (False, True))
        assert late["feature exchange"] - early["feature exchange"] == pytest.approx(hidden_s)


def test_loss_grows_with_ranks_and_everything_is_positive() -> None:
    small, large = (terms_s(nodes, 0.5, Machine()) for nodes in (1, 128))
    assert large["contrastive loss"] == pytest.approx(128 * small["contrastive loss"])
    assert min(*small.values(), *large.values()) > 0


@pytest.mark.parametrize(
    ("loss", "traced"), [("exact_local", "exact_local"), ("gather_with_grad", "gather_with_gradient")]
)
@pytest.mark.parametrize("work", WORKLOADS.values())
def test_memory_traffic_of_the_loss_is_what_a_trace_finds(work: Workload, loss: str, traced: str) -> None:
    found = loss_bench.traced(traced, 512, work.batch_per_gpu, work.joint_dim)
    memory_only = Machine(memory_bytes_per_s=1e9, peak_flops=1e30)
    stated = StepModel(work, memory_only, replace(Method(), loss=loss)).known_terms_s(128)["contrastive loss"]  # type: ignore[arg-type]
    assert stated == pytest.approx(found["gigabytes"], rel=0.03)


LAWS_OF: dict[str, Callable[[float], float]] = {"a + b·log n": math.log, "a + b·√n": math.sqrt, "a + b·n": float}


def test_fit_recovers_what_made_the_data() -> None:
    exact = series([(nodes, TRUTH.rate(nodes)) for nodes in (1, 2, 4, 8, 16, 32)])
    found = exact.fit()
    assert (found.compute_s, found.delay_s) == (pytest.approx(0.95), pytest.approx(0.004))
    assert found.efficiency_percent(1024) == pytest.approx(TRUTH.efficiency_percent(1024))
    assert (exact.best_law(), exact.foretold_points()[STEP_MODEL]) == (STEP_MODEL, pytest.approx(0, abs=1e-6))
    for law, grown in LAWS_OF.items():
        made = series(of_law(grown))
        assert made.fit(law).step_s(512) == pytest.approx(0.95 + 0.1 * grown(512))
        assert made.best_law() == law


@pytest.mark.parametrize("law", ALL_LAWS)
def test_a_noisy_scale_pulls_less(law: str) -> None:
    rates = of_law(LAWS_OF.get(law, lambda nodes: 10 * (TRUTH.step_s(int(nodes)) - 0.95)))
    wrong = [*rates[:-1], (32, 0.9 * rates[-1][1])]
    alike, known = (series(wrong, (*[0.01] * 5, last)).fit(law).rate(8) for last in (0.01, 0.2))
    expected, equal = series(rates).fit(law).rate(8), series(wrong).fit(law).rate(8)
    assert alike == pytest.approx(equal)
    assert abs(known - expected) < 0.1 * abs(alike - expected)


def test_hold_outs_are_fitted_on_smaller_scales_alone() -> None:
    assert [(small.rates[-1][0], nodes) for small, nodes, _ in TINY.first(5).hold_outs()] == [
        (2, 4), (4, 8), (8, 16), (2, 8), (4, 16),
    ]  # fmt: skip
    (_, one), (_, two), (_, four) = TINY.rates[:3]
    root = 1 / one + (1 / two - 1 / one) * (4**0.5 - 1) / (2**0.5 - 1)  # a + b·√n through two points, by hand
    error = abs(100 / root / one - 100 * four / one)
    assert TINY.first(3).foretold_points()["a + b·√n"] == pytest.approx(error, abs=1e-6)
    assert TINY.first(2).foretold_points() == {}
    assert TINY.first(2).best_law() == STEP_MODEL


def test_what_nothing_can_be_projected_from_is_said() -> None:
    assert TINY.doubt() == BASE.doubt() == ""
    jagged = series([(1, 600.0), (2, 300.0), (4, 590.0), (8, 310.0)])
    assert "misses what was measured by up to" in jagged.doubt()
    above = [(1, 600.0), (2, 630.0), (4, 625.0)]
    assert (
        series(above)
        .doubt()
        .startswith("2 nodes have 105.0 % of the smallest scale's rate per GPU, more than 100 by more")
    )
    assert series(above, (0.05, 0.05, 0.05)).doubt() == ""
    assert series(above, (0.03, 0.03, 0.03)).doubt() != ""


def test_no_fitted_time_is_negative() -> None:
    rising = series([(1, 600.0), (2, 610.0), (4, 620.0)]).fit()
    assert rising.delay_s == 0
    assert rising.compute_s > 0
    falling = series([(1, 600.0), (2, 100.0), (4, 30.0)]).fit()
    assert falling.compute_s == 0
    assert falling.delay_s > 0


@pytest.mark.parametrize(("measured", "limit", "average"), [(TINY, 1.1, 0.4), (BASE, 3.0, 1.6)], ids=["tiny", "base"])
def test_small_scales_predict_large_ones(measured: Series, limit: float, average: float) -> None:
    assert max(map(abs, measured.errors_points(measured.fit()))) < 1.1
    cases = measured.hold_outs()
    errors = [abs(small.efficiency_percent(small.fit().rate(nodes)) - actual) for small, nodes, actual in cases]
    assert max(errors) < limit
    assert measured.foretold_points()[STEP_MODEL] == pytest.approx(sum(errors) / len(errors))
    assert sum(errors) / len(errors) < average


def test_bands_widen_with_distance_and_hold_what_was_held_out() -> None:
    for measured in (TINY, BASE):
        bands = measured.first(5).bands([32, 64, 128, 1024])
        widths = [high - low for low, high in bands.values()]
        assert widths == sorted(widths)
        assert all(bands[n][0] <= measured.efficiency_percent(rate) <= bands[n][1] for n, rate in measured.rates[5:])


def test_bands_repeat_and_are_absent_for_two_scales() -> None:
    assert TINY.bands([512])[512] == TINY.bands([256, 512])[512]
    assert TINY.first(2).bands([512]) == {}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([Row(1, 4, 10.0, 40.0, model="htsat_tiny_roberta_base", batch_per_gpu=8)], "at least two"),
        ([Row(n, 4 * n, 9.0, 36.0 * n, model="micro", batch_per_gpu=8) for n in (1, 2)], "--num_parameters"),
        (
            [Row(n, 4, 9.0, 36.0, model="htsat_tiny_roberta_base", batch_per_gpu=8) for n in (1, 2)],
            "different numbers of GPUs per node",
        ),
        ([Row(n, 4 * n, 9.0, 36.0 * n, model=f"m{n % 2}", batch_per_gpu=8) for n in (1, 2, 3, 4)], "2 series"),
    ],
)
def test_tables_that_cannot_be_projected_are_refused(tmp_path: Path, rows: list[Row], said: str) -> None:
    write_csv(tmp_path / "t.csv", rows)
    with pytest.raises(UserError, match=said):
        read_series(tmp_path / "t.csv", Machine(), Method())


def test_a_tables_uncertainty_is_the_weight_of_its_rates(tmp_path: Path) -> None:
    rows = [Row(n, 4 * n, 10.0, 40.0 * n, model="htsat_tiny_roberta_base", batch_per_gpu=8, samples_per_s_per_gpu_2sigma=n / 10)
            for n in (1, 2)]  # fmt: skip
    write_csv(tmp_path / "t.csv", rows)
    assert read_series(tmp_path / "t.csv", Machine(), Method()).errors == pytest.approx((0.01, 0.02))


def test_a_table_without_a_batch_per_gpu_is_projected_by_what_it_has(tmp_path: Path) -> None:
    def found(**known: int) -> Series:
        rows = [Row(n, 4 * n, rate, 4 * n * rate, model="htsat_tiny_roberta_base", **known) for n, rate in TINY.rates]  # type: ignore[arg-type]
        write_csv(tmp_path / "t.csv", rows)
        return read_series(tmp_path / "t.csv", Machine(), Method())

    whole, micro, bare = found(batch_per_gpu=616), found(micro_batch=616), found()
    assert (micro.workload, micro.bands([512])) == (whole.workload, whole.bands([512]))
    assert STEP_MODEL in micro.laws
    assert bare.laws == tuple(LAWS_OF)
    assert bare.first(2).best_law() == "a + b·√n"
    without = {law: error for law, error in whole.foretold_points().items() if law != STEP_MODEL}
    assert bare.foretold_points() == pytest.approx(without)
    low, high = bare.bands([512])[512]
    assert low < bare.efficiency_percent(bare.fit(bare.best_law()).rate(512)) < high
    text = render(bare)
    assert "the step model left out" in text
    assert "step model %" not in text


def test_sizes_can_be_given(tmp_path: Path) -> None:
    rows = [Row(n, 2 * n, 9.0 - n, 2 * n * (9.0 - n), model="micro", batch_per_gpu=8) for n in (1, 2)]
    write_csv(tmp_path / "t.csv", rows)
    assert read_series(tmp_path / "t.csv", Machine(), Method(), 1e6, 64).workload == Workload(8, 64, 1e6, 2)
