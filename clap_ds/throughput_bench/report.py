"""Record a benchmark's windows and results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clap_ds.data.dataloader import BatchSource
from clap_ds.distributed.collectives import gather
from clap_ds.distributed.init import Ranks
from clap_ds.engine.engine import ClapEngine
from clap_ds.flop_count.device_specs import utilization
from clap_ds.metrics.stragglers import Stragglers
from clap_ds.metrics.tensorboard import Scalars
from clap_ds.metrics.terminal import Progress, print_summary, run_title
from clap_ds.metrics.throughput import Throughput, Window, gather_window
from clap_ds.metrics.timers import StepTimes
from clap_ds.run_records import environment
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.run_records.schema import StepLine, Summary
from clap_ds.throughput_bench.breakdown import median_step

# Matrix products alone reach about 80%.
MOST_MFU_PERCENT = 90.0


class BenchReport:
    """Record of a benchmark on rank 0; other ranks take part in collectives. Samples/s and
    DeepSpeed's own figure include data wait."""

    def __init__(
        self,
        record: RunDirectory,
        engine: ClapEngine,
        loader: BatchSource,
        scalars: Scalars,
        ranks: Ranks,
        num_steps: int,
    ) -> None:
        self._record = record
        self._engine = engine
        self._loader = loader
        self._scalars = scalars
        self._batch_size = engine.deepspeed.train_batch_size()
        self._ranks = ranks
        self._throughput = Throughput(ranks.world_size)
        # Of all GPUs when the warm-up ended.
        self._joules_before = math.nan
        self._stragglers = Stragglers(gather(ranks.host))
        self._progress = Progress(num_steps, enabled=ranks.is_main_process)
        if ranks.is_main_process:
            # `find_micro_batch` may have set the micro-batch.
            summary = record.update_summary(
                micro_batch_per_gpu=engine.deepspeed.train_micro_batch_size_per_gpu(),
                global_batch=self._batch_size,
            )
            print(run_title(summary), flush=True)

    def add(self, number: int | None, times: StepTimes, losses: list[Tensor]) -> None:
        """Record a window, or a warm-up step (None). A collective; raises NonFiniteError on all
        ranks if a loss isn't finite."""
        # A loss is a window's only other figure.
        window = gather_window(times, torch.stack(losses)[:, None])
        if number is not None:
            rates = window.first_rank_rates(self._batch_size / self._ranks.world_size)
            self._loader.report_throughput(rates, self._ranks.local_world_size)
        if self._ranks.is_main_process:
            self._write_window(number, window)
        self._engine.check_loss()

    def _write_window(self, number: int | None, window: Window) -> None:
        num_steps = len(window.step_s)
        # Rank 0's peak so far; the summary has the largest rank's.
        memory_bytes = environment.peak_memory_bytes(self._engine.device)
        self._write_steps(number, window, memory_bytes)
        if number is None:
            self._joules_before = window.joules
            self._progress.advance(num_steps, "warm-up")
            return
        self._memory = window.memory
        self._throughput.add(window, self._batch_size)
        # Rank 0's step times stand for all: the all-reduce makes ranks wait for each other.
        stragglers = self._stragglers.add(
            self._batch_size, window.step_s[:, 0], window.own_s, window.data_wait_s
        )
        # Since the warm-up.
        num_samples = number * num_steps * self._batch_size
        energy = environment.summarize_energy(window.joules - self._joules_before, num_samples)
        self._record.update_summary(stragglers, energy, self._throughput.summary())
        # Over the slowest rank's time, like the summary.
        rate = window.samples_per_s(self._batch_size)
        self._write_scalars(window, rate, memory_bytes)
        self._progress.advance(num_steps, f"window {number}: {rate:,.1f} samples/s")

    def _write_scalars(self, window: Window, rate: float, memory_bytes: int) -> None:
        num_samples = self._engine.steps * self._batch_size
        self._scalars.write(
            [
                ("bench/samples_per_s", rate, num_samples),
                ("bench/loss", float(window.figures.mean()), num_samples),
                ("bench/memory_bytes", memory_bytes, num_samples),
            ]
        )

    def _write_steps(self, number: int | None, window: Window, memory_bytes: int) -> None:
        """Write a line per step. Its loss is the mean over ranks; its times are rank 0's, except
        for the slowest rank's."""
        # (steps, ranks, 1) → (steps,)
        # In fp32, as losses are.
        losses = window.figures[..., 0].astype(np.float32).mean(axis=1)
        slowest_s = window.step_s.max(axis=1)
        first_step = self._engine.steps - len(losses) + 1
        for offset in range(len(losses)):
            self._record.append_metrics(
                StepLine(
                    phase="warmup" if number is None else "timed",
                    window=number,
                    window_s=window.slowest_s,
                    window_data_wait_s=window.waited_s,
                    memory_bytes=memory_bytes,
                    step=first_step + offset,
                    time_s=float(window.step_s[offset, 0]),
                    slowest_rank_time_s=float(slowest_s[offset]),
                    data_wait_s=float(window.data_wait_s[offset, 0]),
                    loss=float(losses[offset]),
                )
            )

    def finish(
        self, steps: list[dict[str, float]], flops: dict[str, Any], peak_tflops: float | None
    ) -> None:
        """Record and print the results after the last window, with MFU in both conventions if the
        peak is known.

        Args:
            steps: seconds of each instrumented step's phases.
        """
        self._loader.record_statistics(self._record)
        if not self._ranks.is_main_process:
            return
        # The instrumented steps are the last ones, without the first of them.
        first_step = self._engine.steps - len(steps) + 1
        for step, phases_s in enumerate(steps, start=first_step):
            self._record.append_metrics(StepLine(step=step, phase="breakdown", phases_s=phases_s))
        self._progress.advance(len(steps), "breakdown")

        deepspeed = self._engine.deepspeed
        throughput = self._throughput.summary()
        published = flops["published_gflops"]
        used = utilization(
            None if published is None else 1e9 * published,
            1e9 * flops["training_gflops"],
            throughput["samples_per_s_per_gpu"]["mean"],
            # If the run's devices differ, their peak is unknown.
            self._record.summary()["device_name"],
            peak_tflops,
            1e9 * flops["recomputed_gflops"],
        )
        summary = self._record.update_summary(
            throughput,
            used,
            self._memory,
            breakdown_s=median_step(steps),
            flops=flops,
            skipped_steps=deepspeed.skipped_steps,
            deepspeed_samples_per_s=deepspeed.tput_timer.samples_per_s(),
            warnings=[*self._stragglers.warnings, *warn_about_mfu(used)],
        )
        print_summary(summary)


def warn_about_mfu(utilization: Summary) -> list[str]:
    """Return a warning for each MFU that can't be a fraction of the peak."""
    published_percent = utilization["mfu_published_percent"]
    model_percent = utilization["mfu_model_percent"]
    warnings = []
    if published_percent is not None and published_percent > 100:
        warnings.append(
            f"MFU of {published_percent:.1f}% in the published convention isn't a share of the peak: it counts captions of"
            " full length (514 tokens for RoBERTa), however long they are"
        )
    if model_percent is not None and model_percent > MOST_MFU_PERCENT:
        warnings.append(
            f"MFU of {model_percent:.1f}% (executed FLOPs) is implausible: check the throughput and the peak"
        )
    return warnings
