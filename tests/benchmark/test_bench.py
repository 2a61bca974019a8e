"""The bench command under every launcher, on synthetic and real audio, and with errors."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from clap_ds.config.model import load_preset
from clap_ds.flop_count.analytic import published_flops
from tests.processes import ROOT, TIMEOUT_S, run
from tests.rank_pool import free_port
from tests.training.training_commands import deepspeed_launcher, environment

BENCH = "clap_ds/bench.py"
WriteRun = Callable[..., Path]
pytestmark = pytest.mark.end_to_end


def _bench(config: Path, launcher: str = "one rank", *options: str) -> subprocess.CompletedProcess[str]:
    """Run on one rank, forked here or started by the launcher under test."""
    arguments = [BENCH, "--deepspeed_config", str(config), *options]
    if launcher == "one rank":
        return run(arguments, env=environment())
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    start = deepspeed_launcher() if launcher == "deepspeed" else [sys.executable, *torchrun * (launcher == "torchrun")]
    command, seen = [*start, *arguments], environment()
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, env=seen)


def _run_directory(config: Path) -> Path:
    (directory,) = (config.parent / "runs").iterdir()
    return directory


def _summary(config: Path) -> dict[str, Any]:
    return dict(json.loads((_run_directory(config) / "summary.json").read_text()))


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read samples and value per tag from the only event file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list(folder.iterdir())) == 1
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize(("launcher", "world_size"), [("torchrun", 2), ("python", 1)])
def test_completes_under_every_launcher(write_run: WriteRun, launcher: str, world_size: int) -> None:
    protocol = {"warmup_steps": 1, "windows": 2, "steps_per_window": 2, "breakdown_steps": 3}
    config = write_run(log_level="info", steps_per_print=1, clap={"bench": protocol})
    result = _bench(config, launcher)
    assert result.returncode == 0, result.stderr
    assert "samples/s" in result.stdout
    summary, directory = _summary(config), _run_directory(config)
    assert summary["state"] == "completed"
    assert (summary["world_size"], summary["num_nodes"], summary["global_batch"]) == (world_size, 1, 4 * world_size)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    phases = [(1, "warmup"), *((n, "timed") for n in range(2, 6)), *((n, "breakdown") for n in range(7, 10))]
    assert [(line["step"], line["phase"]) for line in lines] == phases
    seconds = pd.DataFrame(lines[1:5]).groupby("window")["window_s"].first().sum()
    assert summary["samples_per_s"] == pytest.approx(world_size * 16 / seconds)
    parts = summary["breakdown_s"].values()
    assert all(f"{1000 * part_s:,.1f} ms  {100 * part_s / sum(parts):5.1f}%" in result.stdout for part_s in parts)
    assert "RunningAvgSamplesPerSec=" in (directory / "rank0.log").read_text()
    assert json.loads((directory / "environment.json").read_text())["gpus_per_node"] == [world_size]


def test_deepspeeds_own_from_end_to_end(tmp_path: Path) -> None:
    """The packaged configuration with a smaller model: its optimizer, all-reduce, timers, monitor and profiler."""
    run = json.loads((ROOT / "ds_configs/htsat_tiny_deepspeed.json").read_text())
    run |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "steps_per_print": 1}
    run["clap"]["model"]["preset"], run["clap"]["context_length"] = "micro", 16
    run["clap"]["bench"] = {"warmup_steps": 1, "windows": 2, "steps_per_window": 1, "breakdown_steps": 1}
    run["clap"] |= {"output": {"dir": str(tmp_path / "runs")}, "hardware": {"peak_tflops": 3.0}}
    optimizer = "FusedAdam"
    if " " in torch.__file__:  # torch's linker line doesn't quote its own folder, so DeepSpeed can't compile there
        optimizer, run["clap"]["optimizer_implementation"] = "FlatAdamW", "torch"
    (config := tmp_path / "run.json").write_text(json.dumps(run | {"comms_logger": {"enabled": True}}))
    result = _bench(config, "deepspeed")
    assert result.returncode == 0, result.stdout + result.stderr
    directory, summary = _run_directory(config), _summary(config)
    log, report = ((directory / name).read_text() for name in ("rank0.log", "flops_profile.txt"))
    assert f"DeepSpeed Basic Optimizer = {optimizer}" in log
    assert f"published convention {published_flops(load_preset('micro')) / 1e9:.2f}" in log
    for text in (result.stdout, log):
        assert text.count("DeepSpeed Flops Profiler ----") == text.count(report) == 1
        assert text.count("time (ms) | fwd: ") == 5  # every step
        assert len(re.findall(r"all_reduce\s+", text)) == 1
    flops, rate = summary["flops"], summary["samples_per_s_per_gpu"]["mean"]
    assert flops["deepspeed_gflops"] == pytest.approx(flops["model_gflops"], rel=1e-9)
    done_tflops = flops["training_gflops"] * rate / 1e3
    assert summary["achieved_tflops"] == pytest.approx(done_tflops)
    assert summary["mfu_model_percent"] == pytest.approx(100 * done_tflops / 3.0)
    published_tflops = 3 * published_flops(load_preset("micro")) * rate / 1e12
    assert summary["mfu_published_percent"] == pytest.approx(100 * published_tflops / 3.0)
    assert "MFU (executed FLOPs)" in result.stdout
    events = _scalars(directory / "tensorboard")
    assert [samples for samples, _ in events["Train/Samples/lr"]] == [16, 32, 48, 64, 80]
    assert "Train/Samples/elapsed_time_ms_forward" in events


def test_exhausted_memory_is_recorded_with_the_micro_batch(write_run: WriteRun) -> None:
    config = write_run(train_micro_batch_size_per_gpu=10**12)
    assert _bench(config).returncode == 1
    assert _summary(config)["state"] == "out_of_memory"
    assert f"micro-batch {10**12}" in _summary(config)["error"]
