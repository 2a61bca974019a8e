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
from clap_ds.model.kernels import Kernels
from clap_ds.model.swin import WindowAttention
from clap_ds.run_records.schema import ChosenKernel
from tests.processes import ROOT

MIXED = ChosenKernel(kernel="triton", problem="rank 1: no such instruction")


def replace() -> tuple[dict[str, ChosenKernel], list[tuple[str, str]]]:
    """Return the record of an all-Triton model, and then the kernels of the first and last audio
    block with those of the text layers."""
    kernels = Kernels("triton", "triton", "triton")
    model = ClapModel(load_preset("micro"), **kernels._asdict()).bfloat16()
    record = kernel_fallback.replace_failing_kernels(ModelSettings(), model)
    (text_kernels,) = {(layer.attention.self.kernel, layer.kernel) for layer in model.text.blocks()}
    blocks = model.audio.blocks()
    used = [(block.attention.kernel, block.mlp.kernel) for block in (blocks[0], blocks[-1])]
    return record, [*used, text_kernels]


def fail_on_rank_1(function: Any, tokens: Tensor, **_: Any) -> None:
    is_attention = isinstance(getattr(function, "func", None), WindowAttention)
    fails = is_attention or getattr(function, "kernel", None) == "triton"
    if rank() == 1 and (tokens.ndim == 3 or (fails and tokens.shape[1] == 8)):
        raise RuntimeError("no such instruction\nat line 3")


def _replace_on_rank() -> Any:
    """Replace kernels while the last stage's attention and MLP's product and all of the text
    tower's kernels fail on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_fallback, "_try", fail_on_rank_1)
        return replace()


def test_kernels_that_fail_on_one_rank_are_replaced_on_all(two_ranks):
    for record, used in two_ranks.run(_replace_on_rank):
        replaced = {**MIXED, "kernel": "torch"}
        assert record == {"attention": MIXED, "mlp": MIXED, "text_attention": replaced}
        assert used == [("triton", "triton"), ("matmul", "triton_gelu"), ("torch", "torch")]


def _replace_for_long_captions() -> Any:
    kernels = Kernels("matmul", "torch", "triton")
    model = ClapModel(load_preset("micro"), **kernels._asdict()).bfloat16()
    return kernel_fallback.replace_failing_kernels(ModelSettings(), model, longest_caption=200)


def test_text_attention_of_long_captions_is_recorded_as_torchs(one_rank):
    (record,) = one_rank.run(_replace_for_long_captions)
    assert record["text_attention"]["kernel"] == "torch"
    assert "200 tokens" in record["text_attention"]["problem"]


@pytest.mark.end_to_end
def test_kernels_that_run_under_interpreter_stay():
    script = "from tests.engine.test_kernel_fallback import replace; print(replace())"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.stdout.count("triton") >= 8, ended.stdout + ended.stderr
    assert "warning" not in ended.stdout
