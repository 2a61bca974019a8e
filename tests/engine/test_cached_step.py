"""Cached accumulation: its gradient is that of one loss over the whole batch, on one and on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.record.clock import PhaseTimer
from tests.ranks import RankPool
from tests.training import reference_steps as reference

NUM_MICRO = 3
NUM_STEPS = 3  # the first is reduced by DeepSpeed, the others by torch's reducer
TOLERANCE = 2**8 * torch.finfo(torch.float32).eps
"""Of the largest gradient. Sums over rows are taken in another order, in every product from the loss to the mel bins and back,
and logits are 14 times as far off as similarities: 10 to 33 roundings are found, where a wrong gradient is off by 10⁶."""
CACHED = {
    "train": {"accumulation": "cached"},
    "gradient_accumulation_steps": NUM_MICRO,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
}
NOISY = {"drop_path": 0.3, "text_dropout": 0.3, "spec_augment": True}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


def _engine(**changes: Any) -> tuple[Any, ClapEngine]:
    run = reference.settings(**changes)
    options = run.clap.model
    torch.manual_seed(3)
    model = ClapModel(
        run.clap.preset(),
        drop_path=options.drop_path,
        text_dropout=options.text_dropout,
        spec_augment=options.spec_augment,
        attention="auto",
    )
    return run, ClapEngine(run, model, reference.CPU)


def _catch_gradients(engine: ClapEngine) -> list[dict[str, Tensor]]:
    """Averaged gradients of every step, caught when the weights are about to be updated."""
    caught: list[dict[str, Tensor]] = []
    step = engine.deepspeed.step

    def catch() -> None:
        if engine.deepspeed.is_gradient_accumulation_boundary():
            caught.append({n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None})
        step()

    engine.deepspeed.step = catch
    return caught


def _relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / largest


def _differences(whole: str, sync: str, noisy: bool) -> list[tuple[float, float]]:
    """Loss and gradient differences, step by step, from the reference named."""
    changes: dict[str, Any] = {**CACHED, **({"model": NOISY} if noisy else {})}
    run, engine = _engine(**changes)
    if sync == "deepspeed":
        engine.sync._recorder = None
    world_size = dist.get_world_size()
    by_rank = [reference.micro_batches(run, rank, world_size, NUM_STEPS * NUM_MICRO) for rank in range(world_size)]
    if whole == "large_batch_loss":
        # Its statistics would be of other batches. Fixed ones, near the data's own:
        norm = engine.model.audio.batch_norm
        norm.momentum = 1.0
        norm(engine.model.mel(by_rank[0][0].waveforms))
        norm.eval()
    plain = copy.deepcopy(engine.model)
    caught = _catch_gradients(engine)
    timer = PhaseTimer(reference.CPU, instrumented=False)
    found = []
    own = iter(by_rank[dist.get_rank()])
    for step in range(NUM_STEPS):
        plain.load_state_dict(engine.model.state_dict())
        generator = torch.get_rng_state()
        loss = engine.step(own, timer)
        after = torch.get_rng_state()
        dist.all_reduce(loss)
        torch.set_rng_state(generator)
        now = [rank[step * NUM_MICRO : (step + 1) * NUM_MICRO] for rank in by_rank]
        expected = getattr(reference, whole)(plain, now)
        if noisy:
            assert torch.equal(after, torch.get_rng_state())
        found.append(
            (
                abs(float(loss) / world_size - float(expected.detach())),
                _relative_difference(caught[-1], reference.gradients(plain, expected)),
            )
        )
    return found


@pytest.mark.parametrize("sync", ["overlapped", "deepspeed"])
@pytest.mark.parametrize("whole", ["large_batch_loss", "whole_loss"])
def test_gradient_is_the_whole_batchs_on_two_ranks(two_ranks: RankPool, whole: str, sync: str) -> None:
    for differences in two_ranks.run(_differences, whole, sync, False):
        for loss, gradient in differences:
            assert loss < TOLERANCE
            assert gradient < TOLERANCE


@pytest.mark.parametrize("whole", ["large_batch_loss", "whole_loss"])
def test_gradient_is_the_whole_batchs_on_one_rank(one_rank: RankPool, whole: str) -> None:
    for loss, gradient in one_rank.run(_differences, whole, "overlapped", False)[0]:
        assert loss < TOLERANCE
        assert gradient < TOLERANCE


def test_dropout_and_augmentation_are_those_of_the_first_pass(one_rank: RankPool) -> None:
    """The reference draws the same random numbers once, and keeps every graph."""
    for loss, gradient in one_rank.run(_differences, "whole_loss", "overlapped", True)[0]:
        assert loss < TOLERANCE
        assert gradient < TOLERANCE


def _independent_difference() -> float:
    run, engine = _engine(gradient_accumulation_steps=NUM_MICRO)
    plain = copy.deepcopy(engine.model)
    caught = _catch_gradients(engine)
    batches = reference.micro_batches(run, 0, 1, NUM_MICRO)
    engine.step(iter(batches), PhaseTimer(reference.CPU, instrumented=False))
    return _relative_difference(caught[-1], reference.gradients(plain, reference.whole_loss(plain, [batches])))


def test_independent_micro_batches_give_another_gradient(one_rank: RankPool) -> None:
    """Or the tests above would prove nothing."""
    assert one_rank.run(_independent_difference)[0] > 100 * TOLERANCE


def _statistics() -> tuple[int, int]:
    run, engine = _engine(**CACHED)
    plain = copy.deepcopy(engine.model)
    batches = reference.micro_batches(run, 0, 1, NUM_MICRO)
    engine.step(iter(batches), PhaseTimer(reference.CPU, instrumented=False))
    reference.whole_loss(plain, [batches])
    ours, theirs = engine.model.audio.batch_norm, plain.audio.batch_norm
    assert torch.allclose(ours.running_mean, theirs.running_mean, atol=1e-4)
    assert torch.allclose(ours.running_var, theirs.running_var, rtol=1e-5)
    return int(ours.num_batches_tracked), int(theirs.num_batches_tracked)


def test_running_statistics_see_each_micro_batch_once(one_rank: RankPool) -> None:
    assert one_rank.run(_statistics) == [(NUM_MICRO, NUM_MICRO)]


class _Unrepeatable(nn.Module):
    """Noise from a generator that nobody puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.randn(values.shape, generator=self.generator)


def _refusal() -> str:
    run, engine = _engine(**CACHED)
    engine.model.audio_projection.activation = _Unrepeatable()
    with pytest.raises(ValueError, match="cached") as caught:
        engine.step(iter(reference.micro_batches(run, 0, 1, NUM_MICRO)), PhaseTimer(reference.CPU, instrumented=False))
    return str(caught.value)


def test_a_model_that_does_not_repeat_itself_is_refused(one_rank: RankPool) -> None:
    assert "second forward pass gave features" in one_rank.run(_refusal)[0]
