"""Gather the step times of a window from all ranks, and compute throughput over windows, also by
DeepSpeed's timer."""

from __future__ import annotations

import math
import time
from array import array
from typing import NamedTuple

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import ThroughputTimer
from torch import Tensor

from clap_ds.distributed.collectives import gather_tensor
from clap_ds.metrics.intervals import rates
from clap_ds.metrics.stragglers import Floats
from clap_ds.metrics.timers import StepTimes
from clap_ds.run_records.environment import energy_joules, largest_memory, peak_memory
from clap_ds.run_records.schema import StepTime, Summary

MOST_WINDOWS = 256  # in a summary; more are merged with their neighbors


class Window(NamedTuple):
    """A window of steps. Rank 0 has all ranks' times, others only their own.

    Attributes:
        window_s: seconds, (ranks,).
        step_s, own_s, data_wait_s: seconds, (steps, ranks), as in `StepTimes`.
        figures: other numbers of each step, (steps, ranks, number).
        memory: peak memory so far.
        joules: counters of all ranks' GPUs at its end, in total; NaN if unknown.
    """

    window_s: Floats
    step_s: Floats
    own_s: Floats
    data_wait_s: Floats
    figures: Floats
    memory: Summary
    joules: float = math.nan

    @property
    def slowest_s(self) -> float:
        return float(self.window_s.max())

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for data, on the rank that waited most."""
        return float(self.data_wait_s.sum(axis=0).max())


def gather_window(times: StepTimes, figures: Tensor) -> Window:
    """Gather a window's times, and `figures` of each step, (steps, number), on rank 0. A
    collective."""
    data_wait_s = [phases["data_wait"] for phases in times.phases_s]
    by_step = np.column_stack(
        (times.step_s, times.own_s, data_wait_s, figures.double().cpu().numpy())
    )
    device = figures.device
    of_window = [times.window_s, energy_joules(device), *peak_memory(device)]
    of_rank = torch.from_numpy(np.concatenate((of_window, by_step.ravel())))
    by_rank = np.stack(gather_tensor(of_rank))
    window_s, joules, *memory = by_rank[:, : len(of_window)].T
    by_step = np.moveaxis(by_rank[:, len(of_window) :].reshape(-1, *by_step.shape), 0, 1)
    step_s, own_s, waits_s = np.moveaxis(by_step[..., :3], 2, 0)
    largest = largest_memory(zip(*memory, strict=True))
    return Window(window_s, step_s, own_s, waits_s, by_step[..., 3:], largest, float(joules.sum()))


class Throughput:
    """Throughput over windows, without the time between them."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._windows: list[tuple[int, float, float]] = []
        self._step_s = array("d")
        self._slowest_s = array("d")

    def add(self, window: Window, samples: int) -> None:
        """Add a window on rank 0, with the global batch's `samples` in each step."""
        self._windows.append((samples * len(window.step_s), window.slowest_s, window.waited_s))
        self._step_s.extend(window.step_s[:, 0])
        self._slowest_s.extend(window.step_s.max(axis=1))

    def summary(self) -> Summary:
        """Return the statistics, with each window as long as its slowest rank's; empty without
        windows."""
        if not self._windows:
            return {}
        every = -(-len(self._windows) // MOST_WINDOWS)
        merged = np.add.reduceat(
            np.array(self._windows, float), range(0, len(self._windows), every)
        )
        samples, window_s, waited_s = merged.T
        found = rates((samples / window_s / self._world_size).tolist(), window_s.tolist())
        return Summary(
            samples_per_s_per_gpu=found,
            samples_per_s=found["mean"] * self._world_size,
            step_time_s=StepTime(
                median=float(np.median(self._step_s)),
                p95=float(np.percentile(self._step_s, 95)),
                slowest_rank_median=float(np.median(self._slowest_s)),
            ),
            data_wait_percent=float(100 * waited_s.sum() / window_s.sum()),
        )


class StepToStepTimer(ThroughputTimer):
    """DeepSpeed's throughput timer, running from the end of a step to the end of the next one.

    DeepSpeed's own runs on the host from the launch of the forward pass to the end of `step()`.
    While the host is ahead of the GPU, this isn't a step's time, unless the timer waits for the GPU
    twice in every step. From end to end, times add up to wall time wherever the host waits, waiting
    for data included. Evaluations and checkpoints are excluded by `pause`.
    """

    def __init__(self, timer: ThroughputTimer) -> None:
        """Make a replacement for an engine's timer."""
        super().__init__(timer.config, timer.batch_size, steps_per_output=timer.steps_per_output)
        self._unprinted_s = 0.0
        self._unprinted_steps = 0

    def start(self) -> None:
        """Start the clock unless it is running, when the GPU has finished earlier work. DeepSpeed
          calls this in each forward
        pass."""
        if self.start_time > 0:
            self.started = True
        elif self.config.enabled:
            get_accelerator().synchronize()
            super().start()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Count a micro-step, with `global_step` also a step. DeepSpeed calls this at the end of
        `step()`."""
        if not self.started:
            return
        self._count_time()
        if global_step and self.start_time > 0:
            self._unprinted_steps += 1
            # DeepSpeed prints the batch over this time as `CurrSamplesPerSec`. Single steps vary
            # with the host's lead, so it is the mean since the last line.
            self.step_elapsed_time = self._unprinted_s / self._unprinted_steps
        super().stop(global_step, report_speed)
        if global_step and self._is_report_boundary():
            self._unprinted_s = 0.0
            self._unprinted_steps = 0

    def pause(self) -> None:
        """Stop the clock until the next `start`. The caller has waited for the GPU, so that all of
        its work counts."""
        self._count_time()
        self.start_time = 0

    def _count_time(self) -> None:
        if self.start_time > 0:
            if self.config.synchronized:
                get_accelerator().synchronize()
            now = time.time()
            self.total_elapsed_time += now - self.start_time
            self._unprinted_s += now - self.start_time
            self.start_time = now  # type: ignore[assignment]  # starts as 0 in DeepSpeed
