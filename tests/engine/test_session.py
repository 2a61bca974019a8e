"""How a run's end is told from the exception that ended it, and what is said before it begins."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.op_builder import FusedAdamBuilder

from clap_ds.config.settings import load_run
from clap_ds.data.supply import Supply
from clap_ds.engine.session import (
    Session,
    _check_deepspeed_sections,
    _is_connection_lost,
    build_model,
    is_out_of_memory,
    times_host_alone,
)
from clap_ds.engine.wrapping import wrap
from clap_ds.ranks.distributed import Ranks


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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:5034"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:1]\nwritev: Broken pipe"), True),
        (RuntimeError("[gloo/unbound_buffer.cc:84] Timed out waiting 4000ms for recv operation to complete"), True),
        (RuntimeError("NCCL error\nncclRemoteError: A call failed, possibly due to a remote process exiting"), True),
        (RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (torch.distributed.DistNetworkError("Failed to recv, got 0 bytes"), True),
        (RuntimeError("NCCL error: ncclSystemError: unhandled system error"), False),
        (ConnectionError("Connection reset by peer"), False),  # of whom data are read from
    ],
)
def test_a_lost_rank_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert _is_connection_lost(error) == expected


def test_a_rank_has_its_part_of_the_global_batch(write_run: Callable[..., Path]) -> None:
    run: Any = load_run(write_run(train_batch_size=24, gradient_accumulation_steps=None), 2)
    session = Session(run, Ranks(0, 2, 0, 2), *[None] * 5)  # type: ignore[arg-type]
    assert (session.samples_per_step, run.micro_batch) == (12, 4)


def test_an_environment_where_nothing_could_be_linked_is_told_before_compiling(
    write_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(clap={"model": {"preset": "micro"}, "compile": "towers"})
    monkeypatch.setattr(torch, "__file__", "/home/new comer/torch/__init__.py")
    with pytest.raises(ValueError, match=rf"{path}: clap\.compile: .*path has a space"):
        build_model(load_run(path), torch.device("cpu"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"wandb": {"enabled": True}}, r"wandb\.enabled: wandb is not installed; pip install wandb"),
        ({"comet": {"enabled": True}}, r"comet\.enabled: comet_ml is not installed"),
        ({"tensorboard": {"enabled": True, "output_path": "/proc/x"}}, r"tensorboard\.output_path: .*'/proc/x'"),
        ({"csv_monitor": {"enabled": True, "output_path": "/proc/x"}}, r"csv_monitor\.output_path: .*'/proc/x'"),
        ({"tensorboard": {"enabled": True, "output": "x"}}, "DeepSpeed refuses the configuration"),
    ],
)
def test_what_one_rank_would_find_while_others_wait_is_told_before(
    write_run: Callable[..., Path], section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _check_deepspeed_sections(load_run(write_run(**section)))


def test_an_optimizer_that_cannot_be_compiled_is_one_line(
    write_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Any, verbose: bool = True) -> None:
        raise RuntimeError("Error building extension 'fused_adam'\nand more")

    monkeypatch.setattr(FusedAdamBuilder, "load", load)
    run = load_run(write_run(clap={"fused_adam": "deepspeed"}))
    with pytest.raises(ValueError, match=r"clap\.fused_adam: Error building extension 'fused_adam'; 'torch' needs no"):
        wrap(build_model(run, torch.device("cpu")), run)


def test_rates_of_the_host_alone_are_deepspeeds_on_a_gpu_without_synchronising() -> None:
    def said(device: str, synchronized: bool, enabled: bool = True) -> bool:
        timer: Any = SimpleNamespace(config=SimpleNamespace(synchronized=synchronized, enabled=enabled))
        return times_host_alone(timer, torch.device(device))

    assert said("cuda", synchronized=False)
    assert not any((said("cuda", True), said("cpu", False), said("cuda", False, enabled=False)))


def test_the_loader_is_compared_with_steps_that_have_warmed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A first step, which may have compiled for a minute, isn't one even where it is logged alone."""
    parts: dict[str, Any] = dict.fromkeys(("run", "device", "record", "engine", "scalars"))
    ranks: Any = SimpleNamespace(is_first=True, local_world_size=1)
    batches: Any = SimpleNamespace(supply=lambda: Supply(100.0, 1, "mel"))
    session = Session(**parts, ranks=ranks, batches=batches)
    session.tell_supply([0.1])
    assert not capsys.readouterr().out
    session.tell_supply([200.0])
    session.tell_supply([300.0])
    assert capsys.readouterr().out.count("the step of their rank takes 200: it will wait") == 1
