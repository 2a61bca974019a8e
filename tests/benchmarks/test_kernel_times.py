from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import kernel_times
from benchmarks.kernel_times import Case, attention_cases, measure, mlp_cases
from clap_ds.config.model import AudioConfig, load_preset


def broken(*_: Tensor) -> Tensor:
    raise RuntimeError("no kernel image\nfor this device")


def test_wrong_and_failing_kernels_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "median_ms", lambda function: float(function() is not None))
    shapes = [(6, 8, 16), (32, 16)]
    flops = (1.0, 2.0)
    case = partial(Case, "linear", "16", torchs=F.linear, shapes=shapes, moved=flops, flops=flops)
    forward, backward = measure(case(ours=F.linear))
    assert (forward["pass"], backward["flops"]) == ("forward", 2.0)
    assert 0 < forward["error"] == forward["torch_error"] < 0.01
    assert forward["ms"] == backward["torch_ms"] == 1
    assert next(measure(case(ours=lambda x, w: 1.5 * F.linear(x, w))))["error"] > 0.3
    assert next(measure(case(ours=broken)))["note"] == "no kernel image"


def test_rows_before_a_case_that_ends_the_command_are_kept_and_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*_: Tensor) -> Tensor:
        raise SystemExit(143)

    case = Case("linear", "16", F.linear, F.linear, [(6, 8, 16), (32, 16)], (1.0, 2.0), (1.0, 2.0))
    monkeypatch.setattr(
        kernel_times, "text_cases", lambda _: [case, case._replace(kernel="ends", ours=end)]
    )
    for name in ("attention_cases", "mlp_cases"):
        monkeypatch.setattr(kernel_times, name, lambda *_: [])
    monkeypatch.setattr(kernel_times, "median_ms", lambda function: float(function() is not None))
    monkeypatch.setattr(kernel_times, "peaks", lambda: (1e12, 1e15))
    monkeypatch.setattr(torch, "set_default_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(SystemExit):
        kernel_times.main(["--output", str(tmp_path / "kernels.md")])
    for text in (capsys.readouterr().out, (tmp_path / "kernels.md").read_text()):
        assert text.count("linear") == 2


@pytest.mark.parametrize("cases", [attention_cases, mlp_cases])
def test_flops_are_those_of_torchs_operations(
    cases: Callable[[AudioConfig, int], Iterator[Case]],
) -> None:
    case = next(cases(load_preset("htsat_tiny_roberta_base").audio, 1))
    inputs = [torch.ones(shape) for shape in case.shapes]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        case.torchs(*inputs)
    # A kernel's backward pass computes twice the forward pass, and one product of it again.
    assert (counter.get_total_flops(), 2.5 * counter.get_total_flops()) == case.flops
