"""A number of micro-batches that changes from step to step leaves gradients the mean over micro-batches and ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.record.clock import PhaseTimer
from tests.ranks import RankPool
from tests.training import reference_steps as reference

RAMP = (1, 3, 2, 2)


def _differences(sync: str, accumulation: str) -> list[float]:
    run = reference.settings(train={"accumulation": accumulation})
    torch.manual_seed(3)
    engine = ClapEngine(
        run, ClapModel(run.clap.preset(), drop_path=0, text_dropout=0, spec_augment=False), reference.CPU
    )
    if sync == "deepspeed":
        engine.sync._recorder = None
    plain = copy.deepcopy(engine.model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    world_size, timer = dist.get_world_size(), PhaseTimer(reference.CPU, instrumented=False)
    by_rank = [reference.micro_batches(run, rank, world_size, sum(RAMP)) for rank in range(world_size)]
    own, found, start = iter(by_rank[dist.get_rank()]), [], 0
    loss_of = reference.whole_loss if accumulation == "cached" else reference.independent_loss
    for number in RAMP:
        engine.set_accumulation_steps(number)
        engine.step(own, timer)
        optimizer.zero_grad()
        loss_of(plain, [rank[start : start + number] for rank in by_rank]).backward()
        optimizer.step()
        start += number
        weights = zip(engine.model.parameters(), plain.parameters(), strict=True)
        found.append(max(float((ours - theirs).abs().max()) for ours, theirs in weights))
    assert engine.deepspeed.global_steps == len(RAMP)
    assert engine.deepspeed.global_samples == sum(RAMP) * run.micro_batch * world_size
    return found


@pytest.mark.parametrize("accumulation", ["independent", "cached"])
@pytest.mark.parametrize("sync", ["overlapped", "deepspeed"])
def test_weights_follow_plain_torch_through_a_ramp(two_ranks: RankPool, sync: str, accumulation: str) -> None:
    for differences in two_ranks.run(_differences, sync, accumulation):
        # Weights of size 1 are stepped four times, by gradients that are the same but for fp32's rounding.
        assert max(differences) < 32 * torch.finfo(torch.float32).eps
