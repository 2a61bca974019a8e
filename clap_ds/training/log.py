"""What is recorded of a training run: a line a step in `metrics.jsonl`, scalars for DeepSpeed's monitor, progress on the terminal,
the summary that analysis reads; and beside the checkpoints `history.jsonl`, through all restarts.

Losses and norms stay on the device until some steps are written together, so that no step waits for its own figures.
"""

import statistics
import time
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clap_ds.engine.scalars import Scalar
from clap_ds.engine.session import Session
from clap_ds.ranks.agreement import gather_tensor
from clap_ds.record import hardware
from clap_ds.record.clock import PhaseTimer, StepClock
from clap_ds.record.plausible import uneven_steps
from clap_ds.record.schema import StepLine, StepTime, Summary
from clap_ds.record.statistics import percentile, rates
from clap_ds.record.terminal import Progress
from clap_ds.training.schedule import SavedCheckpoint, Schedule
from clap_ds.training.start import TrainingStart

WINDOWS = 256
"""Most windows that a summary is of: where there would be more, neighbours are taken together."""


class Window(NamedTuple):
    """Steps written together: samples on all ranks, and on the slowest rank seconds of all and those of waiting for data."""

    samples: int
    window_s: float
    waited_s: float


class Pace:
    """How fast all steps of a run were, after the first window, which is for warming up; in bounded memory, however long it is.

    What lies between windows, evaluations and checkpoints, isn't in it.
    """

    def __init__(self) -> None:
        self._windows: list[Window] = []
        self._merged, self._added = 1, 0
        # How often a step took so long, to four digits, for so many samples.
        self._steps: Counter[tuple[float, int]] = Counter()

    def add(self, window: Window, step_s: list[float], step_samples: list[int]) -> None:
        """A window, and seconds on rank 0 and samples of each of its steps."""
        self._added += 1
        if self._added == 2:
            self._windows.clear()
            self._steps.clear()
        self._steps.update(zip((float(f"{time_s:.4g}") for time_s in step_s), step_samples, strict=True))
        if self._windows and (self._added - 2) % self._merged:
            window = _together(self._windows.pop(), window)
        elif len(self._windows) == WINDOWS:
            self._windows = [_together(*pair) for pair in zip(self._windows[::2], self._windows[1::2], strict=True)]
            self._merged *= 2
        self._windows.append(window)

    def summary(self, world_size: int) -> Summary:
        """Rates, step times and the wait for data; empty before the first window."""
        if not self._windows:
            return {}
        samples, window_s, waited_s = zip(*self._windows, strict=True)
        found = rates([n / s / world_size for n, s in zip(samples, window_s, strict=True)], window_s)
        steps = list(self._steps.elements())
        step_s = [time_s for time_s, _ in steps]
        sample_s = statistics.median(time_s / number * world_size for time_s, number in steps)
        return Summary(
            samples_per_s_per_gpu=found,
            samples_per_s=found["mean"] * world_size,
            step_time_s=StepTime(median=statistics.median(step_s), p95=percentile(step_s, 95)),
            data_wait_percent=100 * sum(waited_s) / sum(window_s),
            warnings=uneven_steps(found["mean"], 1, sample_s),
        )


def _together(first: Window, second: Window) -> Window:
    return Window(first.samples + second.samples, first.window_s + second.window_s, first.waited_s + second.waited_s)


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
        self._pace = Pace()
        self._memory: Summary = {}
        self._samples_before = 0
        self._checkpoints: list[dict[str, Any]] = []
        self._before_s = progress.train_s
        self._started_s = time.monotonic()
        last = progress.step + schedule.ahead(progress.samples)[0]
        self._shown = Progress(last, enabled=self._is_first, first=progress.step)

    @property
    def train_s(self) -> float:
        """Seconds since the first step, evaluations and checkpoints included, earlier starts of the run as well."""
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
        row = StepLine(phase="train", step=now.step, samples=now.samples, epoch=now.epoch, lr=self._lr)
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
        figures = torch.stack(self._figures).double()
        own = [window_s, waited_s, *hardware.peak_memory(self._session.device)]
        ranks = gather_tensor(torch.cat((figures.flatten(), figures.new_tensor(own)))).cpu()
        if self._is_first:
            by_step = ranks[:, : figures.numel()].unflatten(1, (-1, 4)).mean(0).tolist()
            window_s, waited_s, *memory = ranks[:, figures.numel() :].amax(0).tolist()
            self._memory = hardware.largest_memory([memory])
            window = Window(edges[-1] - edges[0], window_s, waited_s)
            self._pace.add(window, step_s, [after - before for before, after in pairwise(edges)])
            self._write_rows(by_step, step_s, window)
        self._rows, self._timers, self._figures = [], [], []
        self._session.engine.check_loss()

    def _write_rows(self, by_step: list[list[float]], step_s: list[float], window: Window) -> None:
        scalars: list[Scalar] = []
        memory_bytes = hardware.peak_memory_bytes(self._session.device)
        for row, (loss, norm, scale, skipped), seconds in zip(self._rows, by_step, step_s, strict=True):
            if skipped:
                row["skipped"] = True
            figures = {"loss": loss, "lr": row["lr"], "gradient_norm": norm, "logit_scale": scale}
            self._append(row, **figures, time_s=seconds, memory_bytes=memory_bytes)
            scalars += _scalars("train", figures, row["samples"])
        last, rate = self._rows[-1], window.samples / window.window_s
        wait_percent = 100 * window.waited_s / window.window_s
        more = {"samples_per_s": rate, "data_wait_percent": wait_percent}
        self._session.scalars.write(scalars + _scalars("train", more, last["samples"]))
        epoch = f"epoch {last['epoch']:.2f}  " if last["epoch"] is not None else ""
        num_skipped = self._session.engine.deepspeed.skipped_steps
        self._shown.advance(
            len(step_s),
            f"{epoch}loss {loss:.4f}  lr {last['lr']:.3g}  logit scale {scale:.2f}  gradient norm {norm:.3g}"
            f"  {rate:,.1f} samples/s  data wait {wait_percent:.1f} %"
            + (f"  {num_skipped} steps skipped: loss or gradient not finite" if num_skipped else ""),
        )
        self._session.record.update_summary(self._position(), loss=loss)

    def evaluated(self, metrics: dict[str, float], chances: dict[str, float], seconds: float) -> None:
        """Note an evaluation of the present weights, and what chance would reach."""
        if not self._is_first:
            return
        step, samples, train_s = self._progress.step, self._progress.samples, self.train_s
        line = StepLine(phase="evaluation", step=step, samples=samples, time_s=seconds, chance=chances)
        self._append(line, train_s=train_s, **metrics)
        self._session.scalars.write(_scalars("evaluation", metrics, samples))
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
        pace = self._pace.summary(self._session.ranks.world_size)
        for text in pace.get("warnings", []):
            print(f"warning: {text}", flush=True)
        self._session.record.update_summary(self._position(), pace, self._memory, **fields)

    def _position(self) -> Summary:
        now = self._progress
        skipped = self._session.engine.deepspeed.skipped_steps
        position = Summary(command="train", step=now.step, samples=now.samples, epoch=now.epoch, train_s=self.train_s)
        return position | Summary(skipped_steps=skipped)

    def _append(self, line: StepLine, **more: Any) -> None:
        """A line for this start of the run, and for the whole of it."""
        self._session.record.append_metrics(line, **more)
        self._start.history.append({"train_s": self.train_s, **line, **more})


def _scalars(group: str, values: dict[str, float], samples: int) -> list[Scalar]:
    return [(f"{group}/{name}", value, samples) for name, value in values.items()]
