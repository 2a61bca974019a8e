"""`auto` is Triton on ranks where it is right; on others it is the other kernel, and why is said and recorded."""

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
from tests.processes import ROOT
from tests.rank_pool import RankPool

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RIGHT = ChosenKernel(kernel="triton", problem=None)
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {"bf16": {"enabled": False}}, "bf16": {}}
Blocks = list[tuple[str, str]]


def settings(precision: str = "fp32", **model: Any) -> RunSettings:
    content = micro_run(clap={"model": {"preset": "micro", **model}}, **PRECISIONS[precision])
    return RunSettings(Path("run.json"), ClapSettings.model_validate(content.pop("clap")), content)


def choose(precision: str = "fp32", **model: Any) -> tuple[dict[str, ChosenKernel], Blocks]:
    """What is chosen, and the attention and MLP that blocks have then."""
    run = settings(precision, **model)
    built = ClapModel(run.clap.preset(), **kernels.build_kernels(run, CPU))
    chosen = kernels.choose_kernels(run, built, CPU)
    return chosen, [(block.attention.kernel, block.mlp.kernel) for block in built.audio.blocks()]


def fake(patch: pytest.MonkeyPatch, part: str = "", wrong: Callable[..., Tensor] | None = None) -> None:
    """In place of Triton's kernels, which need a GPU, the plain ones; of one part what `wrong` makes of these and their
    inputs."""

    def attend(*tensors: Tensor, kernel: Any, **how: Any) -> Tensor:
        plain = partial(attend_windows, kernel="matmul", **how)
        return wrong(plain, *tensors) if wrong and kernel == "triton" and part == "attention" else plain(*tensors)

    patch.setattr(kernels, "CLIPS", 2)
    patch.setattr(kernels, "device_name", lambda device: f"GPU {rank()}")
    patch.setattr(kernels, "triton_lacks", lambda: "no C compiler" if part == "mlp" else "")
    patch.setattr(kernels, "attend_windows", attend)
    mlp = kernels._plain_mlp
    patch.setattr(mlp_triton, "triton_mlp", partial(wrong, mlp) if wrong and part == "mlp" else mlp)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_agrees_is_taken_where_it_is_left_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    seen = []

    def note(plain: Callable[..., Tensor], qkv: Tensor, bias: Tensor) -> Tensor:
        seen.append((plain.keywords["shift"], qkv.shape[-1], len(bias), qkv.dtype))  # type: ignore[attr-defined]
        return plain(qkv, bias)

    fake(monkeypatch, "attention", note)
    chosen, blocks = choose(precision)
    assert chosen == {"attention": RIGHT, "mlp": RIGHT}
    # There is no kernel for MLPs of 16 channels.
    assert blocks == [("triton", "torch"), ("triton", "torch"), ("triton", "triton")]
    assert capsys.readouterr().out == "kernels: attention triton; mlp triton\n"
    assert seen == [(4, 48, 2, kernels.DTYPES.get(precision, torch.float32))]
    assert choose(precision, attention="sdpa", mlp="torch") == ({}, [("sdpa", "torch")] * 3)


def wrong_gradient(number: int) -> Callable[..., Tensor]:
    """Of one input wrong by a tenth."""

    def run(plain: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        another = tensors[number].detach() + 1.1 * (tensors[number] - tensors[number].detach())
        return plain(*tensors[:number], another, *tensors[number + 1 :])

    return run


def fails(*_: Any) -> Tensor:
    raise RuntimeError("no such instruction\nat line 3")


FAULTS: list[tuple[str, Callable[..., Tensor], str]] = [
    ("attention", lambda plain, *tensors: torch.nan * plain(*tensors), "its output is off by nan of"),
    ("attention", wrong_gradient(1), "its gradient of bias is off by 0.1 of"),
    ("attention", fails, "no such instruction"),
    ("mlp", fails, "no C compiler"),
    ("mlp", lambda plain, *tensors: 1.1 * plain(*tensors), "its output is off by 0.1 of the largest value"),
    ("mlp", wrong_gradient(3), "its gradient of weight 2 is off by 0.1 of"),
]


@pytest.mark.parametrize(("part", "wrong", "why"), FAULTS, ids=[why for *_, why in FAULTS])
def test_a_fault_costs_its_kernel_and_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str, wrong: Any, why: str
) -> None:
    fake(monkeypatch, part, wrong)
    chosen, blocks = choose()
    problem = str(chosen[part]["problem"])
    assert problem.startswith(f"1 × GPU 0, first rank 0: {why}")
    otherwise = "matmul" if part == "attention" else "torch"  # on this device
    said, warning = capsys.readouterr().out.splitlines()
    assert f"{part} {otherwise}" in said
    assert warning == f"warning: {part} by a slower kernel than Triton's on {problem}"
    assert chosen == {"attention": RIGHT, "mlp": RIGHT, part: {"kernel": otherwise, "problem": problem}}
    assert blocks[-1] == (("matmul", "triton") if part == "attention" else ("triton", "torch"))


def _choose_on_a_rank() -> tuple[dict[str, ChosenKernel], Blocks]:
    """Attention fails on rank 1, the MLP on none."""
    with pytest.MonkeyPatch.context() as patch:
        fake(patch, "attention", fails if rank() == 1 else None)
        return choose()


def test_each_rank_takes_what_is_right_there(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_choose_on_a_rank)
    differs = ChosenKernel(kernel="matmul and triton", problem="1 × GPU 1, first rank 1: no such instruction")
    assert first[0] == {"attention": differs, "mlp": RIGHT}, "rank 0 records it"
    assert second[0]["attention"]["kernel"] == "matmul"
    assert (first[1][-1], second[1][-1]) == (("triton", "triton"), ("matmul", "triton"))


def test_what_a_model_is_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, attention in ((CPU, "matmul"), (CUDA, "sdpa")):
        assert kernels.build_kernels(settings(), device) == {"attention": attention, "mlp": "torch"}
    for field in kernels.FIELDS:
        asked = settings(**{field: "triton"})
        assert kernels.build_kernels(asked, CUDA)[field] == "triton"
        with pytest.raises(ValueError, match=rf"clap\.model\.{field}: 'triton' needs a GPU and the triton package"):
            kernels.build_kernels(asked, CPU)
    monkeypatch.setattr(kernels, "has_triton_package", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU and the triton"):
        kernels.build_kernels(asked, CUDA)


@pytest.mark.end_to_end
def test_the_real_kernels_are_taken_under_tritons_interpreter() -> None:
    script = "from tests.engine.test_kernels import choose, kernels; kernels.CLIPS = 2; choose('bf16')"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.stdout == "kernels: attention triton; mlp triton\n", ended.stderr
