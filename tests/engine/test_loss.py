"""Losses over several ranks agree with one process that has the global batch, and send little."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clap_ds.engine import loss as module
from clap_ds.engine.loss import LOSSES, SoftmaxLoss
from tests.rank_pool import RankPool, in_group_of

MICRO_BATCH = 5
JOINT_DIM = 8


def _softmax(logits_NN: Tensor, bias: Tensor, positive_NN: Tensor) -> Tensor:
    targets = positive_NN / positive_NN.sum(1, keepdim=True)
    both = targets * logits_NN.log_softmax(1) + targets * logits_NN.T.log_softmax(1)
    return -both.sum() / (2 * len(logits_NN))


def _sigmoid(logits_NN: Tensor, bias: Tensor, positive_NN: Tensor) -> Tensor:
    return -F.logsigmoid((2 * positive_NN - 1) * (logits_NN + bias)).sum() / len(logits_NN)


GLOBAL = {"softmax": _softmax, "sigmoid": _sigmoid}
"""Each kind over a whole batch: logits without bias, bias (1,), positives → loss."""
KINDS = pytest.mark.parametrize("kind", LOSSES)


def _features(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a rank's audio and text features."""
    generator = torch.Generator().manual_seed(rank)
    shape = (2, MICRO_BATCH, JOINT_DIM)
    features = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Only texts have a common component, so rows of similarities differ from columns.
    features[1, :, 0] += 2 + rank
    return [x.to(dtype).requires_grad_() for x in F.normalize(features, dim=2)]


def _scalars(scale: float, dtype: torch.dtype) -> list[Tensor]:
    """Return logit scale and bias."""
    return [torch.tensor([value], dtype=dtype, requires_grad=True) for value in (scale, -3.0)]


def _largest_error(kind: str, dtype: torch.dtype, wire_dtype: torch.dtype, scale: float) -> float:
    """Return the largest relative error of this rank's gradients, and of the loss and the scalars'
    gradients averaged over ranks, against one process with the global batch."""
    num_ranks = dist.get_world_size()
    by_rank = [_features(rank, dtype) for rank in range(num_ranks)]
    inputs = [*by_rank[dist.get_rank()], *_scalars(scale, dtype)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_TILE", 3)
        loss = LOSSES[kind](wire_dtype)(*inputs)
    learned = inputs if LOSSES[kind].needs_bias else inputs[:3]
    audio, text, *scalars = torch.autograd.grad(loss, learned)
    averages = [loss.detach(), *scalars]
    for average in averages:
        dist.all_reduce(average)
        average /= num_ranks

    audio_ND, text_ND = (torch.cat(parts) for parts in zip(*by_rank, strict=True))
    logits = inputs[2] * audio_ND @ text_ND.T
    expected = GLOBAL[kind](logits, inputs[3], torch.eye(len(logits), dtype=dtype))
    exact = torch.autograd.grad(expected, [*by_rank[dist.get_rank()], *learned[2:]])
    # Data parallelism divides by the number of ranks.
    pairs = [(audio / num_ranks, exact[0]), (text / num_ranks, exact[1])]
    pairs += zip(averages, (expected, *exact[2:]), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs)


def _run(
    pool: RankPool, folder: Path, world_size: int, function: Any, *arguments: Any
) -> list[Any]:
    store = folder / f"store-{len(list(folder.iterdir()))}"
    return pool.run(in_group_of, world_size, str(store), function, *arguments)[:world_size]


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "scale", "tolerance"),
    [
        # Torch's softplus is linear above 20, which omits e⁻²⁰ = 2e-9 of a loss of 88.
        (torch.float64, torch.float64, 100.0, 1e-10),
        # 84 roundings; exp makes each rounding of a logit 14 of a single term.
        (torch.float32, torch.float32, 14.3, 1e-5),
        # Relative errors of features and similarities are up to 2⁻⁹; logits have 14.3 times that,
        # 3% of exp(logit).
        (torch.float32, torch.bfloat16, 14.3, 0.03),
    ],
)
@KINDS
def test_gradients_are_those_of_one_process(
    eight_processes, tmp_path, kind, dtype, wire_dtype, scale, tolerance, world_size
):
    arguments = kind, dtype, wire_dtype, scale
    for error in _run(eight_processes, tmp_path, world_size, _largest_error, *arguments):
        assert error < tolerance


@KINDS
def test_evaluation_of_several_positives_averages_to_the_loss_and_chance(kind):
    """Equal similarities with the best bias give the loss of chance."""
    generator = torch.Generator().manual_seed(0)
    captions = torch.tensor([1, 1, 2, 3, 1])
    logits = torch.randn(MICRO_BATCH, MICRO_BATCH, generator=generator, dtype=torch.float64)
    positive = (captions[:, None] == captions).double()
    losses, chance = LOSSES[kind].evaluate(logits, positive)
    assert losses.shape == (MICRO_BATCH,)
    torch.testing.assert_close(losses.mean(), GLOBAL[kind](logits, torch.zeros(1), positive))
    equal = torch.full_like(logits, float(positive.mean().logit()))
    losses, _ = LOSSES[kind].evaluate(equal, positive)
    assert float(losses.mean()) == pytest.approx(chance)


class SentBytes(TorchDispatchMode):
    """The bytes of each collective's output."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.sent.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def _sent(kind: str) -> list[int]:
    with SentBytes() as mode:
        inputs = _features(dist.get_rank(), torch.float32) + _scalars(14.3, torch.float32)
        LOSSES[kind](torch.bfloat16)(*inputs).backward()
    return mode.sent


@KINDS
def test_features_are_sent_and_no_gradient(eight_processes, tmp_path, kind):
    # Audio and text of four ranks in bf16; softmax also needs log-sum-exps.
    features = 4 * MICRO_BATCH * JOINT_DIM * 2
    log_sum_exps = [4 * 2 * MICRO_BATCH * 4] if kind == "softmax" else []
    expected = [features, features, *log_sum_exps]
    assert _run(eight_processes, tmp_path, 4, _sent, kind) == [expected] * 4


def test_softmax_columns_are_computed_before_the_wait_for_text_features(monkeypatch):
    events = []

    class Gather(module._Gather):
        def wait(self) -> Tensor:
            events.append("wait")
            return super().wait()

    def note_sums(*arguments: Any) -> tuple[Tensor, Tensor]:
        events.append("sums")
        return tiled_row_sums(*arguments)

    tiled_row_sums = module.tiled_row_sums
    monkeypatch.setattr(module, "_Gather", Gather)
    monkeypatch.setattr(module, "tiled_row_sums", note_sums)
    SoftmaxLoss()(*_features(0, torch.float32), *_scalars(1.0, torch.float32))
    # For audio, text and, as inputs need gradients, the log-sum-exps of other ranks.
    assert events == ["wait", "sums", "wait", "sums", "wait"]


def test_features_are_gathered_when_their_tower_ends_and_not_in_an_evaluation(monkeypatch):
    sizes = []

    class Gather(module._Gather):
        def __init__(self, local: Tensor, dtype: torch.dtype) -> None:
            sizes.append(tuple(local.shape))
            super().__init__(local, dtype)

    monkeypatch.setattr(module, "_Gather", Gather)
    towers: Any = torch.nn.ModuleDict()
    towers["audio_projection"] = torch.nn.Identity()
    towers["text_projection"] = torch.nn.Identity()
    loss = SoftmaxLoss()
    loss.gather_early(towers)
    features = _features(0, torch.float32)
    outputs = towers.audio_projection(features[0]), towers.text_projection(features[1])
    assert sizes == [(MICRO_BATCH, JOINT_DIM)] * 2
    with torch.no_grad():
        towers.audio_projection(2 * features[0])
    assert len(sizes) == 2
    scalars = _scalars(14.3, torch.float32)
    early = loss(*outputs, *scalars)
    assert sizes[2:] == [(1, 2, MICRO_BATCH)]
    assert early == SoftmaxLoss()(*features, *scalars)
