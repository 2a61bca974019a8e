"""The account of a training run: a line a step in `metrics.jsonl`, DeepSpeed's monitors (Weights & Biases, CSV), progress on
the terminal, the summary that analysis reads; and beside the checkpoints `history.jsonl` and TensorBoard, through all restarts.

Losses and norms stay on the device until some steps are written together, so that no step waits for its own figures.
"""

import statistics
import time
from collections import deque
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from clap_ds.dist.agreement import gather_tensor
from clap_ds.engine.session import Session
from clap_ds.record import hardware
from clap_ds.record.clock import PhaseTimer, StepClock
from clap_ds.record.schema import StepLine, Summary
from clap_ds.record.statistics import percentile, rates
from clap_ds.record.stream import unless_full
from clap_ds.record.terminal import Progress
from clap_ds.training.schedule import SavedCheckpoint, Schedule
from clap_ds.training.start import TrainingStart

WINDOWS = 500
"""Most windows of steps that the summary is of, the latest ones."""


class _Window(NamedTuple):
    """Steps written together: samples/s, seconds of each on rank 0, and on the slowest rank seconds of all and those of waiting
    for data."""

    rate: float
    step_s: list[float]
    window_s: float
    waited_s: float


class TrainingLog:
    """Account of a run, kept by rank 0; the others take part in what is collective. The trainer keeps `progress` up to date."""

    def __init__(self, session: Session, schedule: Schedule, start: TrainingStart) -> None:
        self._session, self._schedule, self._start = session, schedule, start
        self._progress = progress = start.progress
        self._is_first = session.ranks.is_first
        self._timers: list[PhaseTimer] = []
        self._clock = StepClock(session.device)
        self._rows: list[StepLine] = []
        self._figures: list[Tensor] = []
        self._windows: deque[_Window] = deque(maxlen=WINDOWS)
        self._samples_before = 0
        self._checkpoints: list[dict[str, Any]] = []
        self._before_s = progress.train_s
        self._started_s = time.monotonic()
        last = progress.step + schedule.steps_from(progress.samples)
        self._bar = Progress(last, enabled=self._is_first, first=progress.step)

    @property
    def train_s(self) -> float:
        """Seconds since the first step, evaluations and checkpoints included, earlier parts of the run as well."""
        return self._before_s + time.monotonic() - self._started_s

    def begin_step(self) -> None:
        """Call before each step."""
        if not self._rows:
            self._samples_before = self._progress.samples
            self._clock.start()
        self.timer = PhaseTimer(self._session.device, instrumented=False)
        self._lr = self._session.engine.deepspeed.get_lr()[0]

    def end_step(self, loss: Tensor) -> None:
        """Call after each step with this rank's loss, scalar on the device."""
        self._clock.mark()
        engine, now = self._session.engine, self._progress
        norm = engine.gradient_norm if engine.gradient_norm is not None else torch.full_like(loss, torch.nan)
        scale = engine.model.logit_scale.detach().float().exp().reshape(())
        self._figures.append(torch.stack((loss, norm.to(loss), scale.to(loss), engine.is_skipped.to(loss))))
        row = StepLine(phase="train", step=now.step, samples=now.samples, epoch=round(now.epoch, 6), lr=self._lr)
        self._rows.append(row)
        self._timers.append(self.timer)

    def write(self) -> None:
        """Write the steps since the last time. A collective; raises NonFiniteError on all ranks if one's loss was."""
        if not self._rows:
            return
        window_s, step_s = self._clock.stop()
        self._session.engine.count_skipped()
        for row, timer in zip(self._rows, self._timers, strict=True):
            row["data_wait_s"] = timer.seconds["data_wait"]
        edges = [self._samples_before, *(row["samples"] for row in self._rows)]
        self._session.tell_supply(
            (after - before) / self._session.ranks.world_size / (seconds - row["data_wait_s"])
            for before, after, seconds, row in zip(edges, edges[1:], step_s, self._rows, strict=False)
        )
        waited_s = sum(row["data_wait_s"] for row in self._rows)
        figures = torch.stack(self._figures).double().flatten()
        ranks = gather_tensor(torch.cat((figures, figures.new_tensor([window_s, waited_s]))))
        if self._is_first:
            ranks = ranks.cpu()
            by_step = ranks[:, :-2].unflatten(1, (-1, 4)).mean(0).tolist()
            samples = self._rows[-1]["samples"] - self._samples_before
            window_s, waited_s = ranks[:, -2:].amax(0).tolist()
            self._write_rows(by_step, _Window(samples / window_s, step_s, window_s, waited_s))
        self._rows, self._timers, self._figures = [], [], []
        self._session.engine.check_loss()

    def _write_rows(self, by_step: list[list[float]], window: _Window) -> None:
        record = self._session.record
        memory_bytes = hardware.peak_memory_bytes(self._session.device)
        for row, (loss, norm, scale, skipped), seconds in zip(self._rows, by_step, window.step_s, strict=True):
            if skipped:
                row["skipped"] = True
            figures = {"loss": loss, "lr": row["lr"], "gradient_norm": norm, "logit_scale": scale}
            self._append(row, **figures, time_s=seconds, memory_bytes=memory_bytes)
            self._publish("train", row["step"], figures)
        last, wait_percent = self._rows[-1], 100 * window.waited_s / window.window_s
        self._windows.append(window)
        self._publish("train", last["step"], {"samples_per_s": window.rate, "data_wait_percent": wait_percent})
        epoch = f"epoch {last['epoch']:.2f}  " if self._schedule.epoch_samples else ""
        num_skipped = self._session.engine.deepspeed.skipped_steps
        self._bar.advance(
            len(window.step_s),
            f"{epoch}loss {loss:.4f}  lr {last['lr']:.3g}  logit scale {scale:.2f}  gradient norm {norm:.3g}"
            f"  {window.rate:,.1f} samples/s  data wait {wait_percent:.1f} %"
            + (f"  {num_skipped} steps skipped: loss or gradient not finite" if num_skipped else ""),
        )
        record.update_summary(self._position(), loss=loss)

    def evaluated(self, metrics: dict[str, float], chances: dict[str, float], seconds: float) -> None:
        """Note an evaluation of the present weights, and what chance would reach."""
        if not self._is_first:
            return
        step, samples, train_s = self._progress.step, self._progress.samples, self.train_s
        line = StepLine(phase="evaluation", step=step, samples=samples, time_s=seconds, chance=chances)
        self._append(line, train_s=train_s, **metrics)
        self._publish("evaluation", step, metrics)
        evaluation = {"step": step, "samples": samples, "train_s": train_s, **metrics}
        self._session.record.update_summary(evaluation=evaluation, best=self._progress.best)
        print(f"evaluation at step {step}: " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()), flush=True)

    def saved(self, checkpoint: SavedCheckpoint) -> None:
        """Note a checkpoint, saved or not."""
        if not self._is_first:
            return
        seconds, path = checkpoint.end - checkpoint.begin, str(checkpoint.path) if checkpoint.path else None
        outcome: dict[str, Any] = {"step": checkpoint.step, "saved": checkpoint.saved, "seconds": seconds}
        outcome |= {"bytes": checkpoint.bytes, "path": path, "problem": checkpoint.problem}
        self._checkpoints.append(outcome)
        interval = [checkpoint.begin, checkpoint.end]
        self._append({"phase": "checkpoint"}, checkpoint=interval, **outcome)
        self._session.record.update_summary(checkpoints=self._checkpoints[-20:], num_checkpoints=len(self._checkpoints))
        if checkpoint.saved:
            print(f"saved {path}: {checkpoint.bytes / 1e6:,.1f} MB in {seconds:.1f} s", flush=True)

    def summarise(self, **fields: Any) -> None:
        """Bring the summary up to date."""
        if not self._is_first:
            return
        if self._windows:
            windows = list(self._windows)[1:] or list(self._windows)  # the first was for warming up
            world_size = self._session.ranks.world_size
            found = rates([window.rate / world_size for window in windows])
            step_s = [seconds for window in windows for seconds in window.step_s]
            waited_s, window_s = (sum(getattr(window, name) for window in windows) for name in ("waited_s", "window_s"))
            fields |= {
                "samples_per_s_per_gpu": found,
                "samples_per_s": found["median"] * world_size,
                "step_time_s": {"median": statistics.median(step_s), "p95": percentile(step_s, 95)},
                "data_wait_percent": 100 * waited_s / window_s,
                **hardware.peak_memory(self._session.device),
            }
        self._session.record.update_summary(self._position(), **fields)

    def _position(self) -> Summary:
        now = self._progress
        skipped = self._session.engine.deepspeed.skipped_steps
        position = Summary(command="train", step=now.step, samples=now.samples, epoch=now.epoch, train_s=self.train_s)
        return position | Summary(skipped_steps=skipped)

    def _append(self, line: StepLine, **more: Any) -> None:
        """A line for this start of the run, and for the whole of it."""
        self._session.record.append_metrics(line, **more)
        self._start.history.append({**line, **more})

    def _publish(self, group: str, step: int, values: dict[str, float]) -> None:
        self._start.history.add_scalars(step, **{f"{group}__{name}": value for name, value in values.items()})
        deepspeed = self._session.engine.deepspeed
        if deepspeed.monitor.enabled:
            # By samples, as DeepSpeed's own events: Weights & Biases drops what goes back.
            events = [(f"{group}/{name}", value, deepspeed.global_samples) for name, value in values.items()]
            with unless_full("what DeepSpeed's monitors keep"):
                deepspeed.monitor.write_events(events)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *ending: Any) -> None:
        self._bar.__exit__(*ending)
