"""What one GPU can't show: gradients that travel by NCCL, and towers compiled on more ranks than one."""

import pytest
import torch
from torch import Tensor

from clap_ds.engine.compiled import compile_towers
from clap_ds.engine.engine import ClapEngine
from tests.engine.test_engine import (
    DEVICE,
    GPU_ROUNDINGS,
    PRECISIONS,
    TIMER,
    _difference,
    batches_of,
    model_of,
    settings,
)
from tests.rank_pool import RankPool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sync", ["overlapped", "deepspeed"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ten_steps_agree_with_plain_ddp_over_nccl(two_gpus: RankPool, precision: str, sync: str) -> None:
    assert all(difference <= GPU_ROUNDINGS for difference in two_gpus.run(_difference, precision, 2, sync))


def _four_steps(what: str) -> tuple[list[float], list[Tensor]]:
    """Losses, and the weights they lead to."""
    run = settings("bf16", 1)
    engine, batches = ClapEngine(run, model_of(run), DEVICE), batches_of(run)
    if what != "off":
        compile_towers(engine.deepspeed, batches.peek(), what, cached=False)
    losses = [float(engine.step(batches, TIMER)) for _ in range(4)]
    return losses, [parameter.detach().float().cpu() for parameter in engine.model.parameters()]


def _compiled_beside_plain() -> tuple[list[float], list[float], list[Tensor], int]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    plain, _ = _four_steps("off")
    compiled, weights = _four_steps("towers")
    return plain, compiled, weights, len(torch._dynamo.utils.counters["graph_break"])


def test_compiled_towers_are_whole_and_stay_the_same_on_both(two_gpus: RankPool) -> None:
    first, second = two_gpus.run(_compiled_beside_plain)
    for plain, compiled, _, num_breaks in (first, second):
        assert compiled == pytest.approx(plain, rel=0.02)
        assert num_breaks == 0
    assert all(map(torch.equal, first[2], second[2]))
