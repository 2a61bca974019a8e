"""The fused MLP: as the eager form, traced as one operation each way, and taken where it is asked for and has kernels."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="Triton is installed with torch on Linux")

from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.model.mlp_triton import supports, triton_mlp
from clap_ds.model.swin import Mlp
from clap_ds.native.convert import NativeSwinBlock
from tests.model import mlp_cases as cases
from tests.model.mlp_cases import CASES, TOLERANCE, largest_error


@pytest.mark.end_to_end
def test_the_kernels_agree_with_the_eager_form_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, cases.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 2 * len(CASES) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (40960, 96), (10240, 192)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_kernels_agree_with_the_eager_form_on_a_gpu(dtype: torch.dtype, case: cases.Case) -> None:
    assert largest_error(triton_mlp, case, dtype, "cuda") < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dim", "hidden", "expected"),
    [(96, 384, True), (256, 1024, True), (384, 1536, False), (112, 448, False), (96, 400, False), (16, 64, False)],
)
def test_which_widths_have_kernels(dim: int, hidden: int, expected: bool) -> None:
    """Two powers of two from 16 on make 96, not 112; below 32 there aren't two."""
    assert supports(dim, hidden) == expected


def test_a_trace_sees_one_operation_each_way_and_every_product() -> None:
    mlp = Mlp(96, 4).bfloat16()
    totals = {}
    for kernel in ("torch", "triton"):
        mlp.kernel = kernel
        with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
            tokens = torch.randn(2, 8, 8, 96, dtype=torch.bfloat16, requires_grad=True)
            output = mlp(tokens)
            output.sum().backward()
            assert output.shape == tokens.shape
            assert {name: each.grad.shape for name, each in mlp.named_parameters() if each.grad is not None} == {
                name: each.shape for name, each in mlp.named_parameters()
            }
        mlp.zero_grad(set_to_none=True)
        totals[kernel] = counter.get_total_flops()
    counts = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    assert set(counts) == {"clap_ds.mlp", "clap_ds.mlp_backward", "aten.mm"}
    # Six products, and the first linear's once more for the backward pass.
    product = 2 * 128 * 96 * 384
    assert totals == {"torch": 6 * product, "triton": 7 * product}


@pytest.mark.parametrize("mlp", ["torch", "triton"])
def test_the_model_takes_it_where_asked_and_fitting(mlp: str) -> None:
    with torch.device("meta"):
        model = ClapModel(load_preset("htsat_tiny_roberta_base"), attention="matmul", mlp=mlp)
    fused = [[block.mlp.kernel == "triton" for block in stage.blocks] for stage in model.audio.stages]
    narrow = mlp == "triton"
    assert fused == [[narrow] * 2, [narrow] * 2, [False] * 6, [False] * 2]
    # CPU kernels, where they run, leave such a block alone.
    block = model.audio.stages[0].blocks[0]
    assert NativeSwinBlock.fits(block) == (not narrow)
