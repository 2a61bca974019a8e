"""`auto` is Triton where it is right on every rank; where it isn't, the other kernel, and why is said and recorded."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clap_ds.config.settings import ClapSettings, RunSettings
from clap_ds.engine import kernels
from clap_ds.model import mlp_triton
from clap_ds.model.clap import ClapModel
from clap_ds.model.window_attention import attend_windows
from clap_ds.ranks.agreement import rank
from clap_ds.record.schema import ChosenKernel
from tests.conftest import micro_run
from tests.processes import ROOT, TIMEOUT_S
from tests.rank_pool import RankPool

RIGHT = ChosenKernel(kernel="triton", problem=None)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": {"enabled": False}},
    "fp16": {"bf16": {"enabled": False}, "fp16": {"enabled": True}},
    "bf16": {},
    "autocast": {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
Attend = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Mlp = Callable[..., Tensor]


def choose(
    precision: str = "fp32", device: str = "cpu", **model: Any
) -> tuple[dict[str, ChosenKernel], list[tuple[str, str]]]:
    """What is chosen, and the attention and MLP that blocks have then."""
    content = micro_run(clap={"model": {"preset": "micro", **model}}, **PRECISIONS[precision])
    run = RunSettings(Path("run.json"), ClapSettings.model_validate(content.pop("clap")), content)
    asked = run.clap.model
    built = ClapModel(run.clap.preset(), attention=asked.attention, mlp=asked.mlp, device=torch.device("meta"))
    chosen = kernels.choose_kernels(run, built, torch.device(device))
    blocks = [block for stage in built.audio.stages for block in stage.blocks]
    return chosen, [(block.attention.kernel, block.mlp.kernel) for block in blocks]


def plain_attention(attend: Attend, qkv: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    return attend(qkv, bias, mask)


def plain_mlp(mlp: Mlp, *tensors: Tensor) -> Tensor:
    return mlp(*tensors)


def fake(patch: pytest.MonkeyPatch, attention: Callable[..., Tensor] = plain_attention, mlp: Mlp = plain_mlp) -> None:
    """In place of Triton's kernels, which need a GPU: functions of the plain ones and what these take."""

    def attend(qkv: Tensor, bias: Tensor, mask_GNN: Tensor | None, window: int, shift: int, kernel: Any) -> Tensor:
        plain = partial(attend_windows, window=window, shift=shift, kernel="matmul")
        return attention(plain, qkv, bias, mask_GNN) if kernel == "triton" else plain(qkv, bias, mask_GNN)

    patch.setattr(kernels, "CLIPS", 2)
    patch.setattr(kernels, "attend_windows", attend)
    patch.setattr(mlp_triton, "triton_mlp", partial(mlp, kernels._plain_mlp))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_agrees_is_taken_where_it_is_left_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    seen = set()

    def attention(attend: Attend, qkv: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        seen.add((*qkv.shape[1:], len(bias), mask is not None, qkv.dtype))
        return attend(qkv, bias, mask)

    fake(monkeypatch, attention)
    chosen, blocks = choose(precision)
    assert chosen == {"attention": RIGHT, "mlp": RIGHT}
    # There is no kernel for MLPs of 16 channels.
    assert blocks == [("triton", "torch")] * 2 + [("triton", "triton")]
    assert capsys.readouterr().out == "kernels: attention triton; mlp triton\n"
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    assert seen == {(16, 16, 48, 2, shifted, dtype) for shifted in (False, True)} | {(8, 8, 96, 4, False, dtype)}
    assert choose(precision, attention="sdpa", mlp="torch") == ({}, [("sdpa", "torch")] * 3)
    chosen, blocks = choose(precision, attention="sdpa")
    assert (chosen, blocks[-1]) == ({"mlp": RIGHT}, ("sdpa", "triton"))
    assert capsys.readouterr().out == "kernels: mlp triton\n"


def with_another_gradient(tensor: Tensor) -> Tensor:
    """The tensor, with a gradient that is wrong by a tenth."""
    return tensor.detach() + 1.1 * (tensor - tensor.detach())


def with_another_k(qkv: Tensor) -> Tensor:
    q, k, v = qkv.chunk(3, dim=-1)
    return torch.cat([q, with_another_gradient(k), v], dim=-1)


def out_of_order(*_: Any) -> Tensor:
    raise RuntimeError("no such instruction\nat line 3")


def silent(*_: Any) -> Tensor:
    raise AssertionError


FAULTS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "output": (lambda run, qkv, *others: 1.1 * run(qkv, *others), "16×16×16, .*: its output is off by 0.1 of"),
    "NaN": (lambda run, qkv, *others: run(qkv, *others) * torch.nan, "its output is off by nan of"),
    "mask": (
        lambda run, qkv, bias, mask: run(qkv, bias, mask if mask is None else 0 * mask),
        "16×16×16, 2 heads, 8×8 windows, shift 4: its output is off by",
    ),
    "k": (lambda run, qkv, *others: run(with_another_k(qkv), *others), "its gradient of k is off by 0.1 of"),
    "bias": (
        lambda run, qkv, bias, mask: run(qkv, with_another_gradient(bias), mask),
        "its gradient of bias is off by 0.1 of",
    ),
    "raises": (out_of_order, "^rank 0: no such instruction$"),
    "raises without words": (silent, "^rank 0: AssertionError$"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_attention_costs_attention_and_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    attention, why = FAULTS[fault]
    fake(monkeypatch, attention)
    chosen, blocks = choose()
    problem = chosen["attention"]["problem"]
    assert chosen == {"attention": {"kernel": "sdpa", "problem": problem}, "mlp": RIGHT}
    assert blocks == [("sdpa", "torch")] * 2 + [("sdpa", "triton")]
    assert capsys.readouterr().out == f"kernels: attention sdpa (triton can't be taken, {problem}); mlp triton\n"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(problem)


@pytest.mark.parametrize("number", range(5))
def test_a_wrong_gradient_of_an_mlp_costs_the_mlps(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def mlp(plain: Mlp, *tensors: Tensor) -> Tensor:
        return plain(*(with_another_gradient(each) if n == number else each for n, each in enumerate(tensors)))

    fake(monkeypatch, mlp=mlp)
    chosen, blocks = choose()
    name = ("tokens", "weight 1", "bias 1", "weight 2", "bias 2")[number]
    assert str(chosen["mlp"]["problem"]).startswith(f"rank 0: 8×8×32: its gradient of {name} is off by 0.1 of")
    assert blocks == [("triton", "torch")] * 3


def test_without_a_gpu_the_real_kernels_are_not_taken() -> None:
    chosen, blocks = choose()
    assert all(each["problem"] and "\n" not in each["problem"] for each in chosen.values())
    assert blocks == [("sdpa", "torch")] * 3


def _choose_on_a_rank() -> tuple[dict[str, ChosenKernel], list[tuple[str, str]]]:
    """Attention fails on rank 1, the MLP on none."""
    with pytest.MonkeyPatch.context() as patch:
        fake(patch, out_of_order if rank() == 1 else plain_attention)
        return choose()


def test_ranks_take_the_same(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_choose_on_a_rank)
    assert first == second
    assert first[0] == {"attention": {"kernel": "sdpa", "problem": "rank 1: no such instruction"}, "mlp": RIGHT}
    assert first[1][-1] == ("sdpa", "triton")


@pytest.mark.end_to_end
def test_the_real_kernels_are_taken_under_tritons_interpreter() -> None:
    script = "from tests.engine.test_kernels import choose, kernels; kernels.CLIPS = 2; choose('bf16')"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.stdout == "kernels: attention triton; mlp triton\n", ended.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_real_kernels_are_taken_on_a_gpu(one_gpu: RankPool, precision: str) -> None:
    ((chosen, _),) = one_gpu.run(choose, precision, "cuda")
    assert chosen == {"attention": RIGHT, "mlp": RIGHT}


@pytest.mark.gpu
@pytest.mark.end_to_end
def test_a_run_on_a_gpu_says_and_records_its_kernels(write_run: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "clap_ds/bench.py", "--deepspeed_config", str(write_run())]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    assert "kernels: attention triton; mlp triton\n" in ended.stdout
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json"))
    assert summary["kernels"] == {"attention": RIGHT, "mlp": RIGHT}
