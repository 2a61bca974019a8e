"""FLOPs of a benchmark: captions of all ranks count, and the profiled step uses torch's
operations."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.distributed.collectives import gather_tensor
from clap_ds.distributed.init import Ranks
from clap_ds.flop_count.analytic import published_flops
from clap_ds.flop_count.counters import build
from clap_ds.run import setup_dataloader
from clap_ds.throughput_bench import flops_profile
from clap_ds.throughput_bench.flops_profile import measure_flops
from tests.engine.test_engine import model_of, settings
from tests.training.reference_steps import engine_of

DATA = {"source": "synthetic", "caption_lengths": {"5": 1.0, "16": 1.0}}


def _profile(root: str, packed: bool) -> tuple[dict[str, Any], str, float]:
    """Profile a run with Triton kernels and a compiled front end. Return the FLOPs, what is
    printed, and the mean caption length of all ranks.

    If `packed`, the published model is replaced by another one.
    """
    torch.compiler.reset()
    rank = dist.get_rank()
    ranks = Ranks(rank, dist.get_world_size(), rank, dist.get_world_size())
    run = settings("fp32", 2, clap={"data": DATA, "text_packing": packed})
    folder = Path(root, f"run{rank}")
    folder.mkdir()

    def kernels(kernel: str) -> None:
        for block in engine.model.audio.blocks():
            block.attention.kernel = kernel

    engine: Any = engine_of(run, model_of(run))
    engine.model.mel.compile(backend="eager")
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        pytest.MonkeyPatch.context() as patch,
        # As `compile_towers` sets it: the reducer's buckets don't concern compiled parts.
        torch._dynamo.config.patch(optimize_ddp=False),
        setup_dataloader(run, ranks, engine) as loader,
    ):
        if packed:
            patch.setattr(flops_profile, "build_published_model", build)
        engine.step(loader)
        kernels("triton")
        flops = measure_flops(engine, loader, run.clap.model, {"enabled": True}, folder)
        assert engine.model.training
        assert {block.attention.kernel for block in engine.model.audio.blocks()} == {"triton"}
        lengths = torch.cat([next(loader).attention_mask.sum(dim=1) for _ in range(4)])
        mean_length = torch.stack(gather_tensor(lengths)).double().mean()
    return flops, stdout.getvalue(), float(mean_length)


def test_profile_of_padded_captions_agrees_with_closed_forms(two_ranks, tmp_path):
    (flops, stdout, _), _ = two_ranks.run(_profile, str(tmp_path), False)
    published = published_flops(settings("fp32", 2).clap.preset()) / 1e9
    assert flops["deepspeed_gflops"] == pytest.approx(flops["model_gflops"], rel=1e-9)
    assert flops["deepspeed_published_gflops"] == pytest.approx(published, rel=1e-9)
    assert flops["mean_text_tokens"] == 16
    executed = f"{flops['model_gflops']:.2f}"
    assert f"profiled {executed}, closed form {executed}; published" in stdout
    assert f"convention: profiled {published:.2f}, closed form {published:.2f}" in stdout


def test_profile_of_packed_captions_has_their_mean_length_and_the_padded_figures(
    two_ranks, tmp_path
):
    (flops, stdout, mean_length), _ = two_ranks.run(_profile, str(tmp_path), True)
    assert flops["mean_text_tokens"] == pytest.approx(mean_length)
    padded = f"{flops['deepspeed_gflops']:.2f}"
    assert f"profiled {padded}, closed form {padded}; published" in stdout
    # The profiled model is another one.
    assert flops["deepspeed_published_gflops"] < 0.99 * flops["published_gflops"]
