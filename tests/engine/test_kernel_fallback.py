"""Check that Triton kernels that fail on any rank are replaced, with the reason printed and
recorded."""

import os
import subprocess
import sys
from typing import Any

import pytest
from torch import Tensor

from clap_ds.config.model import load_preset
from clap_ds.config.schema import ModelSettings
from clap_ds.distributed.collectives import rank
from clap_ds.engine import kernel_fallback
from clap_ds.model.clap import ClapModel
from clap_ds.model.swin import WindowAttention
from clap_ds.run_records.schema import ChosenKernel
from tests.processes import ROOT
from tests.rank_pool import RankPool

MIXED = ChosenKernel(kernel="triton", problem="rank 1: no such instruction")


def choose() -> tuple[dict[str, ChosenKernel], list[tuple[str, str]], set[str]]:
    """Return what is chosen, the kernels of each audio block, and those of the text layers."""
    kernels = dict.fromkeys(("attention", "mlp", "text_attention"), "triton")
    model = ClapModel(load_preset("micro"), **kernels).bfloat16()
    chosen = kernel_fallback.replace_failing_kernels(ModelSettings(), model)
    blocks = [(block.attention.kernel, block.mlp.kernel) for block in model.audio.blocks()]
    return (
        chosen,
        blocks,
        {(layer.attention.self.kernel, layer.intermediate.kernel) for layer in model.text.blocks()},
    )


def fails_on_rank_1(function: Any, tokens: Tensor, **_: Any) -> None:
    is_attention = isinstance(getattr(function, "func", None), WindowAttention)
    if rank() == 1 and (tokens.ndim == 3 or (is_attention and tokens.shape[1] == 8)):
        raise RuntimeError("no such instruction\nat line 3")


def _choose_on_a_rank() -> Any:
    """Choose kernels while the last stage's attention and the text tower's kernels fail on rank
    1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_fallback, "_try", fails_on_rank_1)
        return choose()


def test_all_ranks_take_what_runs_on_every_one(two_ranks: RankPool) -> None:
    for chosen, blocks, layers in two_ranks.run(_choose_on_a_rank):
        assert chosen == {
            "attention": MIXED,
            "mlp": MIXED,
            "text_attention": {**MIXED, "kernel": "torch"},
        }
        assert (blocks[0], blocks[-1], layers) == (
            ("triton", "triton"),
            ("matmul", "triton"),
            {("torch", "torch")},
        )


@pytest.mark.end_to_end
def test_the_real_kernels_are_taken_under_tritons_interpreter() -> None:
    script = "from tests.engine.test_kernel_fallback import choose; print(choose())"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.stdout.count("triton") >= 8, ended.stdout + ended.stderr
    assert "warning" not in ended.stdout
