"""The step model's terms against closed forms and a traced loss."""

from dataclasses import replace

import pytest

from benchmarks import loss_bench
from clap_ds.analysis.step_model import WORKLOADS, Machine, Method, StepModel, Workload, all_gather_s, all_reduce_s

WORK = Workload(batch_per_gpu=616, joint_dim=512, num_parameters=156.2e6)
NO_LATENCY = Machine(node_bytes_per_s=1e9, gpu_bytes_per_s=1e30, latency_s=0.0)


def terms_s(nodes: int, window_s: float, machine: Machine = NO_LATENCY, **method: object) -> dict[str, float]:
    changed = replace(Method(), **method)  # type: ignore[arg-type]
    return StepModel(WORK, machine, changed, window_s=window_s).known_terms_s(nodes)


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
