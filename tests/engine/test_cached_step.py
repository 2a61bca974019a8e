"""Gradients of accumulated micro-batches: of one loss over the whole batch if cached, of the mean loss if independent."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.loss import LOSSES
from clap_ds.model.clap import ClapModel
from tests.rank_pool import RankPool
from tests.training import reference_steps as reference
from tests.training.reference_steps import CPU, TIMER

RAMP = (3, 1, 2)
"""Micro-batches of each step. The first is reduced by DeepSpeed, the others by torch's reducer."""
TOLERANCE = 2**8 * torch.finfo(torch.float32).eps
"""Of the largest gradient. Sums over rows are taken in another order, in every product from the loss to the mel bins and back,
and logits are 14 times as far off as similarities: 10 to 33 roundings are found, where a wrong gradient is off by 10⁶."""
NOISY = {"drop_path": 0.3, "text_dropout": 0.3, "spec_augment": True}


def _engine(accumulation: str = "cached", **changes: Any) -> tuple[Any, ClapEngine, ClapModel]:
    """Settings, an engine, and a copy of its model."""
    sgd = {"type": "SGD", "params": {"lr": 0.01}}
    run = reference.settings(
        train={"accumulation": accumulation}, optimizer=sgd, gradient_accumulation_steps=3, **changes
    )
    options = run.clap.model.model_dump(include=set(NOISY)) | {"learns_bias": LOSSES[run.clap.loss.kind].needs_bias}
    torch.manual_seed(3)
    engine = ClapEngine(run, ClapModel(run.clap.preset(), **options, attention="matmul"), CPU)
    return run, engine, copy.deepcopy(engine.model)


def _gradients(model: ClapModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _differences(
    accumulation: str, whole: str, sync: str, noisy: bool, equal_captions: str | None = None
) -> list[tuple[float, float]]:
    """Loss and gradient differences from the reference named, step by step; the gradient's as a part of the largest.
    `equal_captions`: every micro-batch has the same caption twice, a positive, padded or packed."""
    changes: dict[str, Any] = {"model": NOISY} if noisy else {}
    if equal_captions:
        # Without dropout equal captions have equal features, for which the softmax loss's target comes to the same.
        changes = {"loss": {"kind": "sigmoid", "same_caption": "positive"}, "text": equal_captions}
    run, engine, plain = _engine(accumulation, **changes)
    world_size, caught, step = dist.get_world_size(), [], engine.deepspeed.step
    by_rank = [reference.micro_batches(run, rank, world_size, sum(RAMP)) for rank in range(world_size)]
    if equal_captions:
        for batch in itertools.chain.from_iterable(by_rank):
            for place, like in zip(batch.tensors()[1:], by_rank[0][0].tensors()[1:], strict=True):
                place[1:] = like[1]
            batch.num_tokens = int(batch.attention_mask.sum())
            if equal_captions == "packed":
                batch.pack()
    if sync == "deepspeed":
        engine.sync._recorder = None
    if whole == "large_batch_loss":
        # Its statistics would be of other batches. Fixed ones, near the data's own:
        for model in (engine.model, plain):
            norm = model.audio.batch_norm
            norm.momentum = 1.0
            norm(model.mel(by_rank[0][0].audio))
            norm.eval()

    def catch() -> None:
        """Averaged gradients, when the weights are about to be updated."""
        if engine.deepspeed.is_gradient_accumulation_boundary():
            caught.append(_gradients(engine.model))
        step()

    engine.deepspeed.step = catch
    found, own, start = [], iter(by_rank[dist.get_rank()]), 0
    for number in RAMP:
        plain.load_state_dict(engine.model.state_dict())
        generator = torch.get_rng_state()
        engine.set_accumulation_steps(number)
        loss = engine.step(own, TIMER)
        after = torch.get_rng_state()
        dist.all_reduce(loss)
        torch.set_rng_state(generator)
        expected = getattr(reference, whole)(plain, [batches[start : start + number] for batches in by_rank])
        assert not noisy or torch.equal(after, torch.get_rng_state())
        plain.zero_grad()
        expected.backward()
        theirs = _gradients(plain)
        assert caught[-1].keys() == theirs.keys()
        off = max(float((caught[-1][name] - theirs[name]).abs().max()) for name in theirs)
        largest = max(float(gradient.abs().max()) for gradient in theirs.values())
        found.append((abs(float(loss) / world_size - float(expected.detach())), off / largest))
        start += number
    assert len(caught) == engine.deepspeed.global_steps == len(RAMP)
    assert engine.deepspeed.global_samples == sum(RAMP) * run.micro_batch * world_size
    return found


@pytest.mark.parametrize(
    ("accumulation", "whole", "sync"),
    [
        ("independent", "independent_loss", "overlapped"),
        ("independent", "independent_loss", "deepspeed"),
        ("cached", "whole_loss", "deepspeed"),
        ("cached", "large_batch_loss", "overlapped"),
    ],
)
def test_gradients_of_two_ranks_through_a_ramp(two_ranks: RankPool, accumulation: str, whole: str, sync: str) -> None:
    for differences in two_ranks.run(_differences, accumulation, whole, sync, False):
        assert max(map(max, differences)) < TOLERANCE


@pytest.mark.parametrize(
    ("accumulation", "whole", "text"),
    [
        ("independent", "independent_loss", "padded"),
        ("cached", "whole_loss", "padded"),
        ("cached", "whole_loss", "packed"),
    ],
)
def test_equal_captions_are_positives_over_the_whole_batch(
    one_rank: RankPool, two_ranks: RankPool, accumulation: str, whole: str, text: str
) -> None:
    for pool in (one_rank, two_ranks):
        for differences in pool.run(_differences, accumulation, whole, "overlapped", False, text):
            assert max(map(max, differences)) < TOLERANCE


def test_dropout_and_augmentation_are_those_of_the_first_pass(one_rank: RankPool) -> None:
    """The reference draws the same random numbers once, and keeps every graph."""
    (differences,) = one_rank.run(_differences, "cached", "whole_loss", "overlapped", True)
    assert max(map(max, differences)) < TOLERANCE


def _statistics() -> tuple[int, int]:
    run, engine, plain = _engine()
    batches = reference.micro_batches(run, 0, 1, 3)
    engine.step(iter(batches), TIMER)
    reference.whole_loss(plain, [batches])
    ours, theirs = engine.model.audio.batch_norm, plain.audio.batch_norm
    assert torch.allclose(ours.running_mean, theirs.running_mean, atol=1e-4)
    assert torch.allclose(ours.running_var, theirs.running_var, rtol=1e-5)
    return int(ours.num_batches_tracked), int(theirs.num_batches_tracked)


def test_running_statistics_see_each_micro_batch_once(one_rank: RankPool) -> None:
    assert one_rank.run(_statistics) == [(3, 3)]


def _rate_by_deepspeeds_timer(accumulation: str) -> tuple[float, int]:
    """Samples/s, and micro-batches counted, in four steps, of which the timer leaves out two. A forward pass takes 1 s, a loss
    10 s, a backward pass 100 s."""
    run, engine, _ = _engine(accumulation)
    now = [1000.0]

    def lasting(seconds: float, action: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return action(*args, **kwargs)

        return act

    engine.model.forward = lasting(1, engine.model.forward)  # type: ignore[method-assign]
    engine.loss = lasting(10, engine.loss)
    engine.deepspeed.backward = lasting(100, engine.deepspeed.backward)
    batches = iter(lasting(1000, iter(reference.micro_batches(run, 0, 1, 12)).__next__), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: now[0])
        for _ in range(4):
            engine.step(batches, TIMER)
    timer = engine.deepspeed.tput_timer
    return timer.avg_samples_per_sec(), timer.micro_step_count


def test_deepspeeds_timer_counts_the_whole_of_a_cached_step(one_rank: RankPool) -> None:
    samples = 3 * 3
    assert one_rank.run(_rate_by_deepspeeds_timer, "independent") == [(pytest.approx(samples / (3 * 111)), 12)]
    assert one_rank.run(_rate_by_deepspeeds_timer, "cached") == [(pytest.approx(samples / (6 * 1 + 10 + 3 * 100)), 12)]


class _Unrepeatable(nn.Module):
    """Noise from a generator that nobody puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.randn(values.shape, generator=self.generator)


def _refusal() -> None:
    run, engine, _ = _engine()
    engine.model.audio_projection.activation = _Unrepeatable()
    with pytest.raises(ValueError, match=r"cached: .* second forward pass gave features"):
        engine.step(iter(reference.micro_batches(run, 0, 1, 3)), TIMER)


def test_a_model_that_does_not_repeat_itself_is_refused(one_rank: RankPool) -> None:
    one_rank.run(_refusal)
