"""Record training steps in the run directory and in `history.jsonl` next to the checkpoints, which
spans all restarts.

Losses and norms stay on the device until several steps are written together, to avoid a
synchronization per step.

Messages of training at its start and after non-finite numbers.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clap_ds.checkpoint.checkpoint_files import read_all
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.train_state import HISTORY, SavedCheckpoint, TrainState
from clap_ds.data.dataloader import BatchSource
from clap_ds.distributed.collectives import gather, run_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.metrics.stragglers import Stragglers
from clap_ds.metrics.tensorboard import Scalar, Scalars
from clap_ds.metrics.terminal import Progress
from clap_ds.metrics.throughput import Throughput, Window, gather_window
from clap_ds.run_records import environment
from clap_ds.run_records.run_dir import JsonlWriter, RunDirectory
from clap_ds.run_records.schema import StepLine, Summary
from clap_ds.training.plan import TrainPlan
from clap_ds.utils.errors import duration_of

FIGURES = ("loss", "gradient_norm", "logit_scale")
FEW_FAILED_SAVES = 2
"""Failed saves in a row that are warned of alone. From the next one on, the log also says how much
would be lost."""


class TrainLogger:
    """Log of rank 0; other ranks take part in collectives. Times are of the windows from
    `begin_step` to `write`.

    Args:
        folder: holds `history.jsonl`.
    """

    def __init__(
        self,
        record: RunDirectory,
        engine: ClapEngine,
        loader: BatchSource,
        scalars: Scalars,
        plan: TrainPlan,
        state: TrainState,
        ranks: Ranks,
        folder: Path,
    ) -> None:
        self._record = record
        self._engine = engine
        self._loader = loader
        self._scalars = scalars
        self._plan = plan
        self._state = state
        self._ranks = ranks
        self._folder = folder
        self._is_first = ranks.is_main_process
        engine.norm_wanted = True
        self._history = JsonlWriter(folder / HISTORY)
        if self._is_first:
            state.train_s = max(state.train_s, self._history.truncate_after(state.step))
            record.update_summary(history=str(folder / HISTORY), epoch_samples=plan.epoch_samples)
        self._lines: list[tuple[StepLine, Tensor]] = []  # tensor: loss, norm, logit scale, skipped
        self._is_warm = False
        self._batch = 0
        self._throughput = Throughput(ranks.world_size)
        self._memory = Summary()
        self._first_samples = state.samples
        self._joules = math.nan
        self._begin_joules = sum(gather(environment.energy_joules(engine.device)))
        self._stragglers = Stragglers(gather(ranks.host))
        self._checkpoints: list[dict[str, Any]] = []
        self._failed_saves = 0
        self._saved_s = time.time()  # beginning of the last complete save, or of this start
        self._before_s = state.train_s
        self._started_s = time.monotonic()
        self._shown = Progress(plan.last_step(state), enabled=self._is_first, first=state.step)

    @property
    def train_s(self) -> float:
        """Seconds since the first step, including evaluations, checkpoints and earlier starts of
        the run."""
        return self._before_s + time.monotonic() - self._started_s

    def begin_step(self) -> None:
        if (batch := self._plan.batch(self._state.samples)) != self._batch:
            self.write()  # a window's steps have one global batch
            self._batch = batch
        self._engine.timer.start()
        self._lr = self._engine.deepspeed.get_lr()[0]

    def end_step(self, loss: Tensor) -> None:
        """Record a step. `loss`: this rank's, a scalar on the device."""
        engine = self._engine
        now = self._state
        engine.timer.mark()
        norm = (
            engine.gradient_norm
            if engine.gradient_norm is not None
            else torch.full_like(loss, torch.nan)
        )
        scale = engine.model.logit_scale.detach().float().exp().reshape(())
        line = StepLine(
            phase="train", step=now.step, samples=now.samples, epoch=now.epoch, lr=self._lr
        )
        self._lines.append(
            (line, torch.stack((loss, norm.to(loss), scale.to(loss), engine.is_skipped.to(loss))))
        )

    def write(self) -> None:
        """Write the steps since the last call. A collective; raises NonFiniteError on all ranks if
        any loss isn't finite."""
        if not self._lines:
            return
        times = self._engine.stop_timers()
        self._engine.count_skipped()
        lines, figures = zip(*self._lines, strict=True)
        self._lines = []
        window = gather_window(times, torch.stack(figures))
        rates = self._batch / self._ranks.world_size / (window.step_s - window.data_wait_s)[:, 0]
        self._loader.report_throughput(rates.tolist(), self._ranks.local_world_size)
        if self._is_first:
            self._write_window(lines, window)
        self._engine.check_loss()

    def _write_window(self, lines: tuple[StepLine, ...], window: Window) -> None:
        last = lines[-1]
        num_skipped = self._engine.deepspeed.skipped_steps
        samples = self._batch
        first_s = window.step_s[:, 0]
        slow = self._stragglers.add(samples, first_s, window.own_s, window.data_wait_s)
        if self._is_warm:
            self._throughput.add(window, samples)
        self._is_warm = True
        self._memory = window.memory
        self._joules = window.joules - self._begin_joules
        scalars = list[Scalar]()
        memory = environment.peak_memory_bytes(self._engine.device)
        each_s = zip(
            lines,
            window.figures.mean(axis=1).tolist(),
            first_s,
            window.data_wait_s[:, 0],
            strict=True,
        )
        for line, means, time_s, wait_s in each_s:
            line |= StepLine(time_s=float(time_s), data_wait_s=float(wait_s), memory_bytes=memory)
            if means[-1]:
                line["skipped"] = True
            figures = dict(zip(FIGURES, means, strict=False)) | {"lr": line["lr"]}
            self._append(line, **figures)
            scalars += _scalars("train", figures, line["samples"])
        rate = samples * len(lines) / window.slowest_s
        wait_percent = 100 * window.waited_s / window.slowest_s
        scalars += _scalars(
            "train", {"samples_per_s": rate, "data_wait_percent": wait_percent}, last["samples"]
        )
        self._scalars.write(scalars)
        epoch = f"epoch {last['epoch']:.2f}  " if last["epoch"] is not None else ""
        loss, norm, scale, _ = means
        self._shown.advance(
            len(lines),
            f"{epoch}loss {loss:.4f}  lr {last['lr']:.3g}  logit scale {scale:.2f}  gradient norm {norm:.3g}"
            f"  {rate:,.1f} samples/s  data wait {wait_percent:.1f}%"
            + (
                f"  {num_skipped} steps skipped: loss or gradient not finite" if num_skipped else ""
            ),
        )
        self._record.update_summary(self._position(), slow, loss=loss)

    def evaluated(
        self, metrics: dict[str, float], chances: dict[str, float], seconds: float
    ) -> dict[str, float]:
        """Record an evaluation and return its metrics."""
        step = self._state.step
        samples = self._state.samples
        train_s = self.train_s
        self._state.note(metrics, self._plan.target_metrics, train_s)
        if self._is_first:
            line = StepLine(
                phase="evaluation", step=step, samples=samples, time_s=seconds, chance=chances
            )
            self._append(line, train_s=train_s, **self._energy(), **metrics)
            self._scalars.write(_scalars("evaluation", metrics, samples))
            evaluation = {"step": step, "samples": samples, "train_s": train_s, **metrics}
            self._record.update_summary(evaluation=evaluation, best=self._state.best)
            print(
                f"evaluation at step {step}: "
                + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()),
                flush=True,
            )
        return metrics

    def saved(self, *checkpoints: SavedCheckpoint) -> None:
        """Record results of saving."""
        for each in checkpoints if self._is_first else ():
            outcome = asdict(each)
            begin = outcome.pop("begin")
            seconds = outcome.pop("end") - each.begin
            outcome |= {
                "saved": each.saved,
                "seconds": seconds,
                "path": str(each.path) if each.saved else None,
            }
            self._checkpoints.append(outcome)
            self._append(
                {"phase": "checkpoint"}, checkpoint=[begin, begin + each.stalled_s], **outcome
            )
            self._record.update_summary(checkpoints=self._checkpoints[-20:])
            if each.saved:
                size = f"{each.bytes / 1e6:,.1f} MB in {seconds:.1f} s ({each.bytes / 1e9 / max(seconds, 1e-9):.2f} GB/s)"
                print(
                    f"saved {each.path}: {size}, blocking training for {each.stalled_s:.2f} s",
                    flush=True,
                )
                self._saved_s = each.begin
                self._failed_saves = 0
                continue
            self._failed_saves += 1
            if self._failed_saves > FEW_FAILED_SAVES:
                unsaved = (
                    f"the last {duration_of(each.begin - self._saved_s)} of training would be lost"
                )
                failed = (
                    f"{self._failed_saves} checkpoints in a row could not be saved, and {unsaved}"
                )
                remedy = "repair or free the disk of clap.checkpoint.folder"
                print(f"error: {failed}: {remedy}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Record the run's results."""
        if not self._is_first:
            return
        self._history.close()
        wanted = self._plan.target_metrics
        lost = [
            f"the checkpoint of step {each['step']} could not be saved: {each['problem']}"
            for each in self._checkpoints
            if not each["saved"]
        ]
        self._record.update_summary(
            self._position(),
            self._throughput.summary(),
            self._energy(),
            self._memory,
            warnings=[*self._stragglers.warnings, *lost],
            time_to_target_s=self._state.time_to(wanted),
            stop_reason=self._state.reached(wanted),
        )

    def _position(self) -> Summary:
        now = self._state
        skipped = self._engine.deepspeed.skipped_steps
        fields: Any = {
            "step": now.step,
            "samples": now.samples,
            "epoch": now.epoch,
            "train_s": self.train_s,
        }
        return Summary(command="train", skipped_steps=skipped, **fields)

    def _energy(self) -> Summary:
        return environment.energy(self._joules, self._state.samples - self._first_samples)

    def _append(self, line: StepLine, **more: Any) -> None:
        self._record.append_metrics(line, **more)
        self._history.append({"train_s": self.train_s, **line, **more})


def _scalars(group: str, values: dict[str, float], samples: int) -> list[Scalar]:
    return [(f"{group}/{name}", value, samples) for name, value in values.items()]


def log_run_start(
    plan: TrainPlan, state: TrainState, checkpoints: Path, deepspeed: dict[str, Any]
) -> None:
    """Print the steps to train and the checkpoint folder, and warn about a schedule of another
    length and too few data."""
    last = plan.last_step(state)
    of_epochs = f" ({plan.samples / plan.epoch_samples:g} epochs)" if plan.epoch_samples else ""
    if reached := state.reached(plan.target_metrics):
        print(
            f"nothing left to train: {reached}; change clap.train.target_metrics to continue",
            flush=True,
        )
    elif last > state.step:
        print(
            f"training to {plan.samples:,} samples{of_epochs}: {last - state.step:,} steps",
            flush=True,
        )
    else:
        print(f"nothing left to train: all {plan.samples:,} samples are consumed", flush=True)
    print(f"checkpoints: {checkpoints}", flush=True)
    planned = deepspeed.get("scheduler", {}).get("params", {}).get("total_num_steps", last)
    if planned != last:
        print(
            f"warning: scheduler.params.total_num_steps is {planned}, but the run ends after {last} steps",
            flush=True,
        )
    if plan.epoch_samples is not None and plan.epoch_samples < plan.global_batch:
        said = f"a global batch has {plan.global_batch:,} pairs, but the data only {plan.epoch_samples:,}"
        print(f"warning: {said}; items repeat within a batch", flush=True)


@contextmanager
def advice_on_non_finite(
    engine: ClapEngine, checkpointer: Checkpointer, logger: TrainLogger
) -> Iterator[None]:
    """Add advice to a NonFiniteError of the body. A collective then."""
    try:
        yield
    except NonFiniteError as error:
        logger.saved(*checkpointer.poll(None))
        checkpointer.close()
        saved = run_on_rank0(
            lambda: [manifest.step for manifest in read_all(checkpointer.path).values()]
        )
        first = saved[0] + 1 if saved else 1
        raise NonFiniteError(
            f"{error}. The bad state was not saved: the same command without --restart continues at step {first}. If it fails"
            f" again, skip the batches (--skip_steps {first}-{max(first, engine.steps)}), lower optimizer.params.lr, use a"
            " longer warm-up or gradient_clipping, or resume from an earlier checkpoint (clap.train.resume CHECKPOINT)"
        ) from None
