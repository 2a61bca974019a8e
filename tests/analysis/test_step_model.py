"""The step model's terms against simulations and closed forms, and what is claimed of it on the published tables."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import loss_trace
from clap_ds.analysis.step_model import (
    WORKLOADS,
    Machine,
    Method,
    Series,
    StepModel,
    Workload,
    all_gather_s,
    all_reduce_s,
    read_series,
    transfer,
)
from clap_ds.analysis.table import Row, write_csv
from clap_ds.config.errors import UserError
from tests.analysis import samples

WORK = Workload(batch_per_gpu=616, joint_dim=512, num_parameters=156.2e6)
NO_LATENCY = Machine(node_bytes_per_s=1e9, gpu_bytes_per_s=1e30, latency_s=0.0)
TRUTH = StepModel(WORK, Machine(), Method(), 0.95, 0.004, window_s=0.5, shape=0.5)
TINY, BASE = (read_series(path, Machine(), Method()) for path in (samples.TINY, samples.BASE))


def terms_s(nodes: int, window_s: float, machine: Machine = NO_LATENCY, **method: object) -> dict[str, float]:
    changed = replace(Method(), **method)  # type: ignore[arg-type]
    return StepModel(WORK, machine, changed, window_s=window_s).known_terms_s(nodes)


def series(rates: list[tuple[int, float]]) -> Series:
    return Series("", WORK, tuple(rates))


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
    found = loss_trace.measure(traced, 512, work.batch_per_gpu, work.joint_dim)
    memory_only = Machine(memory_bytes_per_s=1e9, peak_flops=1e30)
    stated = StepModel(work, memory_only, replace(Method(), loss=loss)).known_terms_s(128)["contrastive loss"]  # type: ignore[arg-type]
    assert stated == pytest.approx(found["gigabytes"], rel=0.03)


def test_fit_recovers_what_made_the_data() -> None:
    exact = series([(nodes, TRUTH.rate(nodes)) for nodes in (1, 2, 4, 8, 16, 32)])
    found = exact.fit(TRUTH.shape)
    assert (found.compute_s, found.delay_s) == (pytest.approx(0.95), pytest.approx(0.004))
    assert found.efficiency_percent(1024) == pytest.approx(TRUTH.efficiency_percent(1024))
    # Nobody said how delays grow: it is to be seen from the rates.
    assert exact.fit().shape == pytest.approx(0.5, abs=0.2)
    assert series([(nodes, 600.0 / nodes) for nodes in (1, 2, 4, 8)]).fit().shape == pytest.approx(1, abs=0.05)


def test_no_fitted_time_is_negative() -> None:
    rising = series([(1, 600.0), (2, 610.0), (4, 620.0)]).fit()
    assert rising.delay_s == 0
    assert rising.compute_s > 0
    falling = series([(1, 600.0), (2, 100.0), (4, 30.0)]).fit()
    assert falling.compute_s == 0
    assert falling.delay_s > 0


@pytest.mark.parametrize(("measured", "limit"), [(TINY, 2.0), (BASE, 2.5)], ids=["tiny", "base"])
def test_small_scales_predict_large_ones_better_than_log_plus_linear(measured: Series, limit: float) -> None:
    assert max(map(abs, measured.errors_points(measured.fit()))) < 1.1
    small = measured.up_to(16)
    assert [nodes for nodes, _ in small.rates] == [1, 2, 4, 8, 16]
    errors = measured.errors_points(small.fit())[5:]
    assert max(map(abs, errors)) < limit
    nodes, rate = measured.rates[-1]
    rival = (small.simple_efficiency("a + b·log n + c·n", nodes) or 0) - measured.efficiency_percent(rate)
    assert rival < -4
    assert abs(errors[-1]) < abs(rival) / 2


def test_tinys_delays_unchanged_describe_base() -> None:
    moved = transfer(TINY.fit(), BASE)
    errors = BASE.errors_points(moved)
    assert errors[0] == pytest.approx(0, abs=1e-9)
    assert (moved.delay_s, moved.workload) == (TINY.fit().delay_s, BASE.workload)
    assert max(map(abs, errors)) < 1.3


def test_bands_widen_with_distance_and_hold_what_was_held_out() -> None:
    for measured in (TINY, BASE):
        bands = measured.up_to(16).bands([32, 64, 128, 1024])
        widths = [high - low for low, high in bands.values()]
        assert widths == sorted(widths)
        assert all(bands[n][0] <= measured.efficiency_percent(rate) <= bands[n][1] for n, rate in measured.rates[5:])


def test_bands_repeat_and_are_absent_for_two_scales() -> None:
    assert TINY.bands([512]) == TINY.bands([512])
    assert TINY.up_to(2).bands([512]) == {}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([Row(1, 4, 10.0, 40.0, model="htsat_tiny_roberta_base", batch_per_gpu=8)], "at least two"),
        ([Row(n, 4 * n, 9.0, 36.0 * n, model="micro", batch_per_gpu=8) for n in (1, 2)], "--num_parameters"),
        ([Row(n, 4 * n, 9.0, 36.0 * n, model="htsat_tiny_roberta_base") for n in (1, 2)], "no batch_per_gpu"),
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


def test_sizes_can_be_given(tmp_path: Path) -> None:
    rows = [Row(n, 2 * n, 9.0 - n, 2 * n * (9.0 - n), model="micro", batch_per_gpu=8) for n in (1, 2)]
    write_csv(tmp_path / "t.csv", rows)
    assert read_series(tmp_path / "t.csv", Machine(), Method(), 1e6, 64).workload == Workload(8, 64, 1e6, 2)


def test_a_series_is_chosen_of_a_table_that_holds_several(tmp_path: Path) -> None:
    table = tmp_path / "both.csv"
    models = {"htsat_tiny_roberta_base": (600, 590, 570), "htsat_base_roberta_base": (500, 490, 480)}
    rows = [
        f"{model},{nodes},{4 * nodes},{rate},416"
        for model, rates in models.items()
        for nodes, rate in zip((1, 2, 4), rates, strict=True)
    ]
    table.write_text("\n".join(["model,nodes,gpus,samples_per_s_per_gpu,batch_per_gpu", *rows]) + "\n")
    with pytest.raises(UserError, match=r"holds 2 series; choose one with --series NAME: "):
        read_series(table, Machine(), Method())
    chosen = read_series(table, Machine(), Method(), name="htsat_base")
    assert [rate for _, rate in chosen.rates] == [500, 490, 480]
