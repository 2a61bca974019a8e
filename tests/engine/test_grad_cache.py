"""Check gradients of accumulated micro-batches: of one loss over the batch if cached, of the mean
loss if independent."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.loss import LOSSES
from clap_ds.model.clap import ClapModel
from tests.rank_pool import RankPool
from tests.training import reference_steps as reference
from tests.training.reference_steps import engine_of

RAMP = (3, 1, 2)
"""Micro-batches of each step."""
TOLERANCE = 2**8 * torch.finfo(torch.float32).eps
"""Relative to the largest gradient. Every product sums rows in another order, and logits have 14
times the error of similarities. Errors are 10 to 33 roundings; those of a wrong gradient are
10⁶."""
NOISY = {"drop_path": 0.3, "text_dropout": 0.3, "spec_augment": True}
SIGMOID = {"kind": "sigmoid"}


def _engine(accumulation: str = "gradcache", **changes: Any) -> tuple[Any, ClapEngine, ClapModel]:
    """Return settings, an engine, and a copy of its model."""
    sgd = {"type": "SGD", "params": {"lr": 0.01}}
    run = reference.settings(
        train={"accumulation": accumulation},
        optimizer=sgd,
        gradient_accumulation_steps=3,
        **changes,
    )
    options = run.clap.model.model_dump(include=set(NOISY)) | {
        "learns_bias": LOSSES[run.clap.loss.kind].needs_bias
    }
    torch.manual_seed(3)
    model = ClapModel(run.clap.preset(), **options, attention="matmul")
    plain = copy.deepcopy(model)
    return run, engine_of(run, model), plain


def _gradients(model: ClapModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _errors(accumulation: str, whole: str, changes: dict[str, Any]) -> list[float]:
    """Return, for each step, differences from the reference `whole` of losses and (relative to the
    largest) of gradients."""
    run, engine, plain = _engine(accumulation, **changes)
    world_size = dist.get_world_size()
    step = engine.deepspeed.step
    averaged = dict[str, Tensor]()
    by_rank = [
        reference.micro_batches(run, rank, world_size, sum(RAMP)) for rank in range(world_size)
    ]
    if "loss" in changes:
        for batch in itertools.chain.from_iterable(by_rank):
            if run.clap.text_packing:
                batch.pack()

    def catch() -> None:
        """Record averaged gradients before the weights' update."""
        if engine.deepspeed.is_gradient_accumulation_boundary():
            averaged.update(_gradients(engine.model))
        step()

    engine.deepspeed.step = catch
    found = list[float]()
    own = iter(by_rank[dist.get_rank()])
    start = 0
    for number in RAMP:
        plain.load_state_dict(engine.model.state_dict())
        generator = torch.get_rng_state()
        engine.set_accumulation_steps(number)
        loss = engine.step(own)
        dist.all_reduce(loss)
        torch.set_rng_state(generator)
        expected = getattr(reference, whole)(
            plain, [batches[start : start + number] for batches in by_rank]
        )
        plain.zero_grad()
        expected.backward()
        theirs = _gradients(plain)
        assert averaged.keys() == theirs.keys()
        largest = max(float(gradient.abs().max()) for gradient in theirs.values())
        off = max(float((averaged[name] - theirs[name]).abs().max()) for name in theirs)
        found += [abs(float(loss) / world_size - float(expected.detach())), off / largest]
        start += number
    assert engine.deepspeed.global_samples == sum(RAMP) * run.micro_batch * world_size
    ours = engine.model.audio.batch_norm
    theirs_norm = plain.audio.batch_norm
    if dist.get_world_size() == 1:
        assert int(ours.num_batches_tracked) == int(theirs_norm.num_batches_tracked) == sum(RAMP)
        torch.testing.assert_close(ours.running_var, theirs_norm.running_var, rtol=1e-4, atol=0)
    return found


@pytest.mark.parametrize(
    ("accumulation", "whole", "changes"),
    [
        ("plain", "independent_loss", {}),
        ("plain", "independent_loss", {"gradient_sync": "deepspeed"}),
        ("gradcache", "whole_loss", {"gradient_sync": "deepspeed"}),
        ("plain", "independent_loss", {"loss": SIGMOID, "text_packing": False}),
        ("gradcache", "whole_loss", {"loss": SIGMOID, "text_packing": True}),
    ],
)
def test_gradients_of_two_ranks_through_a_ramp(
    two_ranks: RankPool, accumulation: str, whole: str, changes: dict[str, Any]
) -> None:
    for errors in two_ranks.run(_errors, accumulation, whole, changes):
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize("changes", [{"model": NOISY}, {"loss": SIGMOID, "text_packing": False}])
def test_the_second_pass_draws_and_normalises_as_the_first(
    one_rank: RankPool, changes: dict[str, Any]
) -> None:
    """The reference draws the same random numbers once, keeps every graph, and uses each
    micro-batch's statistics once."""
    (errors,) = one_rank.run(_errors, "gradcache", "whole_loss", changes)
    assert max(errors) < TOLERANCE
