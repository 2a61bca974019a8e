"""Check that Triton kernels that fail on any rank are replaced, with the reason printed and recorded."""

import os
import subprocess
import sys
from typing import Any

import pytest

from clap_ds.config.model import load_preset
from clap_ds.config.schema import ModelSettings
from clap_ds.distributed.collectives import rank
from clap_ds.engine import kernel_fallback
from clap_ds.model.clap import ClapModel
from clap_ds.run_records.metrics_schema import ChosenKernel
from tests.processes import ROOT
from tests.rank_pool import RankPool

RIGHT = ChosenKernel(kernel="triton", problem=None)


def choose() -> tuple[dict[str, ChosenKernel], list[tuple[str, str]]]:
    """Return what is chosen, and the kernels of each block."""
    model = ClapModel(load_preset("micro"), attention="triton", mlp="triton").bfloat16()
    chosen = kernel_fallback.fall_back(ModelSettings(), model)
    return chosen, [(block.attention.kernel, block.mlp.kernel) for block in model.audio.blocks()]


def fails_on_rank_1(stage: Any, part: str, **_: Any) -> None:
    if part == "attention" and stage.grid == 8 and rank() == 1:
        raise RuntimeError("no such instruction\nat line 3")


def _choose_on_a_rank() -> tuple[dict[str, ChosenKernel], list[tuple[str, str]]]:
    """Choose kernels while the last stage's attention fails on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_fallback, "_try", fails_on_rank_1)
        return choose()


def test_all_ranks_take_what_runs_on_every_one(two_ranks: RankPool) -> None:
    for chosen, blocks in two_ranks.run(_choose_on_a_rank):
        assert chosen == {"attention": {"kernel": "triton", "problem": "rank 1: no such instruction"}, "mlp": RIGHT}
        assert blocks[0] == ("triton", "torch"), "there is no kernel for MLPs of 16 channels"
        assert blocks[-1] == ("matmul", "triton")


@pytest.mark.end_to_end
def test_the_real_kernels_are_taken_under_tritons_interpreter() -> None:
    script = "from tests.engine.test_kernel_fallback import choose; print(choose())"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.stdout.count("triton") >= 6, ended.stdout + ended.stderr
    assert "warning" not in ended.stdout
