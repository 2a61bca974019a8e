"""What a training run tells of itself: a line a step in `metrics.jsonl`, TensorBoard, DeepSpeed's monitors (Weights & Biases,
CSV), progress on the terminal, and the summary that analysis reads.

Losses and norms stay on the device until some steps are written together, so that no step waits for its own figures.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from clap_ds.dist.agreement import gather_tensor
from clap_ds.engine.session import Session
from clap_ds.record import hardware
from clap_ds.record.clock import PhaseTimer, StepClock
from clap_ds.record.schema import StepLine
from clap_ds.record.statistics import percentile, rates
from clap_ds.record.terminal import Progress as ProgressBar
from clap_ds.training.progress import Progress, SavedCheckpoint
from clap_ds.training.schedule import Schedule

RATE_WINDOWS = 500
"""Most windows of steps whose rates the summary holds, the latest ones."""


class TrainingLog:
    """Account of a run, kept by rank 0; the others take part in what is collective.

    Args:
        progress: kept up to date by the trainer.
    """

    def __init__(self, session: Session, schedule: Schedule, progress: Progress) -> None:
        self._session = session
        self._schedule = schedule
        self._progress = progress
        self._is_first = session.ranks.is_first
        self.timer = PhaseTimer(session.device, instrumented=False)
        self._clock = StepClock(session.device)
        self._rows: list[StepLine] = []
        self._figures: list[Tensor] = []
        self._rates: deque[float] = deque(maxlen=RATE_WINDOWS)
        self._step_s: deque[float] = deque(maxlen=RATE_WINDOWS)
        self._waited_s = self._stepped_s = 0.0
        self._num_windows = 0
        self._checkpoints: list[dict[str, Any]] = []
        self._before_s = progress.train_s
        self._started_s = time.monotonic()
        last = progress.step + schedule.steps_from(progress.samples)
        self._bar = ProgressBar(last, enabled=self._is_first, first=progress.step)

    @property
    def train_s(self) -> float:
        """Seconds since the first step, evaluations and checkpoints included, earlier parts of the run as well."""
        return self._before_s + time.monotonic() - self._started_s

    def begin_step(self) -> None:
        """Call before each step."""
        if not self._rows:
            self._clock.start()
        self.timer.reset()
        self._lr = self._session.engine.deepspeed.get_lr()[0]

    def end_step(self, loss: Tensor) -> None:
        """Call after each step.

        Args:
            loss: of this rank, scalar on the device.
        """
        self._clock.mark()
        engine, progress = self._session.engine, self._progress
        norm = engine.gradient_norm if engine.gradient_norm is not None else torch.full_like(loss, torch.nan)
        scale = engine.model.logit_scale.detach().float().exp().reshape(())
        self._figures.append(torch.stack((loss, norm.to(loss), scale.to(loss))))
        self._rows.append(
            {
                "phase": "train",
                "step": progress.step,
                "samples": progress.samples,
                "epoch": round(progress.epoch, 6),
                "lr": self._lr,
                "data_wait_s": self.timer.seconds["data_wait"],
            }
        )

    def write(self) -> None:
        """Write the steps since the last time. A collective.

        Raises:
            NonFiniteLossError: on all ranks: the loss of one of them was not finite.
        """
        if not self._rows:
            return
        window_s, step_s = self._clock.stop()
        waited_s = sum(row["data_wait_s"] for row in self._rows)
        figures = torch.stack(self._figures).double().flatten()
        ranks = gather_tensor(torch.cat((figures, figures.new_tensor([window_s, waited_s]))))
        if self._is_first:
            ranks = ranks.cpu()
            by_step = ranks[:, :-2].unflatten(1, (-1, 3)).mean(0).tolist()
            self._write_rows(by_step, step_s, window_s=float(ranks[:, -2].max()), waited_s=float(ranks[:, -1].max()))
        self._rows, self._figures = [], []
        self._session.engine.check_loss()

    def _write_rows(self, by_step: list[list[float]], step_s: list[float], *, window_s: float, waited_s: float) -> None:
        record = self._session.record
        memory_bytes = hardware.peak_memory_bytes(self._session.device)
        for row, (loss, norm, scale), seconds in zip(self._rows, by_step, step_s, strict=True):
            row["loss"], row["gradient_norm"], row["logit_scale"] = loss, norm, scale
            row["time_s"], row["memory_bytes"] = seconds, memory_bytes
            record.append_metrics(row)
            self._publish(
                "train", row["step"], {"loss": loss, "lr": row["lr"], "gradient_norm": norm, "logit_scale": scale}
            )
        last = self._rows[-1]
        micro_steps = self._session.engine.deepspeed.gradient_accumulation_steps()
        per_step = self._schedule.samples_per_micro_step * micro_steps
        rate = per_step * len(step_s) / window_s
        self._count(rate / self._session.ranks.world_size, step_s, window_s=window_s, waited_s=waited_s)
        self._publish("train", last["step"], {"samples_per_s": rate, "data_wait_percent": 100 * waited_s / window_s})
        epoch = f"epoch {last['epoch']:.2f}  " if self._schedule.epoch_samples else ""
        self._bar.advance(
            len(step_s),
            f"{epoch}loss {last['loss']:.4f}  lr {last['lr']:.3g}  logit scale {last['logit_scale']:.2f}"
            f"  gradient norm {last['gradient_norm']:.3g}  {rate:,.1f} samples/s  data wait {100 * waited_s / window_s:.1f} %",
        )
        record.update_summary(**self._position(), loss=last["loss"])

    def _count(self, rate: float, step_s: list[float], *, window_s: float, waited_s: float) -> None:
        self._num_windows += 1
        if self._num_windows == 2:  # the first was for warming up
            self._rates.clear()
            self._step_s.clear()
            self._waited_s = self._stepped_s = 0.0
        self._rates.append(rate)
        self._step_s.extend(step_s)
        self._waited_s += waited_s
        self._stepped_s += window_s

    def evaluated(self, metrics: dict[str, float], seconds: float) -> None:
        """Note an evaluation of the present weights."""
        if not self._is_first:
            return
        progress, train_s = self._progress, self.train_s
        line = StepLine(phase="evaluation", step=progress.step, samples=progress.samples, time_s=seconds)
        self._session.record.append_metrics(line, train_s=train_s, **metrics)
        where = {"step": progress.step, "samples": progress.samples, "train_s": train_s}
        self._publish("evaluation", self._progress.step, metrics)
        self._session.record.update_summary(evaluation={**where, **metrics}, best=self._progress.best)
        self._say(f"evaluation at step {self._progress.step}: " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()))

    def saved(self, checkpoint: SavedCheckpoint) -> None:
        """Note a checkpoint, saved or not."""
        if not self._is_first:
            return
        told = {
            "step": checkpoint.step,
            "saved": checkpoint.saved,
            "seconds": checkpoint.end - checkpoint.begin,
            "bytes": checkpoint.bytes,
            "path": str(checkpoint.path) if checkpoint.path else None,
            "problem": checkpoint.problem,
        }
        self._checkpoints.append(told)
        line = StepLine(phase="checkpoint", step=checkpoint.step)
        self._session.record.append_metrics(line, checkpoint=[checkpoint.begin, checkpoint.end], **told)
        self._session.record.update_summary(checkpoints=self._checkpoints[-20:], num_checkpoints=len(self._checkpoints))
        if checkpoint.saved:
            self._say(f"saved {checkpoint.path}: {checkpoint.bytes / 1e6:,.1f} MB in {told['seconds']:.1f} s")

    def summarise(self, **fields: Any) -> None:
        """Bring the summary up to date."""
        if not self._is_first:
            return
        record, world_size = self._session.record, self._session.ranks.world_size
        if self._rates:
            of_windows = rates(self._rates)
            fields |= {
                "samples_per_s_per_gpu": of_windows,
                "samples_per_s": of_windows["median"] * world_size,
                "step_time_s": {
                    "median": statistics.median(self._step_s),
                    "p95": percentile(list(self._step_s), 95),
                },
                "data_wait_percent": 100 * self._waited_s / self._stepped_s,
                "memory_peak_bytes": hardware.peak_memory_bytes(self._session.device),
            }
        record.update_summary(**self._position(), **fields)

    def _position(self) -> dict[str, Any]:
        progress = self._progress
        return {
            "command": "train",
            "step": progress.step,
            "samples": progress.samples,
            "epoch": progress.epoch,
            "train_s": self.train_s,
        }

    def _publish(self, group: str, step: int, values: dict[str, float]) -> None:
        self._session.record.add_scalars(step, **{f"{group}__{name}": value for name, value in values.items()})
        monitor = self._session.engine.deepspeed.monitor
        if monitor.enabled:
            # By samples, as DeepSpeed's own events: Weights & Biases drops what goes back.
            samples = self._session.engine.deepspeed.global_samples
            monitor.write_events([(f"{group}/{name}", value, samples) for name, value in values.items()])

    def _say(self, text: str) -> None:
        print(text, flush=True)

    def __enter__(self) -> TrainingLog:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
