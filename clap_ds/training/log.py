"""Record training steps in the run directory and in `history.jsonl` next to the checkpoints, which spans all restarts.

Losses and norms stay on the device until several steps are written together, to avoid a synchronization per step.
"""

import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clap_ds.distributed.collectives import gather, gather_tensor
from clap_ds.engine.loss import LOSSES
from clap_ds.engine.metric_logger import Scalar
from clap_ds.engine.session import Session
from clap_ds.run_records import environment
from clap_ds.run_records.intervals import rates
from clap_ds.run_records.jsonl import JsonlWriter
from clap_ds.run_records.metrics_schema import StepLine, StepTime, Summary
from clap_ds.run_records.stragglers import Stragglers
from clap_ds.run_records.terminal import Progress
from clap_ds.run_records.timers import PhaseTimer, StepClock
from clap_ds.training.collapse import LastSteps
from clap_ds.training.train_state import SavedCheckpoint, Schedule, TrainingProgress, pairs_together

WINDOWS = 256  # maximum in a summary; more are merged with their neighbors


class ThroughputMeter:
    """Throughput of a run's steps after the first window, without the time between windows."""

    def __init__(self, samples_per_step: int, world_size: int) -> None:
        self._samples_per_step, self._world_size = samples_per_step, world_size
        self._windows: list[tuple[int, float, float]] = []
        self._step_s = array("d")

    def add(self, window_s: float, waited_s: float, step_s: list[float]) -> None:
        """Add a window of steps: seconds on the slowest rank, longest wait for data, and each step's seconds on rank 0."""
        if self._windows:
            self._step_s.extend(step_s)
        self._windows.append((self._samples_per_step * len(step_s), window_s, waited_s))

    def summary(self) -> Summary:
        """Return the statistics; empty before the second window."""
        windows = np.array(self._windows[1:], float)
        if not len(windows):
            return {}
        every = -(-len(windows) // WINDOWS)
        samples, window_s, waited_s = np.add.reduceat(windows, range(0, len(windows), every)).T
        found = rates((samples / window_s / self._world_size).tolist(), window_s.tolist())
        median_s = np.median(self._step_s)
        return Summary(
            samples_per_s_per_gpu=found,
            samples_per_s=found["mean"] * self._world_size,
            step_time_s=StepTime(median=float(median_s), p95=float(np.percentile(self._step_s, 95))),
            data_wait_percent=float(100 * waited_s.sum() / window_s.sum()),
        )


class TrainingLog:
    """Log of rank 0; other ranks take part in collectives. `folder` holds `history.jsonl`."""

    def __init__(self, session: Session, schedule: Schedule, progress: TrainingProgress, folder: Path) -> None:
        self._session, self._progress, self._folder = session, progress, folder
        self._is_first = session.ranks.is_main_process
        self._history = JsonlWriter(folder / "history.jsonl")
        if self._is_first:
            progress.train_s = max(progress.train_s, self._history.truncate_after(progress.step))
            session.record.update_summary(history=str(folder / "history.jsonl"))
        self._clock = StepClock(session.device)
        self._rows: list[tuple[StepLine, PhaseTimer, Tensor]] = []  # tensor: loss, norm, logit scale, skipped
        self._samples = schedule.samples_per_step
        self._pace, self._memory = ThroughputMeter(self._samples, session.ranks.world_size), Summary()
        self._stragglers = Stragglers(gather(session.ranks.host))
        pairs, kind = pairs_together(session.run, session.ranks.world_size), LOSSES[session.run.clap.loss.kind]
        self.last_steps, self._collapse = LastSteps(kind.chance(pairs)), list[str]()
        self._checkpoints: list[dict[str, Any]] = []
        self._before_s, self._started_s = progress.train_s, time.monotonic()
        last = progress.step + schedule.ahead(progress.samples)[0]
        self._shown = Progress(last, enabled=self._is_first, first=progress.step)

    @property
    def train_s(self) -> float:
        """Seconds since the first step, including evaluations, checkpoints and earlier starts of the run."""
        return self._before_s + time.monotonic() - self._started_s

    def begin_step(self) -> PhaseTimer:
        """Return the timer of the next step's phases. Call before each step."""
        if not self._rows:
            self._clock.start()
        self._timer = PhaseTimer(self._session.device, instrumented=False)
        self._lr = self._session.engine.deepspeed.get_lr()[0]
        return self._timer

    def end_step(self, loss: Tensor) -> None:
        """Record a step. `loss`: this rank's, a scalar on the device."""
        self._clock.mark()
        engine, now = self._session.engine, self._progress
        norm = engine.gradient_norm if engine.gradient_norm is not None else torch.full_like(loss, torch.nan)
        scale = engine.model.logit_scale.detach().float().exp().reshape(())
        row = StepLine(phase="train", step=now.step, samples=now.samples, epoch=now.epoch, lr=self._lr)
        figures = torch.stack((loss, norm.to(loss), scale.to(loss), engine.is_skipped.to(loss)))
        self._rows.append((row, self._timer, figures))

    def write(self) -> None:
        """Write the steps since the last call. A collective; raises NonFiniteError on all ranks if any loss isn't finite."""
        if not self._rows:
            return
        window_s, step_s, own_s = self._clock.stop()
        self._session.engine.count_skipped()
        rows, timers, figures = zip(*self._rows, strict=True)
        self._rows = []
        waited_s = [timer.seconds["data_wait"] for timer in timers]
        device, own_samples = self._session.device, self._samples / self._session.ranks.world_size
        self._session.warn_if_data_bound(
            own_samples / (all_s - waited) for all_s, waited in zip(step_s, waited_s, strict=True)
        )
        times = torch.tensor([own_s, waited_s], dtype=torch.float64, device=device).T
        own_figures = torch.cat((torch.stack(figures).double(), times), dim=1)
        own = [window_s, sum(waited_s), *environment.peak_memory(device)]
        ranks = gather_tensor(torch.cat((own_figures.flatten(), own_figures.new_tensor(own)))).cpu()
        if self._is_first:
            by_rank = ranks[:, : own_figures.numel()].unflatten(1, (-1, 6))
            by_step = by_rank[..., :4].mean(0).tolist()
            own_s, data_wait_s = by_rank[..., 4:].permute(2, 1, 0).numpy()
            self._slow = self._stragglers.add(self._samples, step_s, own_s, data_wait_s)
            window_s, all_waited_s, *memory = ranks[:, own_figures.numel() :].amax(0).tolist()
            self._memory = environment.largest_memory([memory])
            self._pace.add(window_s, all_waited_s, step_s)
            for row, waited, seconds in zip(rows, waited_s, step_s, strict=True):
                row.update(data_wait_s=waited, time_s=seconds, memory_bytes=environment.peak_memory_bytes(device))
            self._write_rows(rows, by_step, self._samples * len(rows) / window_s, 100 * all_waited_s / window_s)
        self._session.engine.check_loss()

    def _write_rows(
        self, rows: tuple[StepLine, ...], by_step: list[list[float]], rate: float, wait_percent: float
    ) -> None:
        last, num_skipped = rows[-1], self._session.engine.deepspeed.skipped_steps
        scalars: list[Scalar] = []
        for row, (loss, norm, scale, skipped) in zip(rows, by_step, strict=True):
            if skipped:
                row["skipped"] = True
            self.last_steps.add(loss, norm, scale)
            figures = {"loss": loss, "lr": row["lr"], "gradient_norm": norm, "logit_scale": scale}
            self._append(row, **figures)
            scalars += _scalars("train", figures, row["samples"])
        scalars += _scalars("train", {"samples_per_s": rate, "data_wait_percent": wait_percent}, last["samples"])
        self._session.scalars.write(scalars)
        epoch = f"epoch {last['epoch']:.2f}  " if last["epoch"] is not None else ""
        self._shown.advance(
            len(rows),
            f"{epoch}loss {loss:.4f}  lr {last['lr']:.3g}  logit scale {scale:.2f}  gradient norm {norm:.3g}"
            f"  {rate:,.1f} samples/s  data wait {wait_percent:.1f}%"
            + (f"  {num_skipped} steps skipped: loss or gradient not finite" if num_skipped else ""),
        )
        self._session.record.update_summary(self._position(), self._slow, loss=loss)
        if not self._collapse and (problem := self.last_steps.problem(last["step"], self._folder)):
            self._collapse.append(problem)
            print(f"warning: {problem}", flush=True)
            self._session.record.update_summary(warnings=self._collapse)

    def evaluated(self, metrics: dict[str, float], chances: dict[str, float], seconds: float) -> None:
        if not self._is_first:
            return
        step, samples, train_s = self._progress.step, self._progress.samples, self.train_s
        line = StepLine(phase="evaluation", step=step, samples=samples, time_s=seconds, chance=chances)
        self._append(line, train_s=train_s, **metrics)
        self._session.scalars.write(_scalars("evaluation", metrics, samples))
        evaluation = {"step": step, "samples": samples, "train_s": train_s, **metrics}
        self._session.record.update_summary(evaluation=evaluation, best=self._progress.best)
        print(f"evaluation at step {step}: " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()), flush=True)

    def saved(self, checkpoint: SavedCheckpoint | None) -> None:
        """Record the result of saving a checkpoint."""
        if not self._is_first or checkpoint is None:
            return
        seconds, stalled_s = checkpoint.end - checkpoint.begin, checkpoint.stalled_s
        outcome: dict[str, Any] = {
            "step": checkpoint.step, "saved": checkpoint.saved, "seconds": seconds, "bytes": checkpoint.bytes,
            "path": str(checkpoint.path) if checkpoint.path else None, "problem": checkpoint.problem, "stalled_s": stalled_s,
        }  # fmt: skip
        self._checkpoints.append(outcome)
        self._append({"phase": "checkpoint"}, checkpoint=[checkpoint.begin, checkpoint.begin + stalled_s], **outcome)
        self._session.record.update_summary(checkpoints=self._checkpoints[-20:])
        if checkpoint.saved:
            size = f"{checkpoint.bytes / 1e6:,.1f} MB in {seconds:.1f} s"
            print(f"saved {checkpoint.path}: {size}, blocking training for {stalled_s:.2f} s", flush=True)

    def close(self, **fields: Any) -> None:
        if not self._is_first:
            return
        self._history.close()
        pace = self._pace.summary()
        warnings = [*self._collapse, *self._stragglers.warnings]
        self._session.record.update_summary(self._position(), pace, self._memory, warnings=warnings, **fields)

    def _position(self) -> Summary:
        now, skipped = self._progress, self._session.engine.deepspeed.skipped_steps
        position = Summary(command="train", step=now.step, samples=now.samples, epoch=now.epoch, train_s=self.train_s)
        return position | Summary(skipped_steps=skipped)

    def _append(self, line: StepLine, **more: Any) -> None:
        self._session.record.append_metrics(line, **more)
        self._history.append({"train_s": self.train_s, **line, **more})


def _scalars(group: str, values: dict[str, float], samples: int) -> list[Scalar]:
    return [(f"{group}/{name}", value, samples) for name, value in values.items()]
