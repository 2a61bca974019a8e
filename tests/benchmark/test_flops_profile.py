"""FLOPs of a benchmark: captions of all ranks count, and the profiled step uses torch's operations."""

import contextlib
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.benchmark.flops_profile import measure_flops
from clap_ds.distributed.collectives import gather_tensor
from clap_ds.distributed.init import Ranks
from clap_ds.engine import engine as engine_module
from clap_ds.engine.compile import compile_towers
from clap_ds.flop_count.analytic import published_flops
from clap_ds.run_parts import loader_of
from tests.engine.test_engine import model_of, settings
from tests.rank_pool import RankPool
from tests.training.reference_steps import engine_of

LENGTHS = {"source": "synthetic", "caption_lengths": {"5": 1.0, "16": 1.0}}


def _profiled(root: str, compiled: str, text: str) -> tuple[dict[str, Any], str, float, int]:
    """Profile a run with Triton kernels. Returns findings, output, mean caption length and graphs of a later step."""
    torch.compiler.reset()
    rank, calls = dist.get_rank(), list[int]()
    ranks = Ranks(rank, dist.get_world_size(), rank, dist.get_world_size())
    clap = {"data": LENGTHS, "compile": compiled, "text_packing": text == "packed"}
    run = settings("fp32", 2, clap=clap)
    folder = Path(root, f"run{rank}")
    folder.mkdir()

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return lambda *arguments: (calls.append(1), graph(*arguments))[1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(engine_module, "compile_towers", partial(compile_towers, backend=counting))
        engine = engine_of(run, model_of(run))
        with loader_of(run, ranks, engine) as loader:
            engine.optimize_towers(loader, run.clap.model, run.clap.compile)
            engine.step(loader)
            for block in engine.model.audio.blocks():
                block.attention.kernel = "triton"
            found = measure_flops(engine, loader, run.clap.model, {"enabled": True}, folder)
            for block in engine.model.audio.blocks():
                assert block.attention.kernel == "triton"
                block.attention.kernel = "matmul"
            before = len(calls)
            engine.step(loader)
            lengths = torch.cat([next(loader).attention_mask.sum(dim=1) for _ in range(4)])
            everywhere = gather_tensor(lengths).double()
    return found, said.getvalue(), float(everywhere.mean()), len(calls) - before


@pytest.mark.parametrize(("compiled", "text"), [("towers", "padded"), ("off", "packed")])
def test_profiled_figures_stand_beside_the_published_convention(
    two_ranks: RankPool, tmp_path: Path, compiled: str, text: str
) -> None:
    (found, said, mean, graphs), _ = two_ranks.run(_profiled, str(tmp_path), compiled, text)
    if text == "padded":
        assert found["deepspeed_gflops"] == pytest.approx(found["model_gflops"], rel=1e-9)
    published = published_flops(settings("fp32", 2).clap.preset()) / 1e9
    assert f"profiled {found['deepspeed_gflops']:.2f}" in said
    assert f"published convention {published:.2f}" in said
    assert (graphs > 0) == (compiled == "towers"), "compiled code runs again afterwards"
    assert found["mean_text_tokens"] == pytest.approx(mean if text == "packed" else 16)
