"""Test `clap-ds plan`: consistent numbers, output and errors."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from clap_ds import plan
from clap_ds.config.model import load_preset
from clap_ds.flop_count.device_specs import gpu_named
from clap_ds.planning import prediction
from clap_ds.planning.communication import Cluster, Traffic, all_reduce_s
from clap_ds.planning.prediction import GIB
from clap_ds.planning.roofline import ESTIMATES
from clap_ds.utils.errors import UserError
from tests.processes import ROOT

WriteRun = Callable[..., Path]
PlanRun = Callable[..., dict[str, Any]]


@pytest.fixture
def plan_run(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> PlanRun:
    """Return a function that plans a changed micro run, and returns the JSON report."""

    def run(options: str, compiled: str = "off", **changes: Any) -> dict[str, Any]:
        path = write_run(clap={"compile": compiled}, **changes)
        plan.main(["--config", str(path), "--gpu", "h100-sxm", "--json", "-", *options.split()])
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    return run


def test_ramp_prints_the_nodes_that_can_share_each_batch(write_run, capsys):
    path = write_run(clap={"train": {"max_samples": 99, "batch_ramp": [[0, 24], [480, 64]]}})
    plan.main(["--config", str(path), "--gpu", "h100-sxm", "--gpus_per_node", "2", "--ramp"])
    rows = [re.findall(r"[\d–]+", line) for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["0", "24", "3", "6", "12"], ["480", "64", "8", "16", "32"]]


def test_report_is_consistent_and_printed(plan_run, monkeypatch):
    # Tested in test_inductor.py.
    monkeypatch.setattr(prediction, "compiled_kernels", lambda *_: [])
    # Tested in test_prediction.py; each of its tries records a step.
    monkeypatch.setattr(prediction, "largest_micro_batch", lambda *_: 8)
    options = "--nodes 4 1 --gpus_per_node 2 --find_micro_batch --samples 1e6"
    report = plan_run(options, "towers", gradient_accumulation_steps=2)
    assert report["predicted"] is report["fits"] is True
    assert report["largest_micro_batch"] == 8
    assert report["peak_memory_gib"] == pytest.approx(sum(report["memory_gib"].values()))
    step_s = report["step_s"]
    part_s = [estimates["middle"] for part, estimates in step_s.items() if part != "step"]
    assert sum(part_s) == pytest.approx(step_s["step"]["middle"])
    # Two micro-batches of 4.
    rate = report["samples_per_s_per_gpu"]["middle"]
    assert rate == pytest.approx(2 * 4 / step_s["step"]["middle"])
    small, large = report["scales"]
    assert (small["nodes"], small["gpus"], large["nodes"], large["gpus"]) == (1, 2, 4, 8)
    small_rate, large_rate = (
        scale["samples_per_s_per_gpu"]["middle"] for scale in report["scales"]
    )
    assert large["efficiency_percent"] == pytest.approx(100 * large_rate / small_rate)
    assert large["gpu_hours"] == pytest.approx(8 * large["hours"])
    assert large["gpu_hours"] == pytest.approx(1e6 / large_rate / 3600)

    step_s["step"] = {"low": 0.3, "middle": 0.2, "high": 0.1}
    printed = re.sub(" +", " ", plan.render(report))
    for text in (
        "## Predicted, not measured: micro on h100-sxm, bf16, micro-batch 4, 16 text tokens",
        f"8 GPUs: **fits**, {report['peak_memory_gib']:.1f} of",
        "peak memory, 8 GPUs |",
        "\n2 GPUs: **",
        "step, 2 GPUs | ms at low efficiency | middle | high |",
        "| step | 300.0 | 200.0 | 100.0 |",
        f"| 4 | 8 | {large_rate:,.0f} | {large['efficiency_percent']:.1f} |",
    ):
        assert text in printed
    assert "does NOT fit" in plan.render({**report, "fits": False})


def test_memory_grows_with_ranks_and_is_compared_with_the_gpus(plan_run, monkeypatch):
    num_ranks = 8192
    many = plan_run(f"--gpus_per_node 1 --nodes 1 {num_ranks}")
    assert many["fits"] is True
    # Less than CUDA's context.
    small_gpu = replace(gpu_named("h100-sxm"), memory_gib=0.5)
    monkeypatch.setattr(plan, "gpu_named", lambda _: small_gpu)
    alone = plan_run("--gpus_per_node 1")
    assert alone["fits"] is False
    alone_gib = alone["memory_gib"]
    many_gib = many["memory_gib"]
    libraries = "context and libraries (assumed)"
    assert many_gib[libraries] > alone_gib[libraries]
    # Features of all ranks in bf16, and similarities of this rank's with all in fp32.
    batch = 4
    joint_dim = load_preset("micro").joint_dim
    assert many_gib["text activations"] * GIB > num_ranks * batch * joint_dim * 2
    similarity_bytes = batch * batch * num_ranks * 4
    assert many_gib["loss"] * GIB > similarity_bytes > alone_gib["loss"] * GIB


ARGUMENTS = argparse.Namespace(gpus_per_node=4, samples=None, network_gbytes_per_s=50.0)
NOTHING_SENT = Traffic(0.0, 0.0, 0.0, 0.0, 1, 0.0, 0.0)


def make_prediction(step_s: float, traffic: Traffic = NOTHING_SENT) -> dict[str, Any]:
    """Return a prediction whose loss takes 1 ms on the smallest scale and 9 ms on the largest."""
    return {
        "step_s": {
            "step": dict.fromkeys(ESTIMATES, step_s),
            "loss": dict.fromkeys(ESTIMATES, 0.001),
        },
        "largest_loss_s": dict.fromkeys(ESTIMATES, 0.009),
        "traffic": asdict(traffic),
    }


def test_a_step_grows_by_communication_and_by_the_loss_over_more_samples():
    traffic = replace(NOTHING_SENT, gradient_bytes=1e9, last_gradient_bytes=1e9)
    gpu = gpu_named("h100-sxm")
    rows = plan.predict_scales(4, make_prediction(0.1, traffic), gpu, [1, 3, 5], ARGUMENTS)
    growths_s = [row["added_s"]["loss over more samples"] for row in rows]
    assert growths_s == pytest.approx([0.0, 0.004, 0.008])
    for row in rows:
        cluster = Cluster(row["nodes"], 4, gpu.link_gbytes_per_s, 50.0)
        gradients_s = all_reduce_s(1e9, cluster, 0.85)
        assert row["added_s"]["gradients"] == pytest.approx(gradients_s, abs=1e-4)
        step_s = 0.1 + sum(row["added_s"].values())
        assert row["samples_per_s_per_gpu"]["middle"] == pytest.approx(4 / step_s)
        assert row["samples_per_s"] == pytest.approx(row["gpus"] * 4 / step_s)
    first, _, last = (row["samples_per_s_per_gpu"]["middle"] for row in rows)
    assert rows[2]["efficiency_percent"] == pytest.approx(100 * last / first)


def test_range_of_efficiency_ends_at_the_published_jitter():
    # The step of the published runs on one node, so that both kinds of growth are theirs.
    prediction = make_prediction(616 / 623.7)
    gpu = gpu_named("gh200")
    _, row = plan.predict_scales(616, prediction, gpu, [1, 128], ARGUMENTS)
    low, high = row["efficiency_percent_range"]
    # Published: 87.3%; the law is fitted to all scales.
    assert low == pytest.approx(87.3, abs=1.5)
    assert high > row["efficiency_percent"] - 0.1 > 98
    rates = row["samples_per_s_per_gpu"]
    assert rates["low"] == pytest.approx(544.6, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [("--gpu h100-sxn", "did you mean 'h100-sxm'"), ("--nodes 1 2", "train_batch_size")],
)
def test_mistakes_are_user_errors(write_run, options, message):
    # On four GPUs, two passes per step.
    path = write_run(train_batch_size=32, gradient_accumulation_steps=None)
    with pytest.raises(UserError, match=message):
        plan.main(["--config", str(path), "--gpu", "h200", *options.split()])


def test_gpus_in_docs_and_help_are_known():
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    names = {*re.findall(r"--gpu ([a-z][\w-]*)", "\n".join([*texts, plan.__doc__ or ""]))}
    assert len(names) > 3
    for name in names:
        gpu_named(name)
