"""Losses over several ranks agree with one process that has the global batch, and send little."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
Arrays = list[np.ndarray]


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


def _with_gradients(kind: str, loss: Tensor, inputs: list[Tensor]) -> Arrays:
    """Return the loss and its gradients by audio, text, scale and, if learned, bias."""
    learned = inputs if LOSSES[kind].needs_bias else inputs[:3]
    return [tensor.detach().numpy() for tensor in (loss, *torch.autograd.grad(loss, learned))]


def _on_rank(kind: str, dtype: torch.dtype, scale: float, wire_dtype: torch.dtype) -> Arrays:
    inputs = _features(dist.get_rank(), dtype) + _scalars(scale, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_TILE", 3)
        return _with_gradients(kind, LOSSES[kind](wire_dtype)(*inputs), inputs)


def _in_one_process(kind: str, world_size: int, dtype: torch.dtype, scale: float) -> Arrays:
    """Return the same from one process, with the feature gradients of all ranks concatenated."""
    by_rank = [_features(rank, dtype) for rank in range(world_size)]
    audio_ND, text_ND = (
        torch.cat(parts).detach().requires_grad_() for parts in zip(*by_rank, strict=True)
    )
    scalars = _scalars(scale, dtype)
    logits = scalars[0] * audio_ND @ text_ND.T
    loss = GLOBAL[kind](logits, scalars[1], torch.eye(len(audio_ND), dtype=dtype))
    return _with_gradients(kind, loss, [audio_ND, text_ND, *scalars])


def _average(results: list[Arrays]) -> Arrays:
    """Average ranks' results like data parallelism; feature gradients are concatenated and divided
    by the number of ranks."""
    losses, audio, text, *scalars = zip(*results, strict=True)
    features = [np.concatenate(gradients) / len(results) for gradients in (audio, text)]
    return [np.mean(losses), *features, *(np.mean(gradients, axis=0) for gradients in scalars)]


def _run(
    pool: RankPool, folder: Path, world_size: int, function: Any, *arguments: Any
) -> list[Any]:
    store = folder / f"store-{len(list(folder.iterdir()))}"
    return pool.run(in_group_of, world_size, str(store), function, *arguments)[:world_size]


@pytest.mark.parametrize(
    ("world_size", "scale"), [(1, 14.3), (2, 100.0), (3, 14.3), (4, 1.0), (8, 14.3)]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        # Torch's softplus is linear above 20, which omits e⁻²⁰ = 2e-9 of a loss of 88.
        (torch.float64, 1e-10),
        # 84 roundings; for a logit of 100, exp makes each rounding 100 of a single term (measured:
        # 18 of the largest).
        (torch.float32, 1e-5),
    ],
)
@KINDS
def test_gradients_are_those_of_one_process(
    eight_processes: RankPool,
    tmp_path: Path,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    world_size: int,
    scale: float,
) -> None:
    results = _run(eight_processes, tmp_path, world_size, _on_rank, kind, dtype, scale, dtype)
    expected = _in_one_process(kind, world_size, dtype, scale)
    for actual, reference in zip(_average(results), expected, strict=True):
        atol = tolerance * max(1.0, np.abs(reference).max())
        np.testing.assert_allclose(actual, reference, atol=atol, rtol=0)


@KINDS
def test_bf16_on_the_wire_costs_only_its_rounding(
    eight_processes: RankPool, tmp_path: Path, kind: str
) -> None:
    on_rank = partial(_run, eight_processes, tmp_path, 4, _on_rank, kind, torch.float32, 14.3)
    exact = _average(on_rank(torch.float32))
    rounded = _average(on_rank(torch.bfloat16))
    for reference, actual in zip(exact, rounded, strict=True):
        # Relative errors of features and similarities are up to 2⁻⁹; logits have 14.3 times that,
        # 3% of exp(logit).
        assert 0 < np.abs(reference - actual).max() <= 0.03 * max(np.abs(reference).max(), 0.1)


@pytest.mark.parametrize("tile", [1, 4, 5, 7])
@KINDS
def test_gradients_without_a_group_are_scaled_by_upstream_in_tiles_of_any_width(
    kind: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    audio, text = _features(0, torch.float64)
    scale, bias = _scalars(14.3, torch.float64)
    expected = GLOBAL[kind](scale * audio @ text.T, bias, torch.eye(MICRO_BATCH).double())
    monkeypatch.setattr(module, "CPU_TILE", tile)
    loss = LOSSES[kind](torch.float64)(audio, text, scale, bias)
    gradients = torch.autograd.grad(loss / 2, (audio, text, scale))
    reference = torch.autograd.grad(expected / 2, (audio, text, scale))
    torch.testing.assert_close(gradients, reference, atol=1e-12, rtol=0)


@KINDS
def test_evaluation_of_several_positives_averages_to_the_loss_and_chance(kind: str) -> None:
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


class CountedBytes(TorchDispatchMode):
    """The bytes that one rank sends in each kind of collective with ring algorithms, from the
    tensors' sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0]
            # Other collectives count as none, but are listed.
            num_bytes = args[1].nbytes if name == "_allgather_base_" else 0
            self.sent[name] += num_bytes * (dist.get_world_size() - 1)
        return func(*args, **(kwargs or {}))


def _sent(kind: str, wire_dtype: torch.dtype) -> dict[str, int]:
    with CountedBytes() as counted:
        inputs = _features(dist.get_rank(), torch.float32) + _scalars(14.3, torch.float32)
        LOSSES[kind](wire_dtype)(*inputs).backward()
    return dict(counted.sent)


FEATURES = 2 * MICRO_BATCH * JOINT_DIM
LOG_SUM_EXPS = 2 * MICRO_BATCH


@pytest.mark.parametrize(
    ("kind", "wire_dtype", "num_bytes"),
    [
        ("softmax", torch.float32, 4 * FEATURES + 4 * LOG_SUM_EXPS),
        ("softmax", torch.bfloat16, 2 * FEATURES + 4 * LOG_SUM_EXPS),
        ("sigmoid", torch.float32, 4 * FEATURES),
    ],
)
def test_features_are_sent_and_no_gradient(
    eight_processes: RankPool, tmp_path: Path, kind: str, wire_dtype: torch.dtype, num_bytes: int
) -> None:
    # A rank's bytes go to three others.
    expected = {"_allgather_base_": 3 * num_bytes}
    assert _run(eight_processes, tmp_path, 4, _sent, kind, wire_dtype) == [expected] * 4


def _early_and_late() -> list[np.ndarray]:
    towers: Any = torch.nn.ModuleDict()
    towers["audio_projection"] = torch.nn.Identity()
    towers["text_projection"] = torch.nn.Identity()
    early = SoftmaxLoss(torch.float64)
    early.gather_early(towers)
    audio, text = _features(dist.get_rank(), torch.float64)
    scalars = _scalars(14.3, torch.float64)
    with CountedBytes() as counted:
        features = towers.audio_projection(audio), towers.text_projection(text)
    assert counted.sent["_allgather_base_"] > 0
    with torch.no_grad():
        # An evaluation in between has no effect.
        towers.audio_projection(audio * 2)
    losses = early(*features, *scalars), SoftmaxLoss(torch.float64)(audio, text, *scalars)
    return [torch.autograd.grad(loss, audio, retain_graph=True)[0].numpy() for loss in losses]


def test_features_gathered_during_the_forward_pass_are_the_same(
    eight_processes: RankPool, tmp_path: Path
) -> None:
    for early, late in _run(eight_processes, tmp_path, 3, _early_and_late):
        np.testing.assert_array_equal(early, late)


def test_softmax_columns_are_computed_before_the_wait_for_text_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
