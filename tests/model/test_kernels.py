"""Check the selection of a model's kernels. `test_flops_profile.py` tests `without_triton`."""

import pytest
import torch

from clap_ds.config.schema import ModelSettings
from clap_ds.model import kernels
from clap_ds.model.kernels import Kernels, select_kernels, text_attention_problem

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture(params=[True, False])
def has_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(kernels, "has_triton_package", lambda: request.param)
    return request.param


def test_auto_selects_fastest_kernels_of_device(has_triton):
    fastest = ("triton", "triton", "triton") if has_triton else ("sdpa", "torch", "torch")
    assert select_kernels(ModelSettings(), CPU) == ("matmul", "torch", "torch")
    assert select_kernels(ModelSettings(), CUDA) == fastest
    assert select_kernels(ModelSettings(attention_impl="sdpa"), CUDA) == ("sdpa", *fastest[1:])


@pytest.mark.parametrize(
    ("head_dim", "longest", "dtype", "capability", "reason"),
    [
        (64, 128, torch.bfloat16, (8, 0), None),
        (64, 77, torch.float16, (12, 0), None),
        (64, 129, torch.bfloat16, (9, 0), "129 tokens"),
        (24, 77, torch.bfloat16, (9, 0), "24 channels"),
        (64, 77, torch.float32, (9, 0), "float32"),
        (64, 77, torch.float16, (7, 5), "compute capability"),
    ],
)
def test_text_attention_of_triton_needs_16_bits_short_captions_and_an_ampere_gpu(
    head_dim, longest, dtype, capability, reason
):
    problem = text_attention_problem(head_dim, longest, dtype, capability)
    assert problem is None if reason is None else reason in str(problem)


@pytest.mark.parametrize(
    ("part", "kernel"), [*((part, "triton") for part in Kernels._fields), ("mlp", "triton_gelu")]
)
def test_triton_without_gpu_or_package_is_rejected(has_triton, part, kernel):
    settings = ModelSettings(**{f"{part}_impl": kernel})
    message = rf"clap\.model\.{part}_impl: '{kernel}' needs a GPU and the triton package"
    with pytest.raises(ValueError, match=message):
        select_kernels(settings, CUDA if not has_triton else CPU)
