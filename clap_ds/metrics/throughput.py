"""Gather the step times of a window from all ranks, and compute throughput over windows."""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

import numpy as np
import torch
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
