"""Benchmark results for known step times, on two ranks with fake clocks."""

import json
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.distributed.init import Ranks
from clap_ds.metrics.timers import StepTimer
from clap_ds.run_records import environment
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.run_records.schema import STEP_PHASES
from clap_ds.throughput_bench import report
from tests.rank_pool import RankPool

GIB = 2**30
CPU = torch.device("cpu")
PHASES = dict.fromkeys(STEP_PHASES, 0.5)
FLOPS = {"published_gflops": 200.0, "training_gflops": 3.0, "recomputed_gflops": 0.0}
TITLE: dict[str, Any] = {
    "device_name": "H200",
    "preset": "micro",
    "world_size": 2,
    "num_nodes": 2,
    "precision": "bf16",
    "context_length": 16,
}
# Number and steps: two warm-up steps, then three windows.
WINDOWS = [(None, 1), (None, 1), (1, 10), (2, 10), (3, 10)]
BATCH_SIZE = 16


def step_s(step: int) -> float:
    """Return rank 0's time: every tenth step takes 4× as long."""
    return 4.0 if step % 10 == 0 else 1.0


class Engine:
    """What a report uses of an engine. Rank 1 takes 1.5× as long as rank 0 for a step, and waits
    twice as long for data."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.now_s = 100.0
        self.steps = 0
        self.device = CPU
        self.timer = StepTimer(CPU)
        self.check_loss = lambda: None
        self.deepspeed = SimpleNamespace(
            skipped_steps=3,
            tput_timer=SimpleNamespace(samples_per_s=lambda: 41.0),
            train_batch_size=lambda: BATCH_SIZE,
            train_micro_batch_size_per_gpu=lambda: 4,
        )

    def step(self) -> torch.Tensor:
        self.steps += 1
        wait_s = 0.1 * (1 + self.rank)
        with self.timer("data_wait"):
            self.now_s += wait_s
        self.now_s += step_s(self.steps) * (1 + 0.5 * self.rank) - wait_s
        self.timer.mark()
        return torch.tensor(self.steps + 10.0 * self.rank)


def _measure(folder: str) -> dict[str, Any]:
    """Return the summary, the last rates that the loader was told, and scalars."""
    engine: Any = Engine()
    loader_rates: list[list[float]] = []
    loader: Any = SimpleNamespace(
        report_throughput=lambda rates, ranks_per_host: loader_rates.append(rates),
        record_statistics=lambda record: None,
    )
    events: list[Any] = []
    scalars: Any = SimpleNamespace(write=events.extend)
    record = RunDirectory(Path(folder))
    ranks = Ranks(engine.rank, 2, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clap_ds.metrics.timers.time.perf_counter", lambda: engine.now_s)
        patch.setattr(environment, "peak_memory_bytes", lambda _: (1 + engine.rank) * GIB)
        # Rank 0's GPU uses 100 W, and rank 1's 150 W.
        patch.setattr(
            "clap_ds.metrics.throughput.read_energy_joules",
            lambda _: (100 + 50 * engine.rank) * engine.now_s,
        )
        patch.setattr(report, "print_summary", lambda summary: None)
        if ranks.is_main_process:
            record.update_summary(**TITLE)
        bench = report.BenchReport(record, engine, loader, scalars, ranks, 34)
        for number, num_steps in WINDOWS:
            engine.timer.start()
            losses = [engine.step() for _ in range(num_steps)]
            bench.add(number, engine.timer.stop(), losses)
        engine.steps += 2
        bench.finish([PHASES] * 2, dict(FLOPS), 2.0)
    return {**record.summary(), "loader_rates": loader_rates[-1], "events": events}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def summary(two_ranks: RankPool, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = two_ranks.run(_measure, str(folder))[0]
    return result


@pytest.fixture(scope="module")
def lines(summary: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_summary_has_throughput_of_the_slowest_rank(summary):
    # A window's nine steps of 1 s and one of 4 s take rank 1 1.5 times as long: 80 samples per rank.
    window_s = 1.5 * 13
    assert summary["samples_per_s_per_gpu"]["windows"] == pytest.approx([80 / window_s] * 3)
    assert summary["samples_per_s"] == pytest.approx(2 * 80 / window_s)
    assert summary["step_time_s"] == pytest.approx(
        {"median": 1.0, "p95": 4.0, "slowest_rank_median": 1.5}
    )
    assert summary["data_wait_percent"] == pytest.approx(100 * 10 * 0.2 / window_s)
    # Rank 1 isn't slow in the 32 steps if it takes as long as rank 0.
    assert summary["stragglers_cost_samples_per_s"] == pytest.approx(480 / 39)


def test_summary_has_what_the_engine_and_devices_report(summary):
    assert (summary["skipped_steps"], summary["deepspeed_samples_per_s"]) == (3, 41.0)
    assert summary["breakdown_s"]["forward"] == 0.5
    assert summary["memory_peak_bytes"] == 2 * GIB
    # After the warm-up, of 480 samples.
    joules = 3 * 13 * 100 + 3 * 19.5 * 150
    assert summary["joules_per_sample"] == pytest.approx(joules / 480)
    # 3 GFLOPs per sample, and a peak of 2 TFLOPS.
    assert summary["mfu_model_percent"] == pytest.approx(100 * 80 / 19.5 * 3e9 / 2e12)
    assert [warning[:10] for warning in summary["warnings"]] == ["stragglers", "MFU of 123"]


def test_loader_gets_rates_without_data_wait(summary):
    """Rank 0's 8 samples of a step, whose data wait of 0.1 s is left out, in the last window."""
    expected = [8 / (step_s(step) - 0.1) for step in range(23, 33)]
    assert summary["loader_rates"] == pytest.approx(expected)


def test_lines_have_rank_0s_times_the_slowest_ranks_and_the_mean_loss(lines):
    assert [(line["step"], line["phase"]) for line in lines[32:]] == [
        (33, "breakdown"),
        (34, "breakdown"),
    ]
    for line in lines[:32]:
        is_warm_up = line["window"] is None
        assert line["window_s"] == pytest.approx(1.5 if is_warm_up else 19.5)
        assert line["window_data_wait_s"] == pytest.approx(0.2 if is_warm_up else 2.0)
        assert line["time_s"] == pytest.approx(step_s(line["step"]))
        assert line["data_wait_s"] == pytest.approx(0.1)
        assert line["slowest_rank_time_s"] == pytest.approx(1.5 * step_s(line["step"]))
        assert line["loss"] == line["step"] + 5


def test_scalars_of_windows_are_written_at_their_last_sample(summary):
    expected = []
    for last_step in (12, 22, 32):
        loss = fmean(step + 5 for step in range(last_step - 9, last_step + 1))
        samples = BATCH_SIZE * last_step
        expected += [
            ("bench/samples_per_s", pytest.approx(160 / 19.5), samples),
            ("bench/loss", pytest.approx(loss), samples),
            ("bench/memory_bytes", GIB, samples),
        ]
    assert summary["events"] == expected
