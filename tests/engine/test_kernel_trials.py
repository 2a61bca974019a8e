"""A kernel that is wrong anywhere is found out, and its time is the median of what the clock says."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from clap_ds.engine import kernel_trials
from clap_ds.engine.kernel_trials import AttentionSite, MlpSite, Site, answer, check, from_json, seconds, to_json
from clap_ds.model.kernel_choice import KernelChoice
from clap_ds.model.window_attention import attend_windows
from tests.processes import ROOT

CPU, CLIPS = torch.device("cpu"), 6
SHIFTED, MLP = AttentionSite(16, 8, 4, 2, 32), MlpSite(8, 32, 4)
SITES: list[Site] = [SHIFTED, AttentionSite(8, 8, 0, 1, 32), MLP]
FAULTY = KernelChoice("faulty")


@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("dtype", kernel_trials.TOLERANCE, ids=str)
def test_right_kernels_pass(site: Site, dtype: torch.dtype) -> None:
    assert from_json(to_json(site)) == site
    for kernel in {site.candidates()[0], site.reference}:
        assert check(site, kernel, CLIPS, dtype, CPU) is None
        assert check(site, kernel, 1, dtype, CPU) is None


def with_another_gradient(tensor: Tensor, factor: float = 1.1) -> Tensor:
    """The tensor, with a gradient that is wrong by the factor."""
    return tensor.detach() + factor * (tensor - tensor.detach())


def with_another_k(qkv: Tensor) -> Tensor:
    q, k, v = qkv.chunk(3, dim=-1)
    return torch.cat([q, with_another_gradient(k), v], dim=-1)


FAULTS: dict[str, Callable[[Tensor, Tensor, Tensor, Callable[..., Tensor]], Tensor]] = {
    "its output is off by 0.1 of": lambda qkv, bias, mask, run: 1.1 * run(qkv, bias, mask),
    "its output is off by nan of": lambda qkv, bias, mask, run: run(qkv, bias, mask) * torch.nan,
    "its output is off by": lambda qkv, bias, mask, run: run(qkv, bias, torch.zeros_like(mask)),
    "its gradient of k is off by 0.1 of": lambda qkv, bias, mask, run: run(with_another_k(qkv), bias, mask),
    "its gradient of bias is off by 0.1 of": lambda qkv, bias, mask, run: run(qkv, with_another_gradient(bias), mask),
    "its gradients reach other clips": lambda qkv, bias, mask, run: (
        run(qkv, bias, mask) + with_another_gradient(qkv[2:3, :, :, :32], 1e-3) - qkv[2:3, :, :, :32].detach()
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def attend(qkv: Tensor, bias: Tensor, mask: Any, window: int, shift: int, kernel: KernelChoice) -> Tensor:
        def run(qkv: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
            return attend_windows(qkv, bias, mask, window, shift, SHIFTED.reference)

        return FAULTS[fault](qkv, bias, mask, run) if kernel == FAULTY else run(qkv, bias, mask)

    monkeypatch.setattr(kernel_trials, "attend_windows", attend)
    assert str(check(SHIFTED, FAULTY, CLIPS, torch.float32, CPU)).startswith(fault)


def test_the_time_is_the_median_after_a_run_that_does_not_count() -> None:
    times, gradients = iter([90.0, 1.0, 5.0, 2.0, 4.0, 3.0]), []

    def measure(do: Callable[[], object]) -> float:
        gradients.append(do())
        return next(times)

    assert seconds(MLP, MLP.reference, CLIPS, torch.float32, CPU, measure) == 3.0
    assert [[tensor.shape[0] for tensor in each] for each in gradients] == 6 * [[CLIPS, CLIPS, 128, 128, 32, 32]]


def test_whatever_goes_wrong_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(error: Exception | None, what: str = "check") -> dict[str, Any]:
        def operation(site: Site, device: torch.device) -> Callable[..., Tensor]:
            def run(kernel: KernelChoice, *leaves: Tensor) -> Tensor:
                raise error or AssertionError

            return run

        with monkeypatch.context() as patch:
            if error:
                patch.setattr(MlpSite, "operation", operation)
            question = {"site": to_json(MLP), "kernel": "torch", "what": what}
            return answer(question, CLIPS, torch.bfloat16, CPU, lambda do: 0.5 if do() else 0.0)

    assert found(None) == {}
    assert found(None, "time") == {"seconds": 0.5}
    assert found(RuntimeError("no such instruction\nat line 3")) == {"problem": "no such instruction", "passing": False}
    assert found(torch.OutOfMemoryError("too much"), "time") == {"problem": "too much", "passing": True}
    assert found(RuntimeError("Triton Error [CUDA]: out of memory"))["passing"]
    assert found(RuntimeError("Failed to find C compiler."))["passing"]
    assert found(OSError())["passing"]
    assert found(KeyError()) == {"problem": "KeyError", "passing": False}


@pytest.mark.parametrize("site", [SHIFTED, MLP], ids=str)
def test_kernels_that_need_a_gpu_do_not_run_without(site: Site) -> None:
    pytest.importorskip("triton")
    for kernel in site.candidates()[1:]:
        question = {"site": to_json(site), "kernel": str(kernel), "what": "check"}
        assert "problem" in answer(question, CLIPS, torch.bfloat16, CPU, lambda do: 0.0)


IN_PLACE: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}


def command(device: str, parent: int) -> list[str]:
    setup = {"device": device, "dtype": "bfloat16", "clips": 1, "parent": parent}
    return [sys.executable, "-P", "-m", kernel_trials.__name__, json.dumps(setup)]


@pytest.mark.end_to_end
def test_it_ends_with_its_parent() -> None:
    """Though its standard input stays open."""
    script = "import os, subprocess, sys; subprocess.run([it.replace('-1', str(os.getpid())) for it in sys.argv[1:]])"
    line = [sys.executable, "-c", script, *command("cpu", -1)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **IN_PLACE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "{}\n"
        parent.kill()
        assert select.select([parent.stdout], [], [], 60)[0]  # the end of the last process that has it open
        assert parent.stdout.read() == ""


@pytest.mark.end_to_end
def test_a_gpu_that_cannot_be_had_is_said_in_a_line() -> None:
    ended = subprocess.run(command("cuda:99", os.getpid()), capture_output=True, text=True, **IN_PLACE)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Traceback" not in ended.stderr
    assert "cuda" in ended.stderr.splitlines()[-1].casefold()
