"""Record a benchmark's windows and results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clap_ds.benchmark.breakdown import median_step
from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.data.dataloader import BatchSource
from clap_ds.distributed.collectives import gather
from clap_ds.distributed.init import Ranks
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.metric_logger import Scalars
from clap_ds.engine.throughput import Throughput, Window, gather_window
from clap_ds.flop_count.device_specs import utilization
from clap_ds.run_records import environment
from clap_ds.run_records.metrics_schema import StepLine
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.run_records.sanity_checks import doubtful_mfu, uneven_steps
from clap_ds.run_records.stragglers import Stragglers
from clap_ds.run_records.terminal import Progress, print_summary
from clap_ds.run_records.timers import StepTimes


class BenchReport:
    """Records on rank 0; other ranks take part in collectives. Samples/s include data wait. DeepSpeed's own figure, next to
    them, excludes it and the time between steps."""

    def __init__(
        self,
        record: RunDirectory,
        engine: ClapEngine,
        loader: BatchSource,
        scalars: Scalars,
        sizes: BatchSizes,
        ranks: Ranks,
        num_steps: int,
    ) -> None:
        self._record, self._engine, self._loader, self._scalars = record, engine, loader, scalars
        self._samples, self._ranks = sizes.global_batch, ranks
        self._throughput, self._begin_joules = Throughput(ranks.world_size), math.nan
        self._stragglers = Stragglers(gather(ranks.host))
        self._progress = Progress(num_steps, enabled=ranks.is_main_process)

    def add(self, number: int | None, times: StepTimes, losses: list[Tensor]) -> None:
        """Record a window, or the warm-up (None). A collective; raises NonFiniteError on all ranks if a loss isn't finite."""
        window, world_size = gather_window(times, torch.stack(losses)[:, None]), self._ranks.world_size
        if number is not None:
            own_s = window.step_s[:, 0] - window.data_wait_s[:, 0]
            self._loader.report_throughput((self._samples / world_size / own_s).tolist(), self._ranks.local_world_size)
        if self._ranks.is_main_process:
            self._write_steps(number, window)
            if number is None:
                shown, self._begin_joules = "warm-up", window.joules
            else:
                self._throughput.add(window, self._samples)
                rate = self._samples * len(losses) / window.slowest_s
                self._scalars.write([("bench/samples_per_s", rate, self._engine.deepspeed.global_samples)])
                slow = self._stragglers.add(self._samples, window.step_s[:, 0], window.own_s, window.data_wait_s)
                energy = environment.energy(window.joules - self._begin_joules, number * len(losses) * self._samples)
                self._record.update_summary(slow, energy, samples_per_s_per_gpu=self._throughput.rates())
                shown = f"window {number}: {rate:,.1f} samples/s"
            self._progress.advance(len(losses), shown)
        self._engine.check_loss()

    def _write_steps(self, number: int | None, window: Window) -> None:
        loss_means = window.figures[..., 0].astype(np.float32).mean(axis=1).tolist()
        first_step = self._engine.steps - len(loss_means) + 1
        for offset, loss in enumerate(loss_means):
            line = StepLine(
                step=first_step + offset,
                phase="warmup" if number is None else "timed",
                window=number,
                window_s=window.slowest_s,
                window_data_wait_s=window.waited_s,
                time_s=float(window.step_s[offset, 0]),
                slowest_rank_time_s=float(window.step_s[offset].max()),
                data_wait_s=float(window.data_wait_s[offset, 0]),
                loss=loss,
                memory_bytes=environment.peak_memory_bytes(self._engine.device),
            )
            self._record.append_metrics(line)
        steps = enumerate(loss_means, start=first_step)
        self._scalars.write(("bench/loss", loss, step * self._samples) for step, loss in steps)

    def finish(
        self, steps: list[dict[str, float]], flops: dict[str, Any], warnings: list[str], peak_tflops: float | None
    ) -> None:
        """Record and print the results, with MFU in both conventions if the peak is known. A collective.

        Args:
            steps: seconds of each instrumented step's phases.
        """
        deepspeed, device = self._engine.deepspeed, self._engine.device
        memory = environment.largest_memory(gather(environment.peak_memory(device)))
        device_name = " and ".join(sorted({*gather(environment.device_name(device))}))  # if mixed, no peak is known
        self._loader.record_statistics(self._record)
        if not self._ranks.is_main_process:
            return
        for step, phases_s in enumerate(steps, start=self._engine.steps - len(steps) + 1):
            self._record.append_metrics(StepLine(step=step, phase="breakdown", phases_s=phases_s))
        self._progress.advance(len(steps), "breakdown")
        measured, timer = self._throughput.summary(), deepspeed.tput_timer
        rate = measured["samples_per_s_per_gpu"]["mean"]
        counted = timer.global_step_count > timer.start_step and timer.total_elapsed_time > 0
        published, trained, recomputed = (
            flops[f"{each}_gflops"] * 1e9 for each in ("published", "training", "recomputed")
        )
        used = utilization(published, trained, rate, device_name, peak_tflops, recomputed)
        warnings += doubtful_mfu(used["mfu_published_percent"], used["mfu_model_percent"])
        warnings += uneven_steps(rate, self._samples // self._ranks.world_size, measured["step_time_s"]["median"])
        summary = self._record.update_summary(
            measured,
            used,
            memory,
            breakdown_s=median_step(steps),
            flops=flops,
            skipped_steps=deepspeed.skipped_steps,
            deepspeed_samples_per_s=timer.avg_samples_per_sec() if counted else None,  # but for its first two steps
            deepspeed_timer_synchronized=True,  # at the end of each window
            warnings=warnings + self._stragglers.warnings,
        )
        print_summary(summary)
