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

MOST_MFU_PERCENT = 90.0  # matrix products alone reach about 80%


class BenchReport:
    """Records on rank 0; other ranks take part in collectives. Samples/s and DeepSpeed's own figure
    include data wait."""

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
        self._samples = engine.deepspeed.train_batch_size()
        self._ranks = ranks
        self._throughput = Throughput(ranks.world_size)
        self._begin_joules = math.nan
        self._stragglers = Stragglers(gather(ranks.host))
        self._progress = Progress(num_steps, enabled=ranks.is_main_process)
        if ranks.is_main_process:
            micro_batch = engine.deepspeed.train_micro_batch_size_per_gpu()
            # The micro-batch may have been found.
            summary = record.update_summary(
                micro_batch_per_gpu=micro_batch, global_batch=self._samples
            )
            print(run_title(summary), flush=True)

    def add(self, number: int | None, times: StepTimes, losses: list[Tensor]) -> None:
        """Record a window, or the warm-up (None). A collective; raises NonFiniteError on all ranks
        if a loss isn't finite."""
        window = gather_window(times, torch.stack(losses)[:, None])
        shown = "warm-up"
        if number is not None:
            own_s = window.step_s[:, 0] - window.data_wait_s[:, 0]
            rates = (self._samples / self._ranks.world_size / own_s).tolist()
            self._loader.report_throughput(rates, self._ranks.local_world_size)
        if self._ranks.is_main_process:
            memory_bytes = environment.peak_memory_bytes(self._engine.device)
            self._write_steps(number, window, memory_bytes)
            if number is None:
                self._begin_joules = window.joules
            else:
                self._memory = window.memory
                self._throughput.add(window, self._samples)
                rate = self._samples * len(losses) / window.slowest_s
                slow = self._stragglers.add(
                    self._samples, window.step_s[:, 0], window.own_s, window.data_wait_s
                )
                energy = environment.energy(
                    window.joules - self._begin_joules, number * len(losses) * self._samples
                )
                self._record.update_summary(slow, energy, self._throughput.summary())
                self._write_scalars(window, rate, memory_bytes)
                shown = f"window {number}: {rate:,.1f} samples/s"
            self._progress.advance(len(losses), shown)
        self._engine.check_loss()

    def _write_scalars(self, window: Window, rate: float, memory_bytes: int) -> None:
        scalars = {
            "bench/samples_per_s": rate,
            "bench/loss": float(window.figures.mean()),
            "bench/memory_bytes": memory_bytes,
        }
        samples = self._engine.steps * self._samples
        self._scalars.write((tag, value, samples) for tag, value in scalars.items())

    def _write_steps(self, number: int | None, window: Window, memory_bytes: int) -> None:
        of_window = StepLine(
            phase="warmup" if number is None else "timed",
            window=number,
            window_s=window.slowest_s,
            window_data_wait_s=window.waited_s,
            memory_bytes=memory_bytes,
        )
        losses = window.figures[..., 0].astype(np.float32).mean(axis=1)
        step_s = window.step_s
        wait_s = window.data_wait_s[:, 0]
        columns = {
            "time_s": step_s[:, 0],
            "slowest_rank_time_s": step_s.max(axis=1),
            "data_wait_s": wait_s,
            "loss": losses,
        }
        for offset, step in enumerate(
            range(self._engine.steps - len(losses) + 1, self._engine.steps + 1)
        ):
            times = {name: float(column[offset]) for name, column in columns.items()}
            self._record.append_metrics(of_window, step=step, **times)

    def finish(
        self, steps: list[dict[str, float]], flops: dict[str, Any], peak_tflops: float | None
    ) -> None:
        """Record and print the results after the last window, with MFU in both conventions if the
          peak is known.

        Args:
            steps: seconds of each instrumented step's phases.
        """
        deepspeed = self._engine.deepspeed
        self._loader.record_statistics(self._record)
        if not self._ranks.is_main_process:
            return
        for step, phases_s in enumerate(steps, start=self._engine.steps - len(steps) + 1):
            self._record.append_metrics(StepLine(step=step, phase="breakdown", phases_s=phases_s))
        self._progress.advance(len(steps), "breakdown")
        measured = self._throughput.summary()
        timer = deepspeed.tput_timer
        rate = measured["samples_per_s_per_gpu"]["mean"]
        published, trained, recomputed = (
            flops[f"{it}_gflops"] and 1e9 * flops[f"{it}_gflops"]
            for it in ("published", "training", "recomputed")
        )
        device_name = self._record.summary()["device_name"]  # if mixed, no peak is known
        used = utilization(published, trained, rate, device_name, peak_tflops, recomputed)
        summary = self._record.update_summary(
            measured,
            used,
            self._memory,
            breakdown_s=median_step(steps),
            flops=flops,
            skipped_steps=deepspeed.skipped_steps,
            deepspeed_samples_per_s=timer.samples_per_s(),
            warnings=[*self._stragglers.warnings, *warn_about_mfu(used)],
        )
        print_summary(summary)


def warn_about_mfu(utilization: Summary) -> list[str]:
    """Return a warning for each MFU that can't be a share of the peak."""
    published_percent = utilization["mfu_published_percent"] or 0.0
    model_percent = utilization["mfu_model_percent"] or 0.0
    warnings = []
    if published_percent > 100:
        warnings.append(
            f"MFU of {published_percent:.1f}% in the published convention isn't a share of the peak: it counts captions of"
            " full length (514 tokens for RoBERTa), however long they are"
        )
    if model_percent > MOST_MFU_PERCENT:
        warnings.append(
            f"MFU of {model_percent:.1f}% (executed FLOPs) is implausible: check the throughput and the peak"
        )
    return warnings
