"""The command: what it prints, that its numbers hang together, and what it refuses."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from clap_ds import plan
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.flop_count.analytic import TextLengths, backward_flops, forward_flops
from clap_ds.planning.step import trace_step

WriteRun = Callable[..., Path]


def test_a_plan_hangs_together(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(gradient_accumulation_steps=None, clap={"compile": "off"})
    options = (
        "--gpu h100-sxm --json --nodes 4 1 --gpus_per_node 2 --find_micro_batch --samples 1e6 --price_per_gpu_hour 2"
    )
    plan.main(["--deepspeed_config", str(path), *options.split()])
    report = json.loads(capsys.readouterr().out)
    assert report["predicted"] is report["fits"] is True
    assert report["peak_memory_gib"] == pytest.approx(sum(report["memory_gib"].values()))
    rates, step_s = report["samples_per_s_per_gpu"], report["step_s"]
    assert rates["low"] < rates["middle"] < rates["high"]
    assert rates["middle"] == pytest.approx(4 / step_s["step"]["middle"])
    assert sum(each["middle"] for each in step_s.values()) == pytest.approx(2 * step_s["step"]["middle"])
    assert sum(each["kernels_s"] for each in report["classes"].values()) <= step_s["step"]["middle"]
    first, last = report["scales"]
    assert (first["nodes"], first["gpus"], first["efficiency_percent"]) == (1, 2, pytest.approx(100))
    assert (last["nodes"], last["gpus"]) == (4, 8)
    by_nodes = [each["samples_per_s_per_gpu"]["middle"] for each in (first, last)]
    assert last["efficiency_percent"] == pytest.approx(100 * by_nodes[1] / by_nodes[0])
    assert last["efficiency_percent_range"][0] < last["efficiency_percent"] < last["efficiency_percent_range"][1] < 100
    assert last["samples_per_s"] == pytest.approx(8 * by_nodes[1])
    assert last["gpu_hours"] == pytest.approx(8 * last["hours"]) == pytest.approx(1e6 / by_nodes[1] / 3600)
    assert last["money"] == pytest.approx(2 * last["gpu_hours"])
    assert report["largest_micro_batch"] % 8 == 0
    config, lengths = load_preset("micro"), TextLengths.fixed(16)
    done = 4 * (forward_flops(config, lengths, "model") + backward_flops(config, lengths)) / 1e12
    assert done < report["tflop"] < 1.1 * done  # fused attention computes its scores again; and the loss
    recorded = trace_step(load_run(path), 4, world_size=2).recorded
    found = [report[name] for name in ("kernels", "gigabytes_moved")]
    assert found == pytest.approx([recorded.total("launches"), recorded.total("bytes_moved") / 1e9])

    printed = re.sub(" +", " ", plan.render(report))
    for part, gib in report["memory_gib"].items():
        assert gib < 0.005 or f"| {part} | {gib:.2f} |" in printed, part
    for part, seconds in step_s.items():
        times = " | ".join(f"{1000 * seconds[case]:.1f}" for case in ("high", "middle", "low"))
        assert f"| {part} | {times} |" in printed, part
    for each, rate in zip(report["scales"], by_nodes, strict=True):
        assert f"| {each['nodes']} | {each['gpus']} | {rate:,.0f} | {each['efficiency_percent']:.1f} |" in printed
    assert f"{report['peak_memory_gib']:.1f} of {report['device_memory_gib']:.1f} GiB" in printed
    assert f"**{rates['middle']:,.0f} samples/s/GPU**" in printed


def test_what_is_printed_names_itself_a_prediction(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "gh200", "--text_tokens", "8", "--micro_batch", "16"]
    model = {"preset": "micro", "attention": "sdpa", "mlp": "torch"}
    plan.main(["--deepspeed_config", str(write_run(train_batch_size=16, clap={"model": model})), *options])
    printed = capsys.readouterr().out
    run = "micro on gh200, bf16, micro-batch 16, 8 text tokens, padded\n\nsdpa attention, torch MLPs, compile towers: **fits**"
    assert printed.startswith(f"## Predicted, nothing measured: {run}")
    assert "Assumed:" in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpu h100-sxn", "did you mean 'h100-sxm'"),
        ("--text_tokens 100", "--text_tokens 100: micro has positions for 64"),
        ("--nodes 1 2", "train_batch_size 32 holds at one scale, --nodes gives 2;"),
        ("--nodes 1000000", "up to 65,536 GPUs, found 4,000,000"),
        ("--price_per_gpu_hour 2", "needs --samples"),
    ],
)
def test_mistakes_are_said(write_run: WriteRun, options: str, said: str) -> None:
    whole = {"train_batch_size": 32, "gradient_accumulation_steps": None}  # on four GPUs two passes a step
    with pytest.raises(UserError, match=said):
        plan.main(["--deepspeed_config", str(write_run(**whole)), "--gpu", "h200", *options.split()])
