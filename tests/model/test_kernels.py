"""Check which kernels a model is built with."""

import pytest
import torch

from clap_ds.config.schema import ModelSettings
from clap_ds.model import kernels
from clap_ds.model.kernels import Kernels, select_kernels

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def test_kernels_are_those_asked_for_or_the_devices_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "has_triton_package", lambda: True)
    assert select_kernels(ModelSettings(), CPU) == ("matmul", "torch", "torch")
    assert select_kernels(ModelSettings(), CUDA) == ("triton", "triton", "triton")
    assert select_kernels(ModelSettings(attention_impl="sdpa"), CUDA) == (
        "sdpa",
        "triton",
        "triton",
    )
    for part in Kernels._fields:
        asked = ModelSettings(**{f"{part}_impl": "triton"})
        assert getattr(select_kernels(asked, CUDA), part) == "triton"
        with pytest.raises(ValueError, match=rf"clap\.model\.{part}_impl: 'triton' needs a GPU"):
            select_kernels(asked, CPU)
    monkeypatch.setattr(kernels, "has_triton_package", lambda: False)
    assert select_kernels(ModelSettings(), CUDA) == ("sdpa", "torch", "torch")
    with pytest.raises(ValueError, match="triton package"):
        select_kernels(asked, CUDA)
