"""The installed DeepSpeed has every internal name that the engine uses; its throughput lines are
right while the device is behind the host."""

import inspect
import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import logger
from deepspeed.utils.timer import ThroughputTimer

from clap_ds.data.batch import Batch
from clap_ds.engine import deepspeed_compat
from clap_ds.engine.deepspeed_compat import FP16_Optimizer
from clap_ds.model.clap import ClapModel
from tests.training.reference_steps import engine_of, micro_batches, settings

# Class attributes, and attributes that constructors set.
NAMES = {
    DeepSpeedEngine: "clip_fp32_gradients enable_backward_allreduce monitor tput_timer",
    FP16_Optimizer: "refresh_fp32_params step_fused_adam fp16_groups fp16_groups_flat"
    f" {deepspeed_compat.FLAT_MASTERS} _global_grad_norm loss_scale_config optimizer",
    FP16_UnfusedOptimizer: "refresh_fp32_params fp16_groups"
    f" {deepspeed_compat.MASTERS} _global_grad_norm optimizer",
    ThroughputTimer: "_is_report_boundary start_step start_time started step_elapsed_time"
    " steps_per_output global_step_count total_elapsed_time",
}


@pytest.mark.parametrize("owner", NAMES)
def test_deepspeed_has_the_internal_names(owner):
    source = inspect.getsource(owner)
    missing = []
    for name in NAMES[owner].split():
        if not hasattr(owner, name) and f"self.{name} = " not in source:
            missing.append(name)
    assert not missing, f"{owner.__name__} of DeepSpeed {deepspeed.__version__} has no {missing}"


@pytest.mark.parametrize("wrapper", [FP16_Optimizer, FP16_UnfusedOptimizer])
def test_16_bit_wrapper_saves_masters_and_optimizer_by_name(wrapper):
    source = inspect.getsource(wrapper)
    names = deepspeed_compat.FLAT_MASTERS, deepspeed_compat.MASTERS
    assert any(f"state_dict['{name}'] = " in source for name in names)
    assert "state_dict[OPTIMIZER_STATE_DICT] = " in source


LOG_INTERVAL = 5  # steps per line of DeepSpeed's log
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
def _deepspeed_log() -> Iterator[io.StringIO]:
    handler = logging.StreamHandler(io.StringIO())
    logger.addHandler(handler)
    yield handler.stream
    logger.removeHandler(handler)


def _train() -> tuple[str, int, dict[int, float]]:
    """Train with evaluations in between, on a device that takes 0.15 s per micro-step.

    Returns DeepSpeed's log, the global batch, and the seconds of training from the third step on,
    by step.
    """
    device = LaggingDevice()
    run = settings(steps_per_print=LOG_INTERVAL, log_level="info", gradient_accumulation_steps=2)
    engine = engine_of(run, ClapModel(run.clap.preset()))
    (batch,) = micro_batches(run, 0, 1, 1)
    compute_loss = engine.loss

    def batches() -> Iterator[Batch]:
        while True:
            # Every fourth step waits for its data.
            device.now_s += 0.0 if engine.steps % 4 else 0.05
            yield batch

    def launch(*features: Any) -> Any:
        device.launch(0.06, 0.15)
        return compute_loss(*features)

    engine.loss = launch
    training_s = dict[int, float]()
    excluded_s = 0.0
    begun_s = 0.0
    with _deepspeed_log() as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: device.now_s)
        patch.setattr(get_accelerator(), "synchronize", device.synchronize)
        patch.setattr("clap_ds.metrics.timers.synchronize", device.synchronize)
        loader = batches()
        for step in range(1, STEPS + 1):
            if step == 3:
                # DeepSpeed doesn't time the first two steps.
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


def test_throughput_lines_with_lagging_device_add_up_to_training_time(one_rank):
    ((log, batch_size, training_s),) = one_rank.run(_train)
    lines = [
        (int(step), float(average), float(current)) for step, average, current in LINE.findall(log)
    ]
    assert len(lines) == STEPS // LOG_INTERVAL
    sum_of_currents_s = 0.0
    previous_step = 2
    for step, average, current in lines:
        sum_of_currents_s += (step - previous_step) * batch_size / current
        previous_step = step
        assert (step - 2) * batch_size / average == pytest.approx(training_s[step], rel=1e-4)
        assert sum_of_currents_s == pytest.approx(training_s[step], rel=1e-4)
