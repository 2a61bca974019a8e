"""Check that `auto` is Triton if it runs on every rank; otherwise another kernel, with the reason printed and recorded."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from clap_ds.config.schema import ModelSettings
from clap_ds.distributed.collectives import rank
from clap_ds.engine import kernels
from clap_ds.model.clap import ClapModel
from clap_ds.run_records.metrics_schema import ChosenKernel
from tests.processes import ROOT
from tests.rank_pool import RankPool

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RIGHT = ChosenKernel(kernel="triton", problem=None)
Blocks = list[tuple[str, str]]


def settings(**model: Any) -> ModelSettings:
    return ModelSettings(preset="micro", **model)


def choose(**model: Any) -> tuple[dict[str, ChosenKernel], Blocks]:
    """Return what is chosen, and the kernels of each block."""
    asked = settings(**model)
    built = ClapModel(asked.sizes, **kernels.build_kernels(asked, CPU)).bfloat16()
    chosen = kernels.choose_kernels(asked, built, CPU, autocast=False)
    return chosen, [(block.attention.kernel, block.mlp.kernel) for block in built.audio.blocks()]


def fails_on_rank_1(field: str, model: ClapModel, *, autocast: bool) -> None:
    if field == "attention" and rank() == 1:
        raise RuntimeError("no such instruction\nat line 3")


def _choose_on_a_rank() -> tuple[dict[str, ChosenKernel], Blocks]:
    """Choose kernels while attention fails on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_try", fails_on_rank_1)
        return choose()


def test_all_ranks_take_what_runs_on_every_one(two_ranks: RankPool) -> None:
    for chosen, blocks in two_ranks.run(_choose_on_a_rank):
        assert chosen == {"attention": {"kernel": "matmul", "problem": "rank 1: no such instruction"}, "mlp": RIGHT}
        assert blocks[-1] == ("matmul", "triton")
        assert blocks[0][1] == "torch", "there is no kernel for MLPs of 16 channels"


def test_what_a_model_is_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, attention in ((CPU, "matmul"), (CUDA, "sdpa")):
        assert kernels.build_kernels(settings(), device) == {"attention": attention, "mlp": "torch"}
    for field in kernels.FIELDS:
        asked = settings(**{f"{field}_impl": "triton"})
        assert kernels.build_kernels(asked, CUDA)[field] == "triton"
        with pytest.raises(ValueError, match=rf"clap\.model\.{field}_impl: 'triton' needs a GPU"):
            kernels.build_kernels(asked, CPU)
    monkeypatch.setattr(kernels, "has_triton_package", lambda: False)
    with pytest.raises(ValueError, match="triton package"):
        kernels.build_kernels(asked, CUDA)


@pytest.mark.end_to_end
def test_the_real_kernels_are_taken_under_tritons_interpreter() -> None:
    script = "from tests.engine.test_kernels import choose; print(choose())"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.stdout.count("triton") >= 6, ended.stdout + ended.stderr
    assert "warning" not in ended.stdout
