"""FLOPs of a benchmark: captions of all ranks count, and the profiled step uses torch's
operations."""

import contextlib
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from clap_ds.distributed.collectives import gather_tensor
from clap_ds.distributed.init import Ranks
from clap_ds.flop_count.analytic import published_flops
from clap_ds.flop_count.counters import build
from clap_ds.flop_count.published_model import published_model
from clap_ds.run import setup_dataloader
from clap_ds.throughput_bench import flops_profile
from clap_ds.throughput_bench.flops_profile import measure_flops
from tests.engine.test_engine import model_of, settings
from tests.rank_pool import RankPool
from tests.training.reference_steps import engine_of

LENGTHS = {"source": "synthetic", "caption_lengths": {"5": 1.0, "16": 1.0}}


def _profiled(root: str, text: str) -> tuple[dict[str, Any], str, float, int]:
    """Profile a run with Triton kernels and a compiled front end; if `packed`, without the
    published convention's operations. Returns findings, output, mean caption length and graphs of a
    later step."""
    torch.compiler.reset()
    rank = dist.get_rank()
    calls = list[int]()
    ranks = Ranks(rank, dist.get_world_size(), rank, dist.get_world_size())
    run = settings("fp32", 2, clap={"data": LENGTHS, "text_packing": text == "packed"})
    (folder := Path(root, f"run{rank}")).mkdir()

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return lambda *arguments: (calls.append(1), graph(*arguments))[1]

    engine = engine_of(run, model_of(run))
    engine.model.mel.compile(backend=counting)
    attentions = [block.attention for block in engine.model.audio.blocks()]
    profiled_model = build if text == "packed" else published_model
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        mock.patch.object(flops_profile, "published_model", profiled_model),
        setup_dataloader(run, ranks, engine) as loader,
    ):
        engine.step(loader)
        for each in attentions:
            each.kernel = "triton"
        before = len(calls)
        found = measure_flops(engine, loader, run.clap.model, {"enabled": True}, folder)
        assert (len(calls), engine.model.training) == (before, True)
        assert {each.kernel for each in attentions} == {"triton"}
        for each in attentions:
            each.kernel = "matmul"
        engine.step(loader)
        lengths = torch.cat([next(loader).attention_mask.sum(dim=1) for _ in range(4)])
        everywhere = torch.stack(gather_tensor(lengths)).double()
    return found, said.getvalue(), float(everywhere.mean()), len(calls) - before


@pytest.mark.parametrize("text", ["padded", "packed"])
def test_profiled_figures_stand_beside_the_published_convention(
    two_ranks: RankPool, tmp_path: Path, text: str
) -> None:
    (found, said, mean, graphs), _ = two_ranks.run(_profiled, str(tmp_path), text)
    assert (
        f"profiled {found['deepspeed_gflops']:.2f}, closed form {found['deepspeed_gflops']:.2f}"
        in said
    )
    if text == "padded":
        assert found["deepspeed_gflops"] == pytest.approx(found["model_gflops"], rel=1e-9)
    published = published_flops(settings("fp32", 2).clap.preset()) / 1e9
    profiled = found["deepspeed_published_gflops"]
    assert f"published convention: profiled {profiled:.2f}, closed form {published:.2f}" in said
    if text == "padded":
        assert profiled == pytest.approx(published, rel=1e-9)
    else:  # the profiled model was another one
        assert profiled < 0.99 * published
    assert graphs > 0, "compiled code runs again afterwards"
    assert found["mean_text_tokens"] == pytest.approx(mean if text == "packed" else 16)


def _counted(accumulation: str) -> dict[str, Any]:
    run = settings("fp32", 2, clap={"train": {"accumulation": accumulation}})
    engine = engine_of(run, model_of(run))
    with setup_dataloader(run, Ranks(0, 1, 0, 1), engine) as loader:
        return measure_flops(engine, loader, run.clap.model, {}, Path())


def test_cached_accumulation_computes_the_forward_pass_again(one_rank: RankPool) -> None:
    (plain,) = one_rank.run(_counted, "plain")
    (cached,) = one_rank.run(_counted, "gradcache")
    assert plain["recomputed_gflops"] == 0
    assert cached["recomputed_gflops"] == cached["model_gflops"] == plain["model_gflops"] > 0
    assert cached["training_gflops"] == plain["training_gflops"]
