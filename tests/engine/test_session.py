"""How a run's end is told from the exception that ended it, and which kernels a model isn't built with."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clap_ds.config.settings import load_run
from clap_ds.engine.session import build_model, is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("Tried to allocate 20.00 MiB"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: invalid configuration argument"), False),
        (ValueError("the memory of this"), False),
    ],
)
def test_exhausted_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize("field", ["attention", "mlp"])
def test_a_triton_kernel_asked_for_on_a_cpu_is_refused(field: str, write_run: Callable[..., Path]) -> None:
    run = load_run(write_run(clap={"model": {"preset": "micro", field: "triton"}}))
    with pytest.raises(ValueError, match=rf"clap\.model\.{field}: 'triton' runs on GPUs, found a CPU"):
        build_model(run, torch.device("cpu"))


def test_an_environment_where_nothing_could_be_linked_is_told_before_compiling(
    write_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(clap={"model": {"preset": "micro"}, "compile": "towers"})
    monkeypatch.setattr(torch, "__file__", "/home/new comer/torch/__init__.py")
    with pytest.raises(ValueError, match=rf"{path}: clap\.compile: .*path has a space"):
        build_model(load_run(path), torch.device("cpu"))
