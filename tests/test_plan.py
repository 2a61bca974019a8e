"""Test `clap-ds plan`: consistent numbers, output and errors."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from clap_ds import plan
from clap_ds.config.model import load_preset
from clap_ds.flop_count.analytic import TextLengths, backward_flops, forward_flops
from clap_ds.flop_count.device_specs import gpu_named
from clap_ds.planning.step import GIB
from clap_ds.planning.tracing import Operation
from clap_ds.utils.errors import UserError

WriteRun = Callable[..., Path]


@pytest.fixture
def planned(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(options: str, compiled: str = "off", **changes: Any) -> Any:
        path = write_run(clap={"compile": compiled}, **changes)
        plan.main(
            ["--deepspeed_config", str(path), "--gpu", "h100-sxm", "--json", "-", *options.split()]
        )
        return json.loads(capsys.readouterr().out)

    return run


def test_a_ramp_states_how_many_nodes_each_batch_can_use(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(clap={"train": {"max_samples": 99, "batch_ramp": [[0, 24], [480, 64]]}})
    plan.main(
        ["--deepspeed_config", str(path), "--gpu", "h100-sxm", "--gpus_per_node", "2", "--ramp"]
    )
    rows = [re.findall(r"[\d–]+", line) for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["0", "24", "3", "6", "12"], ["480", "64", "8", "16", "32"]]


def test_a_plan_hangs_together(
    planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = mock.Mock(return_value=[])
    monkeypatch.setattr(
        "clap_ds.planning.step.compiled_kernels", compiled
    )  # tested in test_inductor.py
    options = "--nodes 4 1 --gpus_per_node 2 --find_micro_batch --samples 1e6"
    report = planned(options, "towers", gradient_accumulation_steps=None)
    compiled.assert_called_once()
    assert report["predicted"] is report["fits"] is True
    assert report["peak_memory_gib"] == pytest.approx(sum(report["memory_gib"].values()))
    step_s = report["step_s"]
    assert sum(each["middle"] for each in step_s.values()) == pytest.approx(
        2 * step_s["step"]["middle"]
    )
    first, last = report["scales"]
    assert (first["nodes"], first["gpus"], last["nodes"], last["gpus"]) == (1, 2, 4, 8)
    by_nodes = [each["samples_per_s_per_gpu"]["middle"] for each in (first, last)]
    assert last["efficiency_percent"] == pytest.approx(100 * by_nodes[1] / by_nodes[0])
    assert (
        last["gpu_hours"]
        == pytest.approx(8 * last["hours"])
        == pytest.approx(1e6 / by_nodes[1] / 3600)
    )
    assert report["largest_micro_batch"] % 8 == 0
    printed = re.sub(" +", " ", plan.render(report))
    assert printed.startswith(
        "## Predicted, not measured: micro on h100-sxm, bf16, micro-batch 4, 16 text tokens"
    )
    said = (
        f"8 GPUs: **fits**, {report['peak_memory_gib']:.1f} of",
        "peak memory, 8 GPUs |",
        "\n2 GPUs: **",
        "step, 2 GPUs |",
    )
    assert all(each in printed for each in said)
    for part, seconds in step_s.items():
        assert (
            f"| {part} | {' | '.join(f'{1000 * each:.1f}' for each in seconds.values())} |"
            in printed
        )
    for each, rate in zip(report["scales"], by_nodes, strict=True):
        assert (
            f"| {each['nodes']} | {each['gpus']} | {rate:,.0f} | {each['efficiency_percent']:.1f} |"
            in printed
        )
    step_s["step"] = {"low": 0.3, "middle": 0.2, "high": 0.1}
    printed = re.sub(" +", " ", plan.render({**report, "fits": False}))
    assert "does NOT fit" in printed
    assert "| ms at low efficiency | middle | high |" in printed
    assert "| step | 300.0 | 200.0 | 100.0 |" in printed


def test_accumulation_and_scale_count_where_they_should(planned: Callable[..., Any]) -> None:
    alone = "--gpus_per_node 1 --nodes 1"
    ranks = 8192
    plain, many = (
        planned(f"{alone} {ranks}", gradient_accumulation_steps=number) for number in (1, 4)
    )
    config = load_preset("micro")
    lengths = TextLengths.fixed(16)
    done = (
        4 * 4 * (forward_flops(config, lengths, "model") + backward_flops(config, lengths)) / 1e12
    )
    assert many["tflop"] == pytest.approx(4 * plain["tflop"])
    assert done < many["tflop"] < 1.1 * done  # fused attention and the loss recompute scores
    assert many["parameters"] == plain["parameters"] == 64_601
    audio, update = (
        [report["step_s"][part]["middle"] for report in (many, plain)]
        for part in ("audio forward", "optimizer")
    )
    assert (audio[0], update[0]) == pytest.approx((4 * audio[1], update[1]), rel=0.1)
    for report, samples in ((plain, 4), (many, 16)):
        for case, rate in report["samples_per_s_per_gpu"].items():
            assert rate == pytest.approx(samples / report["step_s"]["step"][case])
            assert report["scales"][0]["samples_per_s_per_gpu"][case] == pytest.approx(rate)
    small_gpu = replace(gpu_named("h100-sxm"), memory_gib=0.5)  # less than CUDA's context
    with mock.patch.object(plan, "gpu_named", return_value=small_gpu):
        on_small_gpu = planned(alone)
    assert plain["fits"] is True
    assert on_small_gpu["fits"] is False
    own, among = (report["memory_gib"] for report in (on_small_gpu, plain))
    assert among["context and libraries (assumed)"] > own["context and libraries (assumed)"]
    assert (
        among["text activations"] * GIB > ranks * 4 * config.joint_dim * 2
    )  # features of all ranks, in bf16
    assert (
        among["loss"] * GIB > 4 * 4 * ranks * 4 > own["loss"] * GIB
    )  # similarities of this rank's with all, in fp32


def test_a_step_counts_each_operation_as_often_as_it_is_done() -> None:
    """A million rows times a 512 × 512 matrix: at 73% of 989 TFLOPS the product takes 0.726 ms."""
    shapes = ((10**6, 512), (512, 512))
    product = Operation(
        "aten.mm", "audio", False, 2 * 512**2 * 10**6, 10**9, torch.bfloat16, shapes
    )
    step = mock.Mock(num_samples=1, **{"work.return_value": [(product, 3.0)]})
    found = plan._speed(step, gpu_named("h100-sxm"), [])
    assert found["tflop"] == pytest.approx(1.572864)
    assert "wide product 66–80% (2 ms; " in "".join(
        plan._assumed(gpu_named("h100-sxm"), found["classes"])
    )


def test_ranges_have_every_step_time_with_either_growth() -> None:
    """Short steps lose least if the loss is a fraction of their time, long ones if it is
    constant."""
    arguments = argparse.Namespace(gpus_per_node=4, samples=None)
    times = [{"low": 1.2 * each, "middle": each, "high": 0.8 * each} for each in (1e-3, 1e3)]
    (_, short), (_, long) = (plan._scales(4, step_s, [1, 64], arguments) for step_s in times)
    ends = [each["efficiency_percent_range"] for each in (short, long)]
    assert ends[0][1] == pytest.approx(ends[1][0])  # of every step that grows by the same fraction
    grown_s = 4 / short["samples_per_s_per_gpu"]["low"] - times[0]["low"]
    assert ends[0][0] == pytest.approx(100 * times[0]["high"] / (times[0]["high"] + grown_s))
    assert ends[1][1] == pytest.approx(100 * times[1]["low"] / (times[1]["low"] + grown_s))
    assert short["efficiency_percent_range"][1] < 100


def test_the_middle_grows_by_half_the_seconds_and_half_the_share() -> None:
    """Without uncertainty of the step's time, the range is that of either growth."""
    step_s = dict.fromkeys(("low", "middle", "high"), 0.15)
    _, row = plan._scales(616, step_s, [1, 64], argparse.Namespace(gpus_per_node=4, samples=None))
    rates = row["samples_per_s_per_gpu"]
    assert rates["low"] < 0.9 * rates["high"]
    assert 1 / rates["middle"] == pytest.approx((1 / rates["low"] + 1 / rates["high"]) / 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [("--gpu h100-sxn", "did you mean 'h100-sxm'"), ("--nodes 1 2", "train_batch_size")],
)
def test_mistakes_are_said(write_run: WriteRun, options: str, said: str) -> None:
    whole = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": None,
    }  # on four GPUs, two passes per step
    with pytest.raises(UserError, match=said):
        plan.main(
            ["--deepspeed_config", str(write_run(**whole)), "--gpu", "h200", *options.split()]
        )


def test_gpus_that_pages_and_help_name_are_known() -> None:
    root = Path(__file__).resolve().parents[1]
    texts = [page.read_text(encoding="utf-8") for page in (root / "docs").glob("*.md")]
    names = {
        name
        for text in [*texts, plan.__doc__ or ""]
        for name in re.findall(r"--gpu ([a-z][\w-]*)", text)
    }
    assert len(names) > 3
    assert all(gpu_named(name) for name in names)
