"""Benchmark results for known step times, on two ranks with fake clocks."""

import json
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clap_ds.data.dataloader import BatchSource
from clap_ds.engine.deepspeed_compat import defer_monitor_events
from clap_ds.metrics.tensorboard import Scalars
from clap_ds.metrics.timers import StepTimer
from clap_ds.run_records import environment
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.run_records.schema import STEP_PHASES
from clap_ds.throughput_bench import report
from tests.rank_pool import RankPool

GIB = 2**30
PHASES = dict.fromkeys(STEP_PHASES, 0.5)
FLOPS = {"published_gflops": 200.0, "training_gflops": 3.0, "recomputed_gflops": 0.0}


def long(step: int) -> float:
    """Every tenth step takes 4× as long."""
    return 4.0 if step % 10 == 0 else 1.0


def _measured(folder: str) -> dict[str, Any]:
    """Rank 1 takes 1.5× as long as rank 0, and waits twice as long for data."""
    rank = dist.get_rank()
    now = [100.0]
    cpu = torch.device("cpu")
    timer = SimpleNamespace(samples_per_s=lambda: 7.0 + engine.steps)
    deepspeed: Any = SimpleNamespace(
        skipped_steps=3, global_samples=0, tput_timer=timer, train_batch_size=lambda: 16
    )
    deepspeed.train_micro_batch_size_per_gpu = lambda: 4
    deepspeed.monitor = SimpleNamespace(enabled=False, write_events=lambda events: None)
    engine: Any = SimpleNamespace(
        steps=0, deepspeed=deepspeed, check_loss=lambda: None, device=cpu, config={}
    )
    engine.timer = StepTimer(cpu)
    engine.defer_monitor_events = partial(defer_monitor_events, deepspeed)
    pieces: Any = SimpleNamespace(throughput=lambda: None, state=dict, statistics=dict)
    loader = BatchSource(pieces, cpu, copy_ahead=False)
    ranks: Any = SimpleNamespace(
        is_main_process=rank == 0, world_size=2, local_world_size=1, host=f"node{rank}"
    )
    with (
        mock.patch("clap_ds.metrics.timers.time.perf_counter", side_effect=lambda: now[0]),
        mock.patch.object(environment, "peak_memory_bytes", return_value=(1 + rank) * GIB),
        mock.patch(
            "clap_ds.metrics.throughput.energy_joules",
            side_effect=lambda _: (100 + 50 * rank) * now[0],
        ),
        mock.patch.object(report, "print_summary"),
        mock.patch.object(report, "Progress"),
        mock.patch.object(loader, "report_throughput") as report_throughput,
    ):
        record = RunDirectory(Path(folder))
        if rank == 0:
            record.update_summary(
                device_name="H200",
                preset="micro",
                world_size=2,
                num_nodes=2,
                precision="bf16",
                context_length=16,
            )
        scalars = Scalars(engine, Path(folder))
        found = report.BenchReport(record, engine, loader, scalars, ranks, 34)  # type: ignore[arg-type]
        for number, num_steps in ((None, 1), (None, 1), (1, 10), (2, 10), (3, 10)):
            engine.timer.start()
            losses = []
            for _ in range(num_steps):
                engine.steps += 1
                with engine.timer("data_wait"):
                    now[0] += 0.1 * (1 + rank)
                now[0] += long(engine.steps) * (1 + 0.5 * rank) - 0.1 * (1 + rank)
                losses.append(torch.tensor(engine.steps + 10.0 * rank))
                engine.timer.mark()
            found.add(number, engine.timer.stop(), losses)
        engine.steps += 2
        found.finish([PHASES] * 2, dict(FLOPS), 2.0)
    return {**record.summary(), "reported_rates": report_throughput.call_args_list[-1].args[0]}


def test_every_figure_of_a_run_on_two_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    summary = two_ranks.run(_measured, str(tmp_path))[0]
    rate = summary[
        "samples_per_s_per_gpu"
    ]  # 240 samples in three windows of 13.5 times as many seconds
    assert (rate["mean"], rate["min"], rate["max"]) == pytest.approx((80 / 19.5,) * 3)
    assert rate["windows"] == pytest.approx([80 / 19.5] * 3)
    assert rate["window_s"] == pytest.approx([19.5] * 3)
    assert (summary["micro_batch_per_gpu"], summary["global_batch"]) == (4, 16)
    assert summary["samples_per_s"] == pytest.approx(2 * 80 / 19.5)
    assert summary["deepspeed_samples_per_s"] == 7 + 34
    assert summary["step_time_s"] == pytest.approx(
        {"median": 1.0, "p95": 4.0, "slowest_rank_median": 1.5}
    )
    assert summary["data_wait_percent"] == pytest.approx(100 * 2 / 19.5)
    assert summary["memory_peak_bytes"] == 2 * GIB
    assert summary["joules_per_sample"] == pytest.approx(
        (39 * 100 + 58.5 * 150) / 480
    )  # after the warm-up
    # Rank 0's 8 samples of a step, whose data wait of 0.1 s is left out, in the last window.
    assert summary["reported_rates"] == pytest.approx(
        [8 / (long(step) - 0.1) for step in range(23, 33)]
    )
    assert (summary["skipped_steps"], summary["breakdown_s"]["forward"]) == (3, 0.5)
    assert summary["mfu_model_percent"] == pytest.approx(100 * 80 / 19.5 * 3e9 / 2e12)
    assert summary["stragglers_cost_samples_per_s"] == pytest.approx(
        480 / 39
    )  # twice as fast without them
    assert [warning.split(" of ")[0].split(" cost ")[0] for warning in summary["warnings"]] == [
        "stragglers",
        "MFU",
    ]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["phases_s"]) for line in lines[32:]] == [(33, PHASES), (34, PHASES)]
    lines = lines[:32]
    assert [(line["step"], line["phase"], line["window"]) for line in lines] == [
        (step, "warmup" if step < 3 else "timed", None if step < 3 else (step + 7) // 10)
        for step in range(1, 33)
    ]
    assert [line["window_s"] for line in lines] == pytest.approx([1.5] * 2 + [19.5] * 30)
    assert [line["window_data_wait_s"] for line in lines] == pytest.approx([0.2] * 2 + [2.0] * 30)
    assert [line["time_s"] for line in lines] == pytest.approx(
        [long(step) for step in range(1, 33)]
    )
    assert [line["slowest_rank_time_s"] for line in lines] == pytest.approx(
        [1.5 * long(n) for n in range(1, 33)]
    )
    assert [line["loss"] for line in lines] == [
        step + 5 for step in range(1, 33)
    ]  # the mean of both ranks
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    written = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    windows = [lines[start : start + 10] for start in range(2, 32, 10)]
    samples = [16 * window[-1]["step"] for window in windows]
    expected = {
        "bench/samples_per_s": [160 / window[0]["window_s"] for window in windows],
        "bench/loss": [fmean(line["loss"] for line in window) for window in windows],
        "bench/memory_bytes": [window[0]["memory_bytes"] for window in windows],
    }
    assert written == {
        tag: [*zip(samples, map(pytest.approx, values), strict=True)]
        for tag, values in expected.items()
    }


@pytest.mark.parametrize(
    ("published_percent", "model_percent", "named"),
    [
        (99.9, 89.9, []),
        (112.7, 25.6, ["112.7%"]),  # the H200's
        (None, 90.1, ["90.1%"]),
        (400.0, 95.0, ["400.0%", "95.0%"]),
        (None, None, []),
    ],
)
def test_an_mfu_that_cannot_be_a_share_of_the_peak_has_a_warning(
    published_percent: float | None, model_percent: float | None, named: list[str]
) -> None:
    used: Any = {"mfu_published_percent": published_percent, "mfu_model_percent": model_percent}
    warnings = report.warn_about_mfu(used)
    assert len(warnings) == len(named)
    assert all(percent in warning for percent, warning in zip(named, warnings, strict=True))
