"""The bench command under every launcher, on synthetic and real audio, and with errors."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clap_ds.analysis.runs import read_runs
from clap_ds.config.model import load_preset
from clap_ds.flop_count.analytic import published_flops
from tests.analysis.samples import given, write
from tests.processes import ROOT, TIMEOUT_S, run
from tests.rank_pool import free_port
from tests.training.training_commands import deepspeed_launcher, environment

BENCH = "clap_ds/bench.py"
WriteRun = Callable[..., Path]
pytestmark = pytest.mark.end_to_end


def _bench(config: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    """Run on one rank forked here, or with a launcher."""
    arguments = [BENCH, "--deepspeed_config", str(config)]
    seen = environment()
    if not launcher:
        return run(arguments, env=seen)
    (compiler := config.parent / "g++").write_text(
        '#!/bin/sh\nexec c++ "$@" -O0 -g0\n'
    )  # half a minute less
    compiler.chmod(0o755)
    seen["CXX"] = str(compiler)
    return subprocess.run(
        [*launcher, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=seen,
    )


def _run_directory(config: Path) -> Path:
    (directory,) = (config.parent / "runs").iterdir()
    return directory


def _summary(config: Path) -> dict[str, Any]:
    return dict(json.loads((_run_directory(config) / "summary.json").read_text()))


def test_torchrun_leaves_the_steps_that_it_prints(write_run: WriteRun) -> None:
    protocol = {"warmup_steps": 1, "windows": 2, "steps_per_window": 2, "breakdown_steps": 3}
    config = write_run(log_level="info", steps_per_print=1, clap={"bench": protocol})
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    result = _bench(config, sys.executable, *torchrun)
    assert result.returncode == 0, result.stderr
    assert "samples/s" in result.stdout
    summary = _summary(config)
    directory = _run_directory(config)
    assert (summary["state"], summary["world_size"], summary["global_batch"]) == ("completed", 2, 8)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    phases = [
        (1, "warmup"),
        *((n, "timed") for n in range(2, 6)),
        *((n, "breakdown") for n in range(7, 10)),
    ]
    assert [(line["step"], line["phase"]) for line in lines] == phases
    assert summary["samples_per_s"] == pytest.approx(
        32 / sum(line["window_s"] for line in lines[1:5:2])
    )
    parts = summary["breakdown_s"].values()
    assert all(
        f"{1000 * part_s:,.1f} ms  {100 * part_s / sum(parts):5.1f}%" in result.stdout
        for part_s in parts
    )
    (run,) = read_runs([write(config.parent / "terminal.log", result.stdout)], given(rate="engine"))
    assert (run.model, run.gpus, run.batch_per_gpu, run.context_length) == ("micro", 2, 4, 16)
    tflop = summary["achieved_tflops"] / summary["samples_per_s_per_gpu"]["mean"]
    assert run.achieved_tflops == pytest.approx(tflop * (run.rate or 0))
    assert json.loads((directory / "environment.json").read_text())["gpus_per_node"] == [2]


def test_deepspeeds_own_from_end_to_end(tmp_path: Path) -> None:
    """The packaged configuration with a smaller model: its optimizer, all-reduce, timers, monitor
    and profiler."""
    run = json.loads((ROOT / "ds_configs/htsat_tiny_deepspeed.json").read_text())
    run |= {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 1,
    }
    run["clap"]["model"]["preset"], run["clap"]["context_length"] = "micro", 16
    run["clap"]["bench"] = {
        "warmup_steps": 1,
        "windows": 2,
        "steps_per_window": 1,
        "breakdown_steps": 1,
    }
    run["clap"] |= {"output": {"dir": str(tmp_path / "runs")}, "hardware": {"peak_tflops": 3.0}}
    optimizer = "FusedAdam"
    if (
        " " in torch.__file__
    ):  # torch's linker line doesn't quote its own folder, so DeepSpeed can't compile there
        optimizer, run["clap"]["optimizer_implementation"] = "FlatAdamW", "torch"
    (config := tmp_path / "run.json").write_text(
        json.dumps(run | {"comms_logger": {"enabled": True}})
    )
    result = _bench(config, *deepspeed_launcher())
    assert result.returncode == 0, result.stdout + result.stderr
    directory = _run_directory(config)
    summary = _summary(config)
    log, report = ((directory / name).read_text() for name in ("rank0.log", "flops_profile.txt"))
    assert f"DeepSpeed Basic Optimizer = {optimizer}" in log
    assert (
        f"published convention: profiled {published_flops(load_preset('micro')) / 1e9:.2f}" in log
    )
    for text in (result.stdout, log):
        assert text.count("DeepSpeed Flops Profiler ----") == text.count(report) == 1
        assert text.count("time (ms) | fwd: ") == 5  # every step
        assert len(re.findall(r"all_reduce\s+", text)) == 1
    flops = summary["flops"]
    assert flops["deepspeed_gflops"] == pytest.approx(flops["model_gflops"], rel=1e-9)
    rate_tflops = flops["training_gflops"] * summary["samples_per_s_per_gpu"]["mean"] / 1e3
    assert summary["mfu_model_percent"] == pytest.approx(100 * rate_tflops / 3.0)
    assert "MFU (executed FLOPs)" in result.stdout
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("Train/Samples/lr")] == [16, 32, 48, 64, 80]
    assert "Train/Samples/elapsed_time_ms_forward" in events.Tags()["scalars"]


def test_exhausted_memory_is_recorded_with_the_micro_batch(write_run: WriteRun) -> None:
    config = write_run(train_micro_batch_size_per_gpu=10**12)
    assert _bench(config).returncode == 2
    assert _summary(config)["state"] == "out_of_memory"
    assert f"micro-batch {10**12}" in _summary(config)["error"]


LIMITED = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, (16 * 10**9, -1))
sys.argv = ["{BENCH}", *sys.argv[1:]]
runpy.run_path("{BENCH}", run_name="__main__")
"""


def test_the_benchmark_of_a_gpu_is_refused_where_there_is_none_before_it_allocates(
    tmp_path: Path,
) -> None:
    content = json.loads((ROOT / "ds_configs" / "htsat_tiny.json").read_text())
    content["clap"]["output"] = {"dir": str(tmp_path / "runs")}
    (tmp_path / "run.json").write_text(json.dumps(content))
    without_gpu = {name: value for name, value in environment().items() if name != "DS_ACCELERATOR"}
    done = run(
        ["-c", LIMITED, "--deepspeed_config", tmp_path / "run.json"],
        env={**without_gpu, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (done.returncode, done.stderr.count("error:")) == (2, 1), done.stderr
    assert "no GPU: 1 CPU rank (CUDA_VISIBLE_DEVICES" in done.stdout
    for part in ("micro-batch 616", "htsat_tiny_cpu"):
        assert part in done.stderr
    assert "find_micro_batch" not in done.stderr
    assert _summary(tmp_path / "run.json")["state"] == "out_of_memory"
