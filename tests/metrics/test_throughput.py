"""DeepSpeed's throughput lines while the device is behind the host, and the efficiency that is
computed from them."""

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from deepspeed.utils.timer import ThroughputTimer

from clap_ds.analysis import scaling
from clap_ds.analysis.table import read_table_runs
from clap_ds.data.batch import Batch
from clap_ds.metrics.throughput import StepToStepTimer, Throughput, Window
from clap_ds.model.clap import ClapModel
from tests.analysis.samples import LAUNCHER, command, write
from tests.rank_pool import RankPool
from tests.training.reference_steps import engine_of, micro_batches, settings

EVERY = 5  # steps per line
WINDOW = 7  # steps between evaluations
STEPS = 4 * WINDOW
LINE = re.compile(
    r"global_step=(\d+), RunningAvgSamplesPerSec=([\d.]+), CurrSamplesPerSec=([\d.]+)"
)


class LaggingDevice:
    """A clock, and a GPU that works on what the host has launched. Up to `QUEUE_S` seconds of its
    work can be waiting."""

    QUEUE_S = 0.1

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.free_at_s = 1000.0

    def launch(self, host_s: float, device_s: float) -> None:
        self.now_s += host_s
        self.free_at_s = max(self.free_at_s, self.now_s) + device_s
        self.now_s = max(self.now_s, self.free_at_s - self.QUEUE_S)

    def synchronize(self, *_: object) -> None:
        self.now_s = max(self.now_s, self.free_at_s)


@contextmanager
def _deepspeeds_log() -> Iterator[io.StringIO]:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logger.handlers[0].formatter)
    logger.addHandler(handler)
    yield handler.stream
    logger.removeHandler(handler)


def _train(changes: dict[str, Any], device_s: float) -> tuple[str, int, dict[int, float]]:
    """Train with evaluations in between, on a device that takes `device_s` per step. Every ninth
    step waits for it.

    Returns DeepSpeed's log, the global batch, and the seconds of training from the third step on,
    by step.
    """
    device = LaggingDevice()
    run = settings(steps_per_print=EVERY, log_level="info", **changes)
    engine = engine_of(run, ClapModel(run.clap.preset()))
    first_batch = micro_batches(run, 0, 1, 1)[0]
    compute_loss = engine.loss

    def batches() -> Iterator[Batch]:
        while True:
            device.now_s += 0.005 if engine.steps % 4 else 0.05
            yield first_batch

    def launch(*features: Any) -> Any:
        device.launch(0.06, device_s)
        if engine.steps % 9 == 0:
            device.synchronize()
        return compute_loss(*features)

    engine.loss = launch
    training_s = dict[int, float]()
    excluded_s = 0.0
    begun_s = 0.0
    with (
        _deepspeeds_log() as log,
        mock.patch("time.time", side_effect=lambda: device.now_s),
        mock.patch.object(get_accelerator(), "synchronize", device.synchronize),
        mock.patch("clap_ds.metrics.timers.synchronize", device.synchronize),
    ):
        loader = batches()
        for step in range(1, STEPS + 1):
            if step == 3:
                device.synchronize()
                begun_s = device.now_s
            engine.timer.start()
            engine.step(loader, waits=step % WINDOW == 0)
            engine.timer.mark()
            training_s[step] = device.now_s - begun_s - excluded_s
            if step % WINDOW == 0:
                engine.stop_timers()
                device.now_s += 20.0  # an evaluation
                excluded_s += 20.0
    return log.getvalue(), engine.deepspeed.train_batch_size(), training_s


CASES = {
    "two micro-steps": {"gradient_accumulation_steps": 2},
    "gradcache": {"gradient_accumulation_steps": 2, "train": {"accumulation": "gradcache"}},
}


@pytest.mark.parametrize("case", CASES)
def test_lines_of_a_device_behind_the_host_add_up_to_the_time_of_training(
    one_rank: RankPool, case: str
) -> None:
    ((log, batch, training_s),) = one_rank.run(_train, CASES[case], 0.15)
    lines = [
        (int(step), float(average), float(current)) for step, average, current in LINE.findall(log)
    ]
    assert [step for step, *_ in lines] == [*range(EVERY, STEPS + 1, EVERY)]
    by_current_s = 0.0
    before = 2
    for step, average, current in lines:
        by_current_s += (step - before) * batch / current
        before = step
        assert (step - 2) * batch / average == pytest.approx(training_s[step], rel=1e-4)
        assert by_current_s == pytest.approx(training_s[step], rel=1e-4)


def test_efficiency_by_the_engine_is_the_ratio_of_times_of_training(
    one_rank: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes take longer for a step than one, as their device waits for gradients."""
    logs = []
    total_s = []
    for nodes, device_s in ((1, 0.15), (2, 0.18)):
        ((log, _, training_s),) = one_rank.run(_train, {}, device_s)
        logs.append(write(tmp_path / f"n{nodes}.log", LAUNCHER.format(nodes, nodes) + log))
        total_s.append(training_s[STEPS])
    command(monkeypatch, scaling.main, *logs, "--rate", "engine", "--csv", tmp_path / "table.csv")
    one, two = read_table_runs(tmp_path / "table.csv")
    assert one.scaling_efficiency_percent == 100
    assert two.scaling_efficiency_percent == pytest.approx(
        100 * total_s[0] / total_s[1] / 2, rel=0.01
    )


def window(window_s: list[float], data_wait_s: list[float]) -> Window:
    """Return a window of one step on as many ranks as there are durations."""
    step_s = np.array([window_s])
    return Window(
        np.array(window_s),
        step_s,
        step_s,
        np.array([data_wait_s]),
        np.zeros((1, len(window_s), 0)),
        {},
    )


def test_windows_count_by_their_length_on_the_slowest_rank() -> None:
    """Two windows of 4 and 1 s have 60 and 40 samples on two ranks; waits for data take 2 and 0.1
    s."""
    throughput = Throughput(world_size=2)
    throughput.add(window([4.0, 3.0], [1.0, 2.0]), samples=60)
    throughput.add(window([0.5, 1.0], [0.1, 0.0]), samples=40)
    summary = throughput.summary()
    assert summary["samples_per_s"] == pytest.approx(100 / 5)
    rates = summary["samples_per_s_per_gpu"]
    assert (rates["mean"], rates["min"], rates["max"]) == pytest.approx((10, 7.5, 20))
    assert summary["data_wait_percent"] == pytest.approx(100 * 2.1 / 5)


@pytest.mark.parametrize(("num_windows", "num_kept"), [(256, 256), (257, 129), (600, 200)])
def test_many_windows_are_merged_with_their_neighbors(num_windows: int, num_kept: int) -> None:
    throughput = Throughput(world_size=1)
    for _ in range(num_windows):
        throughput.add(window([2.0], [0.5]), samples=30)
    summary = throughput.summary()
    assert len(summary["samples_per_s_per_gpu"]["windows"]) == num_kept
    assert summary["samples_per_s"] == pytest.approx(15)
    assert summary["data_wait_percent"] == pytest.approx(25)


def test_time_until_the_clock_is_paused_counts_and_time_after_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("time.time", lambda: sum(now_s))
    config = DeepSpeedThroughputTimerConfig(enabled=True, synchronized=False)
    timer = StepToStepTimer(ThroughputTimer(config, batch_size=12, steps_per_output=None))
    timer.start_step = 0  # DeepSpeed's timer leaves two steps out
    timer.start()
    now_s.append(1.0)  # the host's time for a step
    timer.stop(global_step=True, report_speed=False)
    now_s.append(2.0)  # until the device has finished it
    timer.pause()
    now_s.append(20.0)  # an evaluation
    timer.start()
    now_s.append(3.0)
    timer.stop(global_step=True, report_speed=False)
    assert timer.total_elapsed_time == pytest.approx(6.0)
