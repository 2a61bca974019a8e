"""The bench command under every launcher, with DeepSpeed's own sections, and with errors."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clap_ds.analysis.runs import read_runs
from clap_ds.config.model import load_preset
from clap_ds.flop_count.analytic import published_flops
from tests.analysis.samples import make_options, write
from tests.processes import ROOT, TIMEOUT_S, ranks, run
from tests.rank_pool import free_port
from tests.training.training_commands import environment

BENCH = "clap_ds/bench.py"
pytestmark = pytest.mark.end_to_end


def _launch(config: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    variables = environment()
    # Saves half a minute of compiling.
    compiler = config.parent / "g++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0 -g0\n')
    compiler.chmod(0o755)
    variables["CXX"] = str(compiler)
    return subprocess.run(
        [*launcher, BENCH, "--deepspeed_config", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=variables,
    )


def _run_directory(config: Path) -> Path:
    (directory,) = (config.parent / "runs").iterdir()
    return directory


def _summary(config: Path) -> dict[str, Any]:
    return dict(json.loads((_run_directory(config) / "summary.json").read_text()))


def test_bench_under_torchrun_records_the_steps_that_it_prints(write_run):
    protocol = {"warmup_steps": 1, "windows": 2, "steps_per_window": 2, "breakdown_steps": 3}
    clap = {"bench": protocol, "profile": {"steps": 2, "ranks": [1]}}
    config = write_run(log_level="info", steps_per_print=1, clap=clap)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    result = _launch(config, *torchrun, "--master_port", str(free_port()))
    assert result.returncode == 0, result.stderr
    assert "samples/s" in result.stdout
    summary = _summary(config)
    assert (summary["state"], summary["world_size"]) == ("completed", 2)
    directory = _run_directory(config)
    assert json.loads((directory / "environment.json").read_text())["gpus_per_node"] == [2]

    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    # The first instrumented step isn't recorded.
    phases = [(1, "warmup"), *((step, "timed") for step in (2, 3, 4, 5))]
    phases += [(step, "breakdown") for step in (7, 8, 9)]
    assert [(line["step"], line["phase"]) for line in lines] == phases
    windows_s = lines[1]["window_s"] + lines[3]["window_s"]
    assert summary["samples_per_s"] == pytest.approx(4 * 8 / windows_s)
    assert f"{1000 * summary['breakdown_s']['forward']:,.1f} ms" in result.stdout
    # After the instrumented steps and the profiler's warm-up.
    assert "profile of steps 11 to 12 on rank 1" in result.stdout

    # `clap-ds scaling` reads the terminal's output.
    log = write(config.parent / "terminal.log", result.stdout)
    (logged,) = read_runs([log], make_options(rate="engine"))
    assert (logged.model, logged.gpus, logged.batch_per_gpu) == ("micro", 2, 4)
    assert logged.context_length == 16


def _deepspeed_config(folder: Path) -> Path:
    """Write the packaged configuration with a smaller model."""
    content = json.loads((ROOT / "ds_configs/htsat_tiny_deepspeed.json").read_text())
    content["train_micro_batch_size_per_gpu"] = 4
    content["gradient_accumulation_steps"] = 2
    content["steps_per_print"] = 1
    content["comms_logger"] = {"enabled": True}
    clap = content["clap"]
    clap["model"]["preset"] = "micro"
    clap["context_length"] = 16
    clap["bench"] = {
        "warmup_steps": 1,
        "windows": 2,
        "steps_per_window": 1,
        "breakdown_steps": 1,
    }
    clap["output"] = {"dir": str(folder / "runs")}
    clap["hardware"] = {"peak_tflops": 3.0}
    # DeepSpeed would compile its own for two minutes.
    clap["optimizer_implementation"] = "torch"
    config = folder / "run.json"
    config.write_text(json.dumps(content))
    return config


def test_bench_with_deepspeeds_sections_runs_its_timers_monitor_and_profiler(tmp_path):
    config = _deepspeed_config(tmp_path)
    result, other = ranks([BENCH, "--deepspeed_config", config], 2, env=environment())
    assert [result.wait(), other.wait()] == [0, 0], result.stdout + result.stderr
    directory = _run_directory(config)
    log = (directory / "rank0.log").read_text()
    report = (directory / "flops_profile.txt").read_text()
    published = published_flops(load_preset("micro")) / 1e9
    assert f"published convention: profiled {published:.2f}" in log
    for text in (result.stdout, log):
        assert text.count("DeepSpeed Flops Profiler ----") == 1
        assert text.count(report) == 1
        # A line per step.
        assert text.count("time (ms) | fwd: ") == 5
        assert len(re.findall(r"all_reduce\s+", text)) == 1

    summary = _summary(config)
    flops = summary["flops"]
    assert flops["deepspeed_gflops"] == pytest.approx(flops["model_gflops"], rel=1e-9)
    assert "MFU (executed FLOPs)" in result.stdout

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("Train/Samples/lr")] == [16, 32, 48, 64, 80]
    assert "Train/Samples/elapsed_time_ms_forward" in events.Tags()["scalars"]


# Run the benchmark with 16 GB of memory.
LIMITED = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, (16 * 10**9, -1))
sys.argv = ["{BENCH}", *sys.argv[1:]]
runpy.run_path("{BENCH}", run_name="__main__")
"""


def test_bench_of_a_gpus_configuration_without_gpu_is_refused_before_it_allocates(tmp_path):
    content = json.loads((ROOT / "ds_configs" / "htsat_tiny.json").read_text())
    content["clap"]["output"] = {"dir": str(tmp_path / "runs")}
    config = tmp_path / "run.json"
    config.write_text(json.dumps(content))
    variables = environment(CUDA_VISIBLE_DEVICES="")
    del variables["DS_ACCELERATOR"]
    result = run(["-c", LIMITED, "--deepspeed_config", config], env=variables)
    assert (result.returncode, result.stderr.count("error:")) == (2, 1), result.stderr
    assert "no GPU: 1 CPU rank (CUDA_VISIBLE_DEVICES" in result.stdout
    assert "micro-batch 616" in result.stderr
    assert "htsat_tiny_cpu" in result.stderr
    assert "find_micro_batch" not in result.stderr
    assert _summary(config)["state"] == "out_of_memory"
