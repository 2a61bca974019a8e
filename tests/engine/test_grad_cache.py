"""Gradients with GradCache are those of one loss over all micro-batches of a step."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.data.batch import Batch
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.loss import LOSSES
from clap_ds.model.clap import ClapModel
from tests.training import reference_steps as reference

# Micro-batches of each step.
RAMP = (3, 1, 2)
# Relative to the largest gradient. Every product sums rows in another order, and logits have 14
# times the error of similarities. Errors are 10 to 33 roundings; those of a wrong gradient are 10⁶.
TOLERANCE = 2**8 * torch.finfo(torch.float32).eps
NOISY = {"drop_path": 0.3, "text_dropout": 0.3, "spec_augment": True}
SIGMOID = {"kind": "sigmoid"}


def _engine(changes: dict[str, Any]) -> tuple[Any, ClapEngine, ClapModel]:
    """Return settings, an engine, and a copy of its model."""
    run = reference.settings(
        train={"accumulation": "gradcache"},
        optimizer={"type": "SGD", "params": {"lr": 0.01}},
        gradient_accumulation_steps=3,
        **changes,
    )
    options = run.clap.model.model_dump(include=set(NOISY))
    options["learns_bias"] = LOSSES[run.clap.loss.kind].needs_bias
    torch.manual_seed(3)
    model = ClapModel(run.clap.preset(), **options, attention="matmul")
    plain = copy.deepcopy(model)
    return run, reference.engine_of(run, model), plain


def _gradients(model: ClapModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _batches_by_rank(run: Any) -> list[list[Batch]]:
    world_size = dist.get_world_size()
    by_rank = [
        reference.micro_batches(run, rank, world_size, sum(RAMP)) for rank in range(world_size)
    ]
    if run.clap.packs_captions:
        for batches in by_rank:
            for batch in batches:
                batch.pack()
    return by_rank


def _errors(changes: dict[str, Any]) -> list[float]:
    """Return, for each step, differences from the reference of losses and (relative to the largest)
    of gradients."""
    run, engine, plain = _engine(changes)
    world_size = dist.get_world_size()
    by_rank = _batches_by_rank(run)
    local_batches = iter(by_rank[dist.get_rank()])
    gradients = dict[str, Tensor]()
    # With the averaged gradients, before the weights' update.
    engine.pre_step_hook = lambda: gradients.update(_gradients(engine.model))
    errors = []
    start = 0
    for num_micro_batches in RAMP:
        plain.load_state_dict(engine.model.state_dict())
        rng_state = torch.get_rng_state()
        engine.set_accumulation_steps(num_micro_batches)
        loss = engine.step(local_batches)
        dist.all_reduce(loss)

        # The reference draws the same random numbers.
        torch.set_rng_state(rng_state)
        of_step = [batches[start : start + num_micro_batches] for batches in by_rank]
        expected = reference.whole_loss(plain, of_step)
        plain.zero_grad()
        expected.backward()
        expected_gradients = _gradients(plain)
        assert gradients.keys() == expected_gradients.keys()
        largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
        for name, gradient in expected_gradients.items():
            errors.append(float((gradients[name] - gradient).abs().max()) / largest)
        errors.append(abs(float(loss) / world_size - float(expected.detach())))
        start += num_micro_batches
    assert engine.deepspeed.global_samples == sum(RAMP) * run.micro_batch * world_size
    if world_size == 1:
        # Each micro-batch's statistics were used once.
        norms = engine.model.audio.batch_norm, plain.audio.batch_norm
        buffers, expected_buffers = (dict(norm.named_buffers()) for norm in norms)
        torch.testing.assert_close(buffers, expected_buffers, rtol=1e-4, atol=1e-6)
    return errors


@pytest.mark.parametrize(
    "changes", [{"gradient_sync": "deepspeed"}, {"loss": SIGMOID, "text_packing": True}]
)
def test_gradients_of_two_ranks_through_a_ramp_are_the_references(two_ranks, changes):
    for errors in two_ranks.run(_errors, changes):
        assert max(errors) < TOLERANCE


def test_second_pass_draws_and_normalizes_as_the_first(one_rank):
    """The reference keeps every graph."""
    (errors,) = one_rank.run(_errors, {"model": NOISY})
    assert max(errors) < TOLERANCE
