"""The step model's terms against closed forms and a traced loss."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from clap_ds.analysis.step_model import WORKLOADS, Machine, Method, StepModel, all_gather_s, all_reduce_s, method_of
from clap_ds.config.settings import ClapSettings, RunSettings, load_run
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.step import trace_loss
from clap_ds.planning.trace import Recorded, trace

WORK = WORKLOADS["htsat_tiny_roberta_base"]
NO_LATENCY = Machine(node_bytes_per_s=1e9, gpu_bytes_per_s=1e30, latency_s=0.0)


def terms_s(nodes: int, window_s: float, machine: Machine = Machine(), **method: Any) -> dict[str, float]:  # noqa: B008
    return StepModel(WORK, machine, Method(**method), window_s=window_s).known_terms_s(nodes)


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_all_reduce_sends_each_chunk_of_a_ring_twice_but_once_to_no_one(nodes: int) -> None:
    assert all_reduce_s(6e9, nodes, 4, NO_LATENCY) == pytest.approx(2 * (nodes - 1) * 6.0 / nodes)


def test_latency_inner_links_and_what_all_gather_moves() -> None:
    latency = Machine(node_bytes_per_s=1e30, gpu_bytes_per_s=1e30, latency_s=1.0)
    assert [all_reduce_s(1, nodes, 4, latency) for nodes in (2, 3, 128)] == pytest.approx([2, 4, 14])
    slow = Machine(node_bytes_per_s=1.0, gpu_bytes_per_s=1e9, latency_s=100.0)
    assert (all_reduce_s(4e9, 1, 4, slow), all_gather_s(1e9, 1, 4, slow)) == pytest.approx((6.0, 3.0))
    features = 2 * 616 * 512 * 2
    assert all_gather_s(features, 128, 4, NO_LATENCY) == pytest.approx(0.645, rel=0.01)


def test_what_each_method_changes() -> None:
    base, alone = terms_s(128, 0.5), terms_s(128, 0.5, overlap=False)
    assert alone["gradient all-reduce"] == pytest.approx(all_reduce_s(4 * 156.66e6, 128, 4, Machine()))
    assert base["gradient all-reduce"] == pytest.approx(all_reduce_s(25e6, 128, 4, Machine()))
    short = terms_s(128, 0.001)["gradient all-reduce"]
    assert short == pytest.approx(alone["gradient all-reduce"] - 0.001)
    halved = terms_s(128, 0.5, overlap=False, gradient_bytes=2)["gradient all-reduce"]
    assert halved == pytest.approx(all_reduce_s(2 * 156.66e6, 128, 4, Machine()))
    # The last bucket is what overlap leaves.
    assert terms_s(2, 1e9, NO_LATENCY, bucket_bytes=5e6)["gradient all-reduce"] == pytest.approx(5e6 / 1e9)
    assert min(base.values()) > 0
    assert base["contrastive loss"] == pytest.approx(128 * terms_s(1, 0.5)["contrastive loss"])


def test_the_exact_loss_sends_few_floats_back_and_gathers_half_the_features_early() -> None:
    """As far as the text tower's forward pass lasts: of a backward window of 3 ms that is 1 ms."""
    gather_s = 7 * 4 * 2 * 616 * 768 * 2 / 1e9
    back_s = 7 * 4 * 2 * 616 * 4 / 1e9
    for window_s, hidden_s in ((6.0, gather_s / 2), (0.003, 0.001)):
        exact = terms_s(8, window_s, NO_LATENCY, loss="exact_local")["feature exchange"]
        assert exact == pytest.approx(gather_s + back_s - hidden_s)
    assert terms_s(8, 6.0, NO_LATENCY)["feature exchange"] == pytest.approx(2 * gather_s)


def trace_gather_with_grad(run: RunSettings, micro_batch: int, world_size: int) -> Recorded:
    """open_clip's loss: a rank's rows against all columns, twice, with gradients for everybody's features."""
    with FakeTensorMode(), like_cuda(), trace() as recorded, torch.autocast("cpu", torch.bfloat16):
        sizes, targets = (world_size * micro_batch, run.clap.preset().joint_dim), torch.arange(micro_batch)
        audio, text = (torch.empty(sizes).float().requires_grad_() for _ in range(2))
        products = (torch.ones(1) * ours[:micro_batch] @ theirs.T for ours, theirs in ((audio, text), (text, audio)))
        (sum(F.cross_entropy(logits, targets) for logits in products) / 2).backward()
    return recorded


@pytest.mark.parametrize(
    ("loss", "traced"), [("exact_local", trace_loss), ("gather_with_grad", trace_gather_with_grad)]
)
@pytest.mark.parametrize("run", ["htsat_tiny", "htsat_base"])
def test_memory_traffic_of_the_loss_is_what_a_trace_finds(run: str, loss: Any, traced: Any) -> None:
    work = WORKLOADS[f"{run}_roberta_base"]
    found = traced(load_run(run), work.batch_per_gpu, 512)
    memory_only = Machine(memory_bytes_per_s=1e9, peak_flops=1e30)
    stated = StepModel(work, memory_only, Method(loss=loss)).known_terms_s(128)["contrastive loss"]
    assert stated == pytest.approx(found.total("bytes_moved") / 1e9, rel=0.03)


def test_the_method_follows_the_configuration() -> None:
    assert method_of({}) == Method()
    found = method_of({"bf16": {"enabled": True}, "clap": {"gradient_sync": "deepspeed", "gradient_bucket_mb": 5.0}})
    assert found == Method(overlap=False, gradient_bytes=2, feature_bytes=2, loss="exact_local", bucket_bytes=5e6)
    assert method_of({"torch_autocast": {"enabled": True}}).feature_bytes == 2
    fp32 = method_of({"clap": {"loss": {"features": "bf16"}}})
    assert (fp32.gradient_bytes, fp32.feature_bytes, fp32.bucket_bytes) == (
        4,
        2,
        1e6 * ClapSettings().gradient_bucket_mb,
    )
