"""What one GPU can't show: gradients that travel by NCCL, and towers compiled on more ranks than one."""

import pytest
import torch
from torch import Tensor

from clap_ds.engine.compiled import compile_statistics
from clap_ds.engine.engine import ClapEngine
from clap_ds.record.clock import PhaseTimer
from tests.engine.test_engine import DEVICE, _batches, _difference, _model, _settings
from tests.rank_pool import RankPool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sync", ["overlapped", "deepspeed"])
@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
def test_ten_steps_agree_with_plain_ddp_over_nccl(two_gpus: RankPool, precision: str, sync: str) -> None:
    # As on one GPU: four roundings of a bf16 gradient, each 2¹⁶ of fp32's.
    assert all(difference <= 2**18 for difference in two_gpus.run(_difference, precision, 2, sync))


def _steps(what: str) -> tuple[list[float], list[Tensor]]:
    """Losses of four steps, of which torch's reducer does the last three, and the weights they lead to."""
    run = _settings("bf16", 1)
    run.clap = run.clap.model_copy(update={"compile": what})
    engine, batches = ClapEngine(run, _model(run), DEVICE), _batches(run)
    losses = [float(engine.step(batches, PhaseTimer(DEVICE, instrumented=False))) for _ in range(4)]
    return losses, [parameter.detach().float().cpu() for parameter in engine.model.parameters()]


def _compiled_beside_plain() -> tuple[list[float], list[float], list[Tensor], int]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    plain, _ = _steps("off")
    compiled, weights = _steps("towers")
    return plain, compiled, weights, compile_statistics()["num_graph_breaks"]


def test_compiled_towers_are_whole_and_stay_the_same_on_both(two_gpus: RankPool) -> None:
    first, second = two_gpus.run(_compiled_beside_plain)
    for plain, compiled, _, num_breaks in (first, second):
        assert compiled == pytest.approx(plain, rel=0.02)
        assert num_breaks == 0
    assert all(map(torch.equal, first[2], second[2]))
