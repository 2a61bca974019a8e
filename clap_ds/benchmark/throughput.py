"""Run the benchmark protocol on a session: warm-up, timed windows, instrumented pass, summary.

Samples/s include data wait. DeepSpeed's own figure, shown next to them, excludes it and the time between steps.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.benchmark.flops_profile import measure_flops
from clap_ds.distributed.collectives import gather, gather_tensor
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.session import Session
from clap_ds.flop_count.device_specs import utilization
from clap_ds.run_records import environment
from clap_ds.run_records.intervals import rates
from clap_ds.run_records.metrics_schema import STEP_PHASES, Rates, StepLine, StepTime, Summary
from clap_ds.run_records.sanity_checks import doubtful_mfu, uneven_steps
from clap_ds.run_records.stragglers import Floats, Stragglers
from clap_ds.run_records.terminal import Progress, print_summary
from clap_ds.run_records.timers import PhaseTimer, StepClock


class Window(NamedTuple):
    """Seconds of a timed window: `window_s` is (ranks,), the others are (steps, ranks)."""

    window_s: Floats
    step_s: Floats
    data_wait_s: Floats
    own_s: Floats


@dataclass
class Measurement:
    """All windows so far, and statistics over them."""

    samples_per_step: int
    windows: list[Window] = field(default_factory=list)

    def rates(self) -> Rates:
        """Compute samples/s of one GPU over all windows, each as long as its slowest rank's."""
        seconds = [float(window.window_s.max()) for window in self.windows]
        steps = [len(window.step_s) for window in self.windows]
        return rates([self.samples_per_step * n / time_s for n, time_s in zip(steps, seconds, strict=True)], seconds)

    def step_time(self) -> StepTime:
        steps = np.concatenate([window.step_s for window in self.windows])
        first, slowest = steps[:, 0], steps.max(axis=1)
        return StepTime(
            median=float(np.median(first)),
            p95=float(np.percentile(first, 95)),
            slowest_rank_median=float(np.median(slowest)),
        )

    def data_wait_share(self) -> float:
        """Compute the share of time waiting for data, on the rank that waited most in each window."""
        waited_s = sum(window.data_wait_s.sum(axis=0).max() for window in self.windows)
        return float(waited_s / sum(window.window_s.max() for window in self.windows))


def measure(session: Session) -> Summary:
    """Run the protocol of `clap.bench` and write `metrics.jsonl`, `summary.json` and TensorBoard scalars.
    Returns the summary on rank 0 and an empty one elsewhere."""
    protocol, world_size = session.run.clap.bench, session.ranks.world_size
    num_steps = protocol.warmup_steps + protocol.windows * protocol.steps_per_window + protocol.breakdown_steps
    measurement = Measurement(session.samples_per_step)
    progress = Progress(num_steps, enabled=session.ranks.is_main_process)
    stragglers = Stragglers(gather(session.ranks.host))
    gc.collect()
    gc.freeze()  # later collections, triggered manually, only scan new objects
    gc.disable()
    for step in range(1, protocol.warmup_steps + 1):
        _run_window(session, 1, None)
        progress.advance(1, f"warm-up {step}/{protocol.warmup_steps}")
    for number in range(1, protocol.windows + 1):
        window = _run_window(session, protocol.steps_per_window, number)
        session.warn_if_data_bound((session.samples_per_step / (window.step_s - window.data_wait_s)[:, 0]).tolist())
        measurement.windows.append(window)
        samples_per_s = measurement.rates()["windows"][-1] * world_size
        session.scalars.write([("bench/samples_per_s", samples_per_s, session.engine.deepspeed.global_samples)])
        shown = f"window {number}/{protocol.windows}: {samples_per_s:,.1f} samples/s"
        progress.advance(protocol.steps_per_window, shown)
        if session.ranks.is_main_process:
            samples = session.samples_per_step * world_size
            slow = stragglers.add(samples, window.step_s[:, 0], window.own_s, window.data_wait_s)
            session.record.update_summary(slow, samples_per_s_per_gpu=measurement.rates())
    timer = session.engine.deepspeed.tput_timer  # all steps so far except the first two
    counted = timer.global_step_count > timer.start_step and timer.total_elapsed_time > 0
    by_deepspeed = timer.avg_samples_per_sec() if counted else None
    breakdown = _measure_breakdown(session, protocol.breakdown_steps)
    progress.advance(protocol.breakdown_steps, "breakdown")
    gc.enable()
    gc.unfreeze()
    peak_memory = environment.largest_memory(gather(environment.peak_memory(session.device)))
    rate, step_time = measurement.rates(), measurement.step_time()
    utilized = _measure_utilization(session, rate["mean"])
    if not session.ranks.is_main_process:
        return {}
    utilized["warnings"] += uneven_steps(rate["mean"], session.samples_per_step, step_time["median"])
    utilized["warnings"] += stragglers.warnings
    measured = Summary(
        samples_per_s_per_gpu=rate,
        samples_per_s=rate["mean"] * world_size,
        step_time_s=step_time,
        data_wait_percent=100 * measurement.data_wait_share(),
        breakdown_s=breakdown,
        skipped_steps=session.engine.deepspeed.skipped_steps,
        deepspeed_samples_per_s=by_deepspeed,
        deepspeed_timer_synchronized=timer.config.synchronized,
    )
    summary = session.record.update_summary(measured, utilized, peak_memory)
    print_summary(summary)
    return summary


def _run_window(session: Session, num_steps: int, number: int | None) -> Window:
    """Time steps on all ranks, write their lines and check their losses."""
    clock = StepClock(session.device)
    timers = [PhaseTimer(session.device, instrumented=False) for _ in range(num_steps)]
    losses: list[Tensor] = []
    gc.collect()
    dist.barrier()
    clock.start()
    for timer in timers:
        losses.append(session.engine.step(session.batches, timer))
        clock.mark()
    window_s, step_s, own_s = clock.stop()
    data_wait_s = [timer.seconds["data_wait"] for timer in timers]
    own = torch.tensor([window_s, *step_s, *data_wait_s, *own_s], dtype=torch.float64, device=session.device)
    rows = gather_tensor(own).T.cpu().numpy()  # every rank's times, on rank 0
    window = Window(rows[0], *rows[1:].reshape(3, num_steps, -1))
    loss_means = torch.stack(losses)
    dist.all_reduce(loss_means)
    if session.ranks.is_main_process:
        _write_steps(session, window, (loss_means / session.ranks.world_size).tolist(), number)
    session.engine.check_loss()
    return window


def _write_steps(session: Session, window: Window, losses: list[float], number: int | None) -> None:
    first_step = session.engine.steps - len(losses) + 1
    for offset, loss in enumerate(losses):
        line = StepLine(
            step=first_step + offset,
            phase="warmup" if number is None else "timed",
            window=number,
            window_s=float(window.window_s.max()),
            window_data_wait_s=float(window.data_wait_s.sum(axis=0).max()),
            time_s=float(window.step_s[offset, 0]),
            slowest_rank_time_s=float(window.step_s[offset].max()),
            data_wait_s=float(window.data_wait_s[offset, 0]),
            loss=loss,
            memory_bytes=environment.peak_memory_bytes(session.device),
        )
        session.record.append_metrics(line)
    samples = session.samples_per_step * session.ranks.world_size
    session.scalars.write(("bench/loss", loss, step * samples) for step, loss in enumerate(losses, start=first_step))


def _measure_breakdown(session: Session, num_steps: int) -> dict[str, float] | None:
    """Measure a step's phases in seconds, mean over ranks and then median over steps, and write each step's line.

    The device is synchronized between phases, so they may not add up to an uninstrumented step. Exposed communication,
    which includes waits for slower ranks, is the extra time of backward passes over the same ones without all-reduce.
    """
    if num_steps == 0:
        return None
    engine, world_size = session.engine, session.ranks.world_size
    deepspeeds = engine.deepspeed.tput_timer.config
    is_timing, deepspeeds.enabled = deepspeeds.enabled, False
    rows = []
    dist.barrier()
    for _ in range(num_steps + 1):
        local, whole = (PhaseTimer(session.device, instrumented=True) for _ in range(2))
        with engine.sync.off():
            engine.accumulate(session.batches, local)
        engine.deepspeed.zero_grad()
        engine.step(session.batches, whole)
        own, longer_s = whole.seconds, whole.seconds["backward"] - local.seconds["backward"]
        own["exposed_communication"] = longer_s if world_size > 1 else 0.0
        rows.append([own[phase] for phase in STEP_PHASES])
    deepspeeds.enabled = is_timing
    engine.check_loss()
    of_ranks = torch.tensor(rows[1:], dtype=torch.float64, device=session.device)  # the first step is atypical
    dist.all_reduce(of_ranks)
    steps = [dict(zip(STEP_PHASES, row, strict=True)) for row in (of_ranks / world_size).tolist()]
    if session.ranks.is_main_process:
        for step, phases_s in enumerate(steps, start=engine.steps - num_steps + 1):
            session.record.append_metrics(StepLine(step=step, phase="breakdown", phases_s=phases_s))
    seconds = {phase: statistics.median(step[phase] for step in steps) for phase in STEP_PHASES}
    exposed_s = max(0.0, seconds["exposed_communication"])
    return {**seconds, "backward": seconds["backward"] - exposed_s, "exposed_communication": exposed_s}


@activity("profiling")
def _measure_utilization(session: Session, samples_per_s_per_gpu: float) -> Summary:
    """Compute MFU in both conventions, if the peak is known, and its FLOPs. Collective."""
    flops, warnings = measure_flops(session)
    found = utilization(
        flops["published_gflops"] * 1e9,
        flops["training_gflops"] * 1e9,
        samples_per_s_per_gpu,
        " and ".join(sorted({*gather(environment.device_name(session.device))})),  # mixed GPUs have no known peak
        session.run.clap.hardware.peak_tflops,
        flops["recomputed_gflops"] * 1e9,
    )
    doubts = doubtful_mfu(found["mfu_published_percent"], found["mfu_model_percent"])
    return {**found, "flops": flops, "warnings": [*warnings, *doubts]}
