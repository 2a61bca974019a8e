"""The measuring protocol on a running session: warm-up, timed windows, instrumented pass, summary.

Samples per second are counted here, data wait included. DeepSpeed's own figure, which leaves it out and times the host alone
unless `timers.throughput.synchronized` has it wait for the device, is shown beside them.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.dist.agreement import gather_tensor
from clap_ds.dist.progress import doing
from clap_ds.engine.session import Session
from clap_ds.flop_count.peaks import utilization
from clap_ds.measuring.flops_profile import measure_flops
from clap_ds.measuring.matmul_ceiling import measure_matmul_tflops
from clap_ds.record import hardware
from clap_ds.record.clock import PhaseTimer, StepClock
from clap_ds.record.plausible import doubtful_mfu
from clap_ds.record.schema import STEP_PHASES, StepLine, StepTime, Summary
from clap_ds.record.statistics import percentile, rates
from clap_ds.record.terminal import Progress, print_summary


@dataclass
class Window:
    """One timed window: `(steps, ranks)` seconds of every step and its wait for data, and every rank's whole time."""

    window_s: list[float]
    step_s: list[list[float]]
    data_wait_s: list[list[float]]

    @property
    def slowest_s(self) -> float:
        return max(self.window_s)


@dataclass
class Measurement:
    """All windows so far, and the rates that follow from them."""

    samples_per_window: int
    windows: list[Window] = field(default_factory=list)

    @property
    def samples_per_s_per_gpu(self) -> list[float]:
        """One value a window; a window lasts until its slowest rank is done."""
        return [self.samples_per_window / window.slowest_s for window in self.windows]

    def steps(self) -> tuple[list[float], list[float]]:
        """Seconds of every step on rank 0, and on the rank that was slowest in that step."""
        rows = [row for window in self.windows for row in window.step_s]
        return [row[0] for row in rows], [max(row) for row in rows]

    def data_wait_share(self) -> float:
        """Share of the time spent waiting for data, on the rank that waited most."""
        num_ranks = len(self.windows[0].window_s)
        total = [sum(window.window_s[rank] for window in self.windows) for rank in range(num_ranks)]
        waited = [sum(row[rank] for window in self.windows for row in window.data_wait_s) for rank in range(num_ranks)]
        return max(wait / time for wait, time in zip(waited, total, strict=True))


def measure(session: Session) -> Summary:
    """Run the protocol of `clap.bench` and write `metrics.jsonl`, `summary.json` and TensorBoard scalars. Returns the summary,
    on ranks other than 0 an empty one."""
    protocol = session.run.clap.bench
    num_steps = protocol.warmup_steps + protocol.windows * protocol.steps_per_window + protocol.breakdown_steps
    measurement = Measurement(protocol.steps_per_window * session.samples_per_step)
    warming: list[Window] = []
    with Progress(num_steps, enabled=session.ranks.is_first) as progress, _manual_garbage_collection():
        for step in range(1, protocol.warmup_steps + 1):
            warming.append(_run_window(session, 1, None))
            progress.advance(1, f"warm-up {step}/{protocol.warmup_steps}")
        _tell_supply(session, warming)
        for number in range(1, protocol.windows + 1):
            measurement.windows.append(_run_window(session, protocol.steps_per_window, number))
            _tell_supply(session, measurement.windows[-1:])
            of_windows = measurement.samples_per_s_per_gpu
            samples_per_s = of_windows[-1] * session.ranks.world_size
            shown = f"window {number}/{protocol.windows}: {samples_per_s:,.1f} samples/s"
            progress.advance(protocol.steps_per_window, shown)
            if session.ranks.is_first:
                session.record.update_summary(samples_per_s_per_gpu=rates(of_windows))
                session.record.add_scalars(session.engine.steps, bench__samples_per_s=samples_per_s)
        breakdown = _measure_breakdown(session, protocol.breakdown_steps)
        progress.advance(protocol.breakdown_steps, "breakdown")
    peak_memory = hardware.peak_memory(session.device)
    utilized = _measure_utilization(session, statistics.median(measurement.samples_per_s_per_gpu))
    if not session.ranks.is_first:
        return {}
    summary = session.record.update_summary(_summarize(session, measurement, breakdown), utilized, peak_memory)
    print_summary(summary)
    return summary


def _tell_supply(session: Session, windows: list[Window]) -> None:
    """By rank 0's steps."""
    steps = (step for window in windows for step in zip(window.step_s, window.data_wait_s, strict=True))
    session.tell_supply(session.samples_per_step / (ranks_s[0] - waited_s[0]) for ranks_s, waited_s in steps)


@contextmanager
def _manual_garbage_collection() -> Iterator[None]:
    """No collection but those asked for, which look only at what is made from here on (0.4 s less each than at everything)."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _run_window(session: Session, num_steps: int, number: int | None) -> Window:
    """Time some steps on every rank together, then write their lines and check their losses."""
    clock = StepClock(session.device)
    timers = [PhaseTimer(session.device, instrumented=False) for _ in range(num_steps)]
    losses: list[Tensor] = []
    gc.collect()
    dist.barrier()
    clock.start()
    for timer in timers:
        losses.append(session.engine.step(session.batches, timer))
        clock.mark()
    window_s, step_s = clock.stop()
    data_wait_s = [timer.seconds["data_wait"] for timer in timers]
    own = torch.tensor([window_s, *step_s, *data_wait_s], dtype=torch.float64, device=session.device)
    columns = gather_tensor(own).T.tolist()  # every rank's times, on every rank
    window = Window(columns[0], columns[1 : 1 + num_steps], columns[1 + num_steps :])
    loss_means = torch.stack(losses)
    dist.all_reduce(loss_means)
    if session.ranks.is_first:
        _write_steps(session, window, (loss_means / session.ranks.world_size).tolist(), number)
    session.engine.check_loss()
    return window


def _write_steps(session: Session, window: Window, losses: list[float], number: int | None) -> None:
    first_step = session.engine.steps - len(losses) + 1
    for offset, loss in enumerate(losses):
        line = StepLine(
            step=first_step + offset,
            phase="warmup" if number is None else "window",
            window=number,
            time_s=window.step_s[offset][0],
            slowest_rank_time_s=max(window.step_s[offset]),
            data_wait_s=window.data_wait_s[offset][0],
            loss=loss,
            memory_bytes=hardware.peak_memory_bytes(session.device),
        )
        session.record.append_metrics(line)
        session.record.add_scalars(first_step + offset, bench__loss=loss)


def _measure_breakdown(session: Session, num_steps: int) -> dict[str, float] | None:
    """Seconds of each phase of a step, mean over steps, on rank 0, with the device synchronised between phases.

    Each step is followed by one more forward and backward that keeps its gradients to itself: what the backward of the step
    took longer than that is communication which nothing hid.
    """
    if num_steps == 0:
        return None
    whole, local = (PhaseTimer(session.device, instrumented=True) for _ in range(2))
    engine = session.engine
    dist.barrier()
    for _ in range(num_steps):
        engine.step(session.batches, whole)
        batch = next(session.batches)
        with engine.sync.off():
            engine.forward_backward(batch, local)
        engine.deepspeed.zero_grad()
    engine.check_loss()
    whole_s, local_s = whole.seconds, local.seconds
    seconds = {phase: whole_s[phase] / num_steps for phase in STEP_PHASES}
    alone_s = session.run.gradient_accumulation_steps * local_s["backward"] / num_steps
    alone = session.ranks.world_size == 1
    seconds["exposed_communication"] = 0.0 if alone else max(0.0, seconds["backward"] - alone_s)
    seconds["backward"] -= seconds["exposed_communication"]
    return seconds


@doing("profiling")
def _measure_utilization(session: Session, samples_per_s_per_gpu: float) -> Summary:
    """MFU in both conventions, where the peak is known, and what its FLOPs rest on. A collective."""
    flops, warnings = measure_flops(session)
    settings = session.run.clap.hardware
    found = utilization(
        flops["published_gflops"] * 1e9,
        flops["model_gflops"] * 1e9,
        samples_per_s_per_gpu,
        hardware.device_name(session.device),
        settings.peak_tflops,
        flops["recomputed_gflops"] * 1e9,
    )
    if settings.measure_peak:
        # On every rank at once, as training uses them: neighbours share power and heat.
        found["matmul_tflops"] = measure_matmul_tflops(session.device)
        found["achievable_percent"] = 100 * found["achieved_tflops"] / found["matmul_tflops"]
    doubts = doubtful_mfu(found["mfu_published_percent"], found["mfu_model_percent"])
    return {**found, "flops": flops, "warnings": [*warnings, *doubts]}


def _summarize(session: Session, measurement: Measurement, breakdown: dict[str, float] | None) -> Summary:
    of_windows = rates(measurement.samples_per_s_per_gpu)
    step_s, slowest_s = measurement.steps()
    samples_per_s = of_windows["median"] * session.ranks.world_size
    audio = session.run.clap.preset().audio
    timer = session.engine.deepspeed.tput_timer
    counted = timer.global_step_count > timer.start_step and timer.total_elapsed_time > 0
    return Summary(
        samples_per_s_per_gpu=of_windows,
        samples_per_s=samples_per_s,
        deepspeed_samples_per_s=timer.avg_samples_per_sec() if counted else None,
        deepspeed_times_host_alone=not timer.config.synchronized,
        step_time_s=StepTime(
            median=statistics.median(step_s),
            p95=percentile(step_s, 95),
            slowest_rank_median=statistics.median(slowest_s),
        ),
        data_wait_percent=100 * measurement.data_wait_share(),
        audio_hours_per_s=samples_per_s * audio.num_samples / audio.sample_rate / 3600,
        breakdown_s=breakdown,
        skipped_steps=session.engine.deepspeed.skipped_steps,
    )
