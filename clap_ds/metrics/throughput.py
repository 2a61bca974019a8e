"""Gather the step times of a window from all ranks, and compute throughput over windows.

`train.py` and `bench.py` use the same path: `StepTimer` times steps on each rank, `gather_window`
sends a window's times to rank 0, and `Throughput` adds up the windows.
"""

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
from clap_ds.run_records.environment import peak_memory, read_energy_joules, summarize_memory
from clap_ds.run_records.schema import StepTime, Summary

# In a summary; more are merged with their neighbors.
MOST_WINDOWS = 256


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

    def samples_per_s(self, batch_size: int) -> float:
        """Return all ranks' samples/s, with `batch_size` samples in each step of all ranks."""
        return batch_size * len(self.step_s) / self.slowest_s

    def first_rank_rates(self, batch_size: float) -> list[float]:
        """Return the samples/s of rank 0, or on another rank its own, in each step without its data
        wait. With `batch_size` samples per step of this rank, it is what a loader must supply."""
        rates: list[float] = (batch_size / (self.step_s - self.data_wait_s)[:, 0]).tolist()
        return rates


def gather_window(times: StepTimes, figures: Tensor) -> Window:
    """Gather a window's times, and `figures` of each step, (steps, number), on rank 0. A
    collective."""
    device = figures.device
    of_window = [times.window_s, read_energy_joules(device), *peak_memory(device)]
    data_wait_s = [phases["data_wait"] for phases in times.phases_s]
    by_step = np.column_stack(
        (times.step_s, times.own_s, data_wait_s, figures.double().cpu().numpy())
    )
    # A row per rank: the window's values, then the steps' one after the other.
    local_row = torch.from_numpy(np.concatenate((of_window, by_step.ravel())))
    by_rank = np.stack(gather_tensor(local_row))
    window_s, joules, *memory = by_rank[:, : len(of_window)].T
    # (ranks, steps, values) → (steps, ranks, values)
    values = by_rank[:, len(of_window) :].reshape(-1, *by_step.shape).swapaxes(0, 1)
    return Window(
        window_s=window_s,
        step_s=values[..., 0],
        own_s=values[..., 1],
        data_wait_s=values[..., 2],
        figures=values[..., 3:],
        memory=summarize_memory(zip(*memory, strict=True)),
        joules=float(joules.sum()),
    )


class Throughput:
    """Throughput over windows, without the time between them."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        # Samples, seconds and seconds of data wait of each window. Windows, unlike steps, begin and
        # end with the device synchronized.
        self._windows: list[tuple[int, float, float]] = []
        # Of each step: rank 0's time, and the slowest rank's.
        self._step_s = array("d")
        self._slowest_s = array("d")

    def add(self, window: Window, batch_size: int) -> None:
        """Add a window on rank 0, with `batch_size` samples in each step of all ranks."""
        num_samples = batch_size * len(window.step_s)
        self._windows.append((num_samples, window.slowest_s, window.waited_s))
        self._step_s.extend(window.step_s[:, 0])
        self._slowest_s.extend(window.step_s.max(axis=1))

    def summary(self) -> Summary:
        """Return the statistics, with each window as long as its slowest rank's; empty without
        windows."""
        if not self._windows:
            return {}
        # Neighbors are added up: rates of the sums, not means of rates.
        windows_per_group = math.ceil(len(self._windows) / MOST_WINDOWS)
        starts = range(0, len(self._windows), windows_per_group)
        samples, window_s, waited_s = np.add.reduceat(np.array(self._windows, float), starts).T
        per_gpu = rates((samples / self._world_size).tolist(), window_s.tolist())
        return Summary(
            samples_per_s_per_gpu=per_gpu,
            samples_per_s=per_gpu["mean"] * self._world_size,
            step_time_s=StepTime(
                median=float(np.median(self._step_s)),
                p95=float(np.percentile(self._step_s, 95)),
                slowest_rank_median=float(np.median(self._slowest_s)),
            ),
            data_wait_percent=float(100 * waited_s.sum() / window_s.sum()),
        )
