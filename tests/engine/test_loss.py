"""Compare losses over several ranks with one process that has the global batch, and count what they
send."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clap_ds.engine import loss
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


def _features(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    audio, text = (
        torch.randn(MICRO_BATCH, JOINT_DIM, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    text[:, 0] += (
        2 + rank
    )  # only texts have a common component, so rows of similarities differ from columns
    return tuple(F.normalize(x, dim=1).to(dtype).requires_grad_() for x in (audio, text))  # type: ignore[return-value]


def _scalars(scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.tensor([scale], dtype=dtype, requires_grad=True), torch.tensor(
        [-3.0], dtype=dtype, requires_grad=True
    )


def _with_gradients(
    kind: str, loss: Tensor, audio: Tensor, text: Tensor, *scalars: Tensor
) -> list[np.ndarray]:
    """Return the loss and its gradients by audio, text, scale and, if learned, bias."""
    inputs = [audio, text, *scalars[: 1 + LOSSES[kind].needs_bias]]
    return [tensor.detach().numpy() for tensor in (loss, *torch.autograd.grad(loss, inputs))]


def _on_rank(
    kind: str, dtype: torch.dtype, scale: float, wire_dtype: torch.dtype
) -> list[np.ndarray]:
    inputs = (*_features(dist.get_rank(), dtype), *_scalars(scale, dtype))
    with mock.patch.object(loss, "CPU_TILE", 3):
        return _with_gradients(kind, LOSSES[kind](wire_dtype)(*inputs), *inputs)


def _expected(kind: str, world_size: int, dtype: torch.dtype, scale: float) -> list[np.ndarray]:
    """Return the same from one process, with the feature gradients of all ranks concatenated."""
    pairs = [_features(rank, dtype) for rank in range(world_size)]
    audio_ND, text_ND = (
        torch.cat([pair[side].detach() for pair in pairs]).requires_grad_() for side in (0, 1)
    )
    scale_1, bias = _scalars(scale, dtype)
    loss = GLOBAL[kind](scale_1 * audio_ND @ text_ND.T, bias, torch.eye(len(audio_ND), dtype=dtype))
    return _with_gradients(kind, loss, audio_ND, text_ND, scale_1, bias)


def _averaged(results: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Average ranks' results like data parallelism; feature gradients are concatenated and divided
    by the number of ranks."""
    features = [
        np.concatenate([result[side] for result in results]) / len(results) for side in (1, 2)
    ]
    loss, *scalars = (
        np.mean([result[i] for result in results], axis=0) for i in (0, *range(3, len(results[0])))
    )
    return [loss, *features, *scalars]


def _run(
    pool: RankPool, folder: Path, world_size: int, function: Any, *arguments: Any
) -> list[Any]:
    store = folder / f"store-{len(list(folder.iterdir()))}"
    return pool.run(in_group_of, world_size, str(store), function, *arguments)[:world_size]


@pytest.mark.parametrize(
    ("world_size", "scale"), [(1, 14.3), (2, 100.0), (3, 14.3), (4, 1.0), (8, 14.3)]
)
@KINDS
def test_gradients_are_those_of_one_process(
    eight_processes: RankPool, tmp_path: Path, kind: str, world_size: int, scale: float
) -> None:
    # fp32: 84 roundings; for a logit of 100, exp makes each rounding 100 of a single term
    # (measured: 18 of the largest). fp64: torch's softplus is linear above 20, which omits e⁻²⁰ =
    # 2e-9 of a loss of 88.
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        results = _run(eight_processes, tmp_path, world_size, _on_rank, kind, dtype, scale, dtype)
        expected = _expected(kind, world_size, dtype, scale)
        for ours, theirs in zip(_averaged(results), expected, strict=True):
            np.testing.assert_allclose(
                ours, theirs, atol=tolerance * max(1.0, np.abs(theirs).max()), rtol=0
            )


@KINDS
def test_bf16_on_the_wire_costs_only_its_rounding(
    eight_processes: RankPool, tmp_path: Path, kind: str
) -> None:
    on_rank = partial(_run, eight_processes, tmp_path, 4, _on_rank, kind, torch.float32, 14.3)
    exact, rounded = (_averaged(on_rank(wire)) for wire in (torch.float32, torch.bfloat16))
    for a, b in zip(exact, rounded, strict=True):
        # Relative errors of features and similarities are up to 2⁻⁹; logits have 14.3 times that,
        # 3% of exp(logit).
        assert 0 < np.abs(a - b).max() <= 0.03 * max(np.abs(a).max(), 0.1)


@KINDS
def test_without_a_group_upstream_gradients_scale_all_in_tiles_of_any_width(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    audio, text, scale, bias = *_features(0, torch.float64), *_scalars(14.3, torch.float64)
    expected = GLOBAL[kind](scale * audio @ text.T, bias, torch.eye(MICRO_BATCH).double())
    theirs = torch.autograd.grad(expected / 2, (audio, text, scale))
    for tile in (1, 4, 5, 7):
        monkeypatch.setattr(loss, "CPU_TILE", tile)
        value = LOSSES[kind](torch.float64)(audio, text, scale, bias)
        gradients = torch.autograd.grad(value / 2, (audio, text, scale))
        torch.testing.assert_close(gradients, theirs, atol=1e-12, rtol=0)


@KINDS
def test_held_out_rows_with_several_positives(kind: str) -> None:
    """Their mean is the loss; equal similarities with the best bias give that of chance."""
    generator = torch.Generator().manual_seed(0)
    captions = torch.tensor([1, 1, 2, 3, 1])
    logits = torch.randn(MICRO_BATCH, MICRO_BATCH, generator=generator, dtype=torch.float64)
    positive = (captions[:, None] == captions).double()
    rows, chance = LOSSES[kind].evaluate(logits, positive)
    assert rows.shape == (MICRO_BATCH,)
    torch.testing.assert_close(rows.mean(), GLOBAL[kind](logits, torch.zeros(1), positive))
    equal = torch.full_like(logits, float(positive.mean().logit()))
    assert float(LOSSES[kind].evaluate(equal, positive)[0].mean()) == pytest.approx(chance)


class CountedBytes(TorchDispatchMode):
    """Count the bytes that one rank sends in each kind of collective with ring algorithms, from the
    tensors' sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0]
            self.sent[name] += (
                args[1].nbytes * (dist.get_world_size() - 1) if name == "_allgather_base_" else 0
            )
        return func(*args, **(kwargs or {}))


def _sent(kind: str, wire_dtype: torch.dtype) -> dict[str, int]:
    with CountedBytes() as counted:
        inputs = (*_features(dist.get_rank(), torch.float32), *_scalars(14.3, torch.float32))
        LOSSES[kind](wire_dtype)(*inputs).backward()
    return dict(counted.sent)


def test_no_feature_gradient_is_sent(eight_processes: RankPool, tmp_path: Path) -> None:
    features = 2 * MICRO_BATCH * JOINT_DIM
    sums = 2 * MICRO_BATCH * 4
    sent = partial(_run, eight_processes, tmp_path, 4, _sent)
    for kind, wire_dtype, expected in (
        ("softmax", torch.float32, {"_allgather_base_": 3 * (4 * features + sums)}),
        ("softmax", torch.bfloat16, {"_allgather_base_": 3 * (2 * features + sums)}),
        ("sigmoid", torch.float32, {"_allgather_base_": 3 * 4 * features}),
    ):
        assert sent(kind, wire_dtype) == [expected] * 4


def _early_and_late() -> list[np.ndarray]:
    towers: Any = torch.nn.ModuleDict(
        {f"{name}_projection": torch.nn.Identity() for name in ("audio", "text")}
    )
    early = SoftmaxLoss(torch.float64)
    early.gather_early(towers)
    audio, text = _features(dist.get_rank(), torch.float64)
    scalars = _scalars(14.3, torch.float64)
    with CountedBytes() as counted:
        features = towers.audio_projection(audio), towers.text_projection(text)
    assert counted.sent["_allgather_base_"] > 0
    with torch.no_grad():
        towers.audio_projection(audio * 2)  # an evaluation in between has no effect
    losses = early(*features, *scalars), SoftmaxLoss(torch.float64)(audio, text, *scalars)
    return [torch.autograd.grad(loss, audio, retain_graph=True)[0].numpy() for loss in losses]


def test_features_gathered_under_the_forward_pass_are_the_same(
    eight_processes: RankPool, tmp_path: Path
) -> None:
    for early, late in _run(eight_processes, tmp_path, 3, _early_and_late):
        np.testing.assert_array_equal(early, late)
