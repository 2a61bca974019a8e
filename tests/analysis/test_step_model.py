"""The step model's terms against simulations and closed forms written here."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from clap_ds.analysis.step_model import (
    Machine,
    Method,
    StepModel,
    Workload,
    all_gather_s,
    all_reduce_s,
    expected_slowest,
    fit,
    known_terms_s,
)

WORK = Workload(batch_per_gpu=616, joint_dim=512, num_parameters=156.2e6)
NO_LATENCY = Machine(node_bytes_per_s=1e9, gpu_bytes_per_s=1e30, latency_s=0.0)


def ring_bytes_sent(values: list[list[float]]) -> int:
    """Run a ring all-reduce chunk by chunk; returns chunks each member sent, after checking the sums are right."""
    n = len(values)
    state = [list(chunks) for chunks in values]
    sent = 0
    for phase in (0, 1):
        for step in range(n - 1):
            moves = []
            for rank in range(n):
                chunk = (rank - step + phase) % n
                moves.append(((rank + 1) % n, chunk, state[rank][chunk]))
            for target, chunk, value in moves:
                state[target][chunk] = value if phase else state[target][chunk] + value
            sent += 1
    totals = [sum(values[rank][chunk] for rank in range(n)) for chunk in range(n)]
    assert all(chunks == totals for chunks in state)
    return sent


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_all_reduce_takes_the_bytes_a_simulated_ring_sends(nodes: int) -> None:
    chunks = ring_bytes_sent([[float(rank * 10 + chunk) for chunk in range(nodes)] for rank in range(nodes)])
    assert all_reduce_s(6e9, nodes, 4, NO_LATENCY) == pytest.approx(chunks * 6.0 / nodes)


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
    machine = Machine()

    def terms(nodes: int = 128, window: float = 0.5, **changes: object) -> dict[str, float]:
        return known_terms_s(WORK, machine, replace(Method(), **changes), nodes, window)  # type: ignore[arg-type]

    base = terms()
    alone = terms(overlap=False)
    assert alone["gradient all-reduce"] == pytest.approx(all_reduce_s(4 * 156.2e6, 128, 4, machine))
    assert base["gradient all-reduce"] == pytest.approx(all_reduce_s(25e6, 128, 4, machine))
    assert terms(window=0.001)["gradient all-reduce"] == pytest.approx(alone["gradient all-reduce"] - 0.001)
    halved = terms(overlap=False, gradient_bytes=2)["gradient all-reduce"]
    assert halved == pytest.approx(all_reduce_s(2 * 156.2e6, 128, 4, machine))
    exact = terms(loss="exact_local")["feature exchange"]
    assert base["feature exchange"] / 2 < exact < 0.51 * base["feature exchange"]


def test_an_early_gather_hides_half_the_features_as_far_as_the_text_tower_lasts() -> None:
    exact = Method(loss="exact_local")
    late = known_terms_s(WORK, NO_LATENCY, exact, 8, 6.0)["feature exchange"]
    early = known_terms_s(WORK, NO_LATENCY, replace(exact, early_gather=True), 8, 6.0)["feature exchange"]
    features = 7 * 4 * 2 * 616 * 512 * 2 / 1e9
    assert late - early == pytest.approx(features / 2)
    # A backward window of 3 ms goes with a forward pass of 2 ms, half of it the text tower's.
    short = known_terms_s(WORK, NO_LATENCY, replace(exact, early_gather=True), 8, 0.003)["feature exchange"]
    assert late - short == pytest.approx(0.001)


def test_the_last_bucket_is_what_overlap_leaves() -> None:
    for bucket in (5e6, 25e6):
        terms = known_terms_s(WORK, NO_LATENCY, Method(bucket_bytes=bucket), 2, 1e9)
        assert terms["gradient all-reduce"] == pytest.approx(bucket / 1e9)


def test_loss_grows_with_ranks_and_everything_is_positive() -> None:
    small, large = (known_terms_s(WORK, Machine(), Method(), nodes, 0.5) for nodes in (1, 128))
    assert large["contrastive loss"] == pytest.approx(128 * small["contrastive loss"])
    assert min(*small.values(), *large.values()) > 0


@pytest.mark.parametrize("tail_index", [1.6, 2.0, 3.0])
@pytest.mark.parametrize("ranks", [64, 512])
def test_expected_slowest_against_the_exact_mean_of_a_paretos_maximum(ranks: int, tail_index: float) -> None:
    # E[max of P Pareto(a)] = Γ(P + 1)·Γ(1 - 1/a) / Γ(P + 1 - 1/a), exactly.
    exact = math.exp(math.lgamma(ranks + 1) - math.lgamma(ranks + 1 - 1 / tail_index)) * math.gamma(1 - 1 / tail_index)
    assert expected_slowest(ranks, tail_index) == pytest.approx(exact, rel=0.01)


def test_expected_slowest_against_simulation() -> None:
    generator = random.Random(0)
    drawn = [max(generator.paretovariate(4.0) for _ in range(64)) for _ in range(4000)]
    assert expected_slowest(64, 4.0) == pytest.approx(sum(drawn) / len(drawn), rel=0.03)


def test_fit_recovers_what_made_the_data() -> None:
    truth = StepModel(WORK, Machine(), Method(), 0.95, 0.004, window_s=0.5)
    rates = [(nodes, truth.rate(nodes)) for nodes in (1, 2, 4, 8, 16)]
    found = fit(WORK, Machine(), Method(), rates)
    assert (found.compute_s, found.delay_s) == (pytest.approx(0.95), pytest.approx(0.004))
    assert found.efficiency_percent(1024) == pytest.approx(truth.efficiency_percent(1024))


def test_fit_is_numpys_weighted_least_squares() -> None:
    generator = random.Random(1)
    truth = StepModel(WORK, Machine(), Method(), 0.95, 0.004, window_s=0.5)
    rates = [(nodes, truth.rate(nodes) * (1 + generator.gauss(0, 0.01))) for nodes in (1, 2, 4, 8, 16, 32)]
    found = fit(WORK, Machine(), Method(), rates)
    times = np.array([616 / rate for _, rate in rates])
    known = [sum(known_terms_s(WORK, Machine(), Method(), nodes, found.window_s).values()) for nodes, _ in rates]
    columns = np.array([[1, expected_slowest(4 * nodes)] for nodes, _ in rates])
    expected = np.linalg.lstsq(columns / times[:, None], (times - known) / times, rcond=None)[0]
    assert [found.compute_s, found.delay_s] == pytest.approx(expected.tolist())


def test_speed_that_rises_with_scale_gives_no_negative_delay() -> None:
    found = fit(WORK, Machine(), Method(), [(1, 600.0), (2, 610.0), (4, 620.0)])
    assert found.delay_s == 0
    assert found.compute_s > 0


def test_a_fit_needs_two_scales() -> None:
    with pytest.raises(ValueError, match="two node counts"):
        fit(WORK, Machine(), Method(), [(2, 600.0), (2, 601.0)])
