"""The command: what it prints, that its numbers hang together, and what it refuses."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds import plan
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.flop_count.analytic import TextLengths, backward_flops, forward_flops
from clap_ds.planning.step import trace_step

WriteRun = Callable[..., Path]


def _report(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    plan.main(["--deepspeed_config", str(path), "--gpu", "h100-sxm", "--json", *options])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_hangs_together(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "4", "1", "--gpus_per_node", "2", "--find_micro_batch", "--samples", "1e6"]
    options += ["--price_per_gpu_hour", "2"]
    path = write_run(gradient_accumulation_steps=None)
    report = _report(path, capsys, *options)
    assert report["predicted"] is report["fits"] is True
    assert report["peak_memory_gib"] == pytest.approx(sum(report["memory_gib"].values()))
    rates = report["samples_per_s_per_gpu"]
    assert rates["low"] < rates["middle"] < rates["high"]
    assert rates["middle"] == pytest.approx(4 / report["step_s"]["step"]["middle"])
    first, last = report["scales"]
    assert (first["nodes"], first["gpus"], first["efficiency_percent"]) == (1, 2, 100)
    assert (last["nodes"], last["gpus"]) == (4, 8)
    assert 0 < last["efficiency_percent"] < 100
    assert last["gpu_hours"] == pytest.approx(1e6 / last["samples_per_s_per_gpu"]["middle"] / 3600)
    assert last["money"] == pytest.approx(2 * last["gpu_hours"])
    assert report["largest_micro_batch"] % 8 == 0
    assert first["samples_per_s"] == pytest.approx(2 * first["samples_per_s_per_gpu"]["middle"])
    by_nodes = [each["samples_per_s_per_gpu"]["middle"] for each in (first, last)]
    assert last["efficiency_percent"] == pytest.approx(100 * by_nodes[1] / by_nodes[0])
    assert (report["attention"], report["mlp"], report["compile"]) == ("sdpa", "torch", "off")
    config, lengths = load_preset("micro"), TextLengths.fixed(16)
    done = 4 * (forward_flops(config, lengths, "model") + backward_flops(config, lengths)) / 1e12
    assert done < report["tflop"] < 1.1 * done  # fused attention computes its scores again; and the loss
    recorded = trace_step(load_run(path), 4, world_size=2).recorded
    found = [report[name] for name in ("kernels", "gigabytes_moved")]
    assert found == pytest.approx([recorded.total("launches"), recorded.total("bytes_moved") / 1e9])
    assert sum(each["middle"] for part, each in report["step_s"].items() if part != "step") == pytest.approx(
        report["step_s"]["step"]["middle"]
    )
    _check_printed(report, plan.render(report))


def _check_printed(report: dict[str, Any], printed: str) -> None:
    for part, gib in report["memory_gib"].items():
        assert gib < 0.005 or re.search(rf"\| +{re.escape(part)} \| +{gib:.2f} \|", printed), part
    for part, seconds in report["step_s"].items():
        times = " \\| +".join(f"{1000 * seconds[case]:.1f}" for case in ("high", "middle", "low"))
        assert re.search(rf"\| +{part} \| +{times} \|", printed), part
    for each in report["scales"]:
        rate, efficiency = each["samples_per_s_per_gpu"]["middle"], each["efficiency_percent"]
        cells = (each["nodes"], each["gpus"], f"{rate:,.0f}", f"{efficiency:.1f}")
        assert re.search("\\| +" + " \\| +".join(map(str, cells)) + " \\|", printed)
    assert f"{report['peak_memory_gib']:.1f} of {report['device_memory_gib']:.1f} GiB" in printed
    assert f"**{report['samples_per_s_per_gpu']['middle']:,.0f} samples/s/GPU**" in printed


def test_what_is_printed_names_itself_a_prediction(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "gh200", "--text_tokens", "8", "--micro_batch", "16", "--audio", "mel"]
    plan.main(["--deepspeed_config", str(write_run(train_batch_size=16)), *options])
    printed = capsys.readouterr().out
    run = "micro on gh200, bf16, micro-batch 16, 8 text tokens, padded, fed log-mel features"
    assert printed.startswith(f"## Predicted, nothing measured: {run}")
    assert "**fits**" in printed
    assert "Assumed:" in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "h100-sxn"], "did you mean 'h100-sxm'"),
        (["--text_tokens", "100"], "--text_tokens 100: micro has positions for 64"),
        (["--nodes", "1", "2"], "train_batch_size 32 holds at one scale, --nodes gives 2;"),
        (["--nodes", "1000000"], "up to 65,536 GPUs, found 4,000,000"),
        (["--price_per_gpu_hour", "2"], "needs --samples"),
    ],
)
def test_mistakes_are_said(write_run: WriteRun, options: list[str], said: str) -> None:
    whole = {"train_batch_size": 32, "gradient_accumulation_steps": None}  # on four GPUs two passes a step
    with pytest.raises(UserError, match=said):
        plan.main(["--deepspeed_config", str(write_run(**whole)), "--gpu", "h200", *options])
