"""Log training: steps, evaluations and checkpoints, in the run directory and the terminal.

`history.jsonl` next to the checkpoints has the same lines as the run directory, but spans all
starts of the run. Losses and norms stay on the device until several steps are written together, to
avoid a synchronization per step.
"""

import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.train_state import HISTORY, SavedCheckpoint, TrainState
from clap_ds.distributed.collectives import gather
from clap_ds.distributed.init import Ranks
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.evaluation.metrics import Evaluation
from clap_ds.metrics.stragglers import Stragglers
from clap_ds.metrics.tensorboard import Scalar, Scalars
from clap_ds.metrics.terminal import Progress
from clap_ds.metrics.throughput import Throughput, Window, gather_window
from clap_ds.run_records import environment
from clap_ds.run_records.run_dir import JsonlWriter, RunDirectory
from clap_ds.run_records.schema import StepLine, Summary
from clap_ds.training.plan import TrainPlan
from clap_ds.utils.errors import duration_of

# Most checkpoints in `summary.json`.
MOST_LISTED_CHECKPOINTS = 20
# Failed saves in a row that are warned of alone. From the next one on, the log also states how much
# training would be lost.
FEW_FAILED_SAVES = 2


class TrainLogger:
    """Log of rank 0; other ranks take part in collectives.

    A window is the steps from one `log` to the next. As a context manager it writes deferred
    scalars at the end, also after an error.

    Args:
        folder: the checkpoints' folder, which also holds `history.jsonl` and `tensorboard`.
        state: the run's progress, which the logger only reads.
    """

    def __init__(
        self,
        record: RunDirectory,
        folder: Path,
        engine: ClapEngine,
        plan: TrainPlan,
        state: TrainState,
        ranks: Ranks,
    ) -> None:
        self._record = record
        self._engine = engine
        self._plan = plan
        self._state = state
        self._ranks = ranks
        self._is_main_process = ranks.is_main_process
        # The engine computes it in every step.
        engine.log_gradient_norm = True

        self._scalars = Scalars(engine, folder, plan.histogram_every)
        self._history = JsonlWriter(folder / HISTORY)
        self._train_s_before = state.train_s
        if self._is_main_process:
            # A killed run has logged steps after its last checkpoint, which are trained again. The
            # time that they took counts.
            logged_s = self._history.truncate_after(state.step)
            self._train_s_before = max(state.train_s, logged_s)
            record.update_summary(history=str(folder / HISTORY), epoch_samples=plan.epoch_samples)
        last_step = plan.last_step(state)
        self._progress = Progress(last_step, enabled=self._is_main_process, first=state.step)

        # The window's steps.
        self._lines: list[StepLine] = []
        # Loss, gradient norm, logit scale and whether the step was skipped: (4,) per step.
        self._figures: list[Tensor] = []
        # Global batch of the window.
        self._batch = 0
        # Whether its steps are profiled.
        self._is_profiled = False
        self._is_warm = False
        self._throughput = Throughput(ranks.world_size)
        self._stragglers = Stragglers(gather(ranks.host))
        # Peak memory, and energy since the start, at the end of the last window.
        self._memory = Summary()
        self._joules = math.nan
        self._joules_at_start = sum(gather(environment.read_energy_joules(engine.device)))
        self._samples_at_start = state.samples

        self._checkpoints: list[dict[str, Any]] = []
        self._failed_saves = 0
        # Beginning of the last complete save or, before that, of this start.
        self._saved_s = time.time()
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._scalars.write()

    @property
    def train_s(self) -> float:
        """Seconds since the first step, including evaluations, checkpoints and earlier starts of
        the run."""
        return self._train_s_before + time.monotonic() - self._started_s

    def begin_step(self) -> None:
        """Start timing a step."""
        batch = self._plan.batch(self._state.samples)
        is_profiled = self._state.step + 1 in self._plan.profiled_steps
        # All steps of a window have the same global batch, and all or none are profiled.
        if batch != self._batch or is_profiled != self._is_profiled:
            self.log()
            self._batch = batch
            self._is_profiled = is_profiled
            self._engine.deepspeed.tput_timer.is_off = is_profiled
        self._engine.timer.start()
        # The scheduler steps with the optimizer.
        self._lr = self._engine.deepspeed.get_lr()[0]

    def end_step(self, loss: Tensor) -> None:
        """Record a step. `loss`: this rank's, a scalar on the device."""
        engine = self._engine
        engine.timer.mark()
        norm = engine.gradient_norm
        assert norm is not None
        logit_scale = engine.model.logit_scale.detach().float().exp().reshape(())
        figures = (loss, norm, logit_scale, engine.is_skipped)
        self._figures.append(torch.stack([figure.to(loss) for figure in figures]))
        line = StepLine(
            phase="train",
            step=self._state.step,
            samples=self._state.samples,
            epoch=self._state.epoch,
            lr=self._lr,
        )
        self._lines.append(line)

    def log(self) -> list[float]:
        """Write the window's steps. A collective.

        Returns:
            Samples/s of this rank in each step, without waiting for data.

        Raises:
            NonFiniteError: on all ranks if any loss isn't finite.
        """
        if not self._lines:
            return []
        # This waits for the device.
        times = self._engine.stop_timers()
        self._engine.count_skipped()
        window = gather_window(times, torch.stack(self._figures))
        if self._is_main_process:
            self._write_steps(window)
            self._write_window(window)
        self._lines = []
        self._figures = []
        # The last lines are written before this raises an error.
        self._engine.check_loss()
        return window.first_rank_rates(self._batch / self._ranks.world_size)

    def _write_steps(self, window: Window) -> None:
        """Write the lines of a window's steps to the run directory, the history and TensorBoard.

        They have rank 0's times and the means of all ranks' figures.
        """
        memory_bytes = environment.peak_memory_bytes(self._engine.device)
        scalars = list[Scalar]()
        for index, line in enumerate(self._lines):
            line["time_s"] = float(window.step_s[index, 0])
            line["data_wait_s"] = float(window.data_wait_s[index, 0])
            line["memory_bytes"] = memory_bytes
            # Skipping is the same on all ranks.
            loss, norm, logit_scale, skipped = window.figures[index].mean(axis=0).tolist()
            if skipped:
                line["skipped"] = True
            if self._is_profiled:
                line["profiled"] = True
            figures = {
                "loss": loss,
                "gradient_norm": norm,
                "logit_scale": logit_scale,
                "lr": line["lr"],
            }
            self._append(line, **figures)
            scalars += _name_scalars("train", figures, line["samples"])
        self._scalars.write(scalars)

    def _write_window(self, window: Window) -> None:
        """Write a window's throughput, and print a line about its last step."""
        num_steps = len(self._lines)
        line = self._lines[-1]
        loss, norm, logit_scale, _ = window.figures[-1].mean(axis=0).tolist()

        self._memory = window.memory
        self._joules = window.joules - self._joules_at_start

        # The slowest rank's time: it includes waits for all others.
        samples_per_s = window.samples_per_s(self._batch)
        data_wait_percent = 100 * window.waited_s / window.slowest_s
        rates = {"samples_per_s": samples_per_s, "data_wait_percent": data_wait_percent}
        slow_ranks = Summary()
        # A profiler slows steps down.
        if not self._is_profiled:
            slow_ranks = self._stragglers.add(
                self._batch, window.step_s[:, 0], window.own_s, window.data_wait_s
            )
            # The first window includes compilation and the first batches.
            if self._is_warm:
                self._throughput.add(window, self._batch)
            self._scalars.write(_name_scalars("train", rates, line["samples"]))
        self._is_warm = True

        text = (
            f"loss {loss:.4f}  lr {line['lr']:.3g}  logit scale {logit_scale:.2f}"
            f"  gradient norm {norm:.3g}"
            f"  {samples_per_s:,.1f} samples/s  data wait {data_wait_percent:.1f}%"
        )
        if line["epoch"] is not None:
            text = f"epoch {line['epoch']:.2f}  {text}"
        if self._is_profiled:
            text += "  (profiled: not counted)"
        if num_skipped := self._engine.deepspeed.skipped_steps:
            text += f"  {num_skipped} steps skipped: loss or gradient not finite"
        self._progress.advance(num_steps, text)
        self._record.update_summary(self._position(), slow_ranks, loss=loss)

    def log_evaluation(self, evaluation: Evaluation, time_s: float) -> None:
        """Record an evaluation, after the state has taken over its metrics."""
        if not self._is_main_process:
            return
        step = self._state.step
        samples = self._state.samples
        metrics = evaluation.metrics
        position = {"step": step, "samples": samples, "train_s": self.train_s}
        line = StepLine(phase="evaluation", time_s=time_s, chance=evaluation.chances)
        self._append(line, **position, **self._energy(), **metrics)
        self._scalars.write(_name_scalars("evaluation", metrics, samples))
        self._record.update_summary(evaluation={**position, **metrics}, best=self._state.best)
        listed = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        print(f"evaluation at step {step}: {listed}", flush=True)

    def log_saves(self, saves: Iterable[SavedCheckpoint]) -> None:
        """Record results of saving."""
        if not self._is_main_process:
            return
        for save in saves:
            outcome = asdict(save)
            del outcome["begin"], outcome["end"]
            # `seconds` is their difference.
            outcome["saved"] = save.saved
            outcome["seconds"] = save.end - save.begin
            outcome["path"] = str(save.path) if save.saved else None
            self._checkpoints.append(outcome)
            # Seconds since 1970 between which training was blocked.
            blocked_s = [save.begin, save.begin + save.stalled_s]
            self._append({"phase": "checkpoint"}, checkpoint=blocked_s, **outcome)
            self._record.update_summary(checkpoints=self._checkpoints[-MOST_LISTED_CHECKPOINTS:])
            if save.saved:
                self._report_save(save)
            else:
                self._report_failed_save(save)

    def _report_save(self, save: SavedCheckpoint) -> None:
        self._saved_s = save.begin
        self._failed_saves = 0
        seconds = save.end - save.begin
        # GB/s; simulated clocks may give 0 s.
        rate = save.bytes / 1e9 / max(seconds, 1e-9)
        print(
            f"saved {save.path}: {save.bytes / 1e6:,.1f} MB in {seconds:.1f} s ({rate:.2f} GB/s),"
            f" blocking training for {save.stalled_s:.2f} s",
            flush=True,
        )

    def _report_failed_save(self, save: SavedCheckpoint) -> None:
        self._failed_saves += 1
        if self._failed_saves <= FEW_FAILED_SAVES:
            return
        unsaved = duration_of(save.begin - self._saved_s)
        print(
            f"error: {self._failed_saves} checkpoints in a row could not be saved, and the last"
            f" {unsaved} of training"
            " would be lost: repair or free the disk of clap.checkpoint.folder",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Record the run's results."""
        if not self._is_main_process:
            return
        self._history.close()
        failed_saves = [
            f"the checkpoint of step {save['step']} could not be saved: {save['problem']}"
            for save in self._checkpoints
            if not save["saved"]
        ]
        self._record.update_summary(
            self._position(),
            self._throughput.summary(),
            self._energy(),
            self._memory,
            warnings=[*self._stragglers.warnings, *failed_saves],
            time_to_target_s=self._plan.time_to_target_s(self._state),
            stop_reason=self._plan.describe_target(self._state),
        )

    def _position(self) -> Summary:
        state = self._state
        fields: Any = {
            "step": state.step,
            "samples": state.samples,
            "epoch": state.epoch,
            "train_s": self.train_s,
            "skipped_steps": self._engine.deepspeed.skipped_steps,
        }
        return Summary(command="train", **fields)

    def _energy(self) -> Summary:
        return environment.summarize_energy(
            self._joules, self._state.samples - self._samples_at_start
        )

    def _append(self, line: StepLine, **fields: Any) -> None:
        self._record.append_metrics(line, **fields)
        self._history.append({"train_s": self.train_s, **line, **fields})


def _name_scalars(group: str, values: dict[str, float], samples: int) -> list[Scalar]:
    return [(f"{group}/{name}", value, samples) for name, value in values.items()]


def log_run_start(
    plan: TrainPlan, state: TrainState, checkpoints: Path, deepspeed: dict[str, Any]
) -> None:
    """Print the steps to train and the checkpoint folder. Warn about a schedule of another length,
    and about data smaller than a batch."""
    last_step = plan.last_step(state)
    if reached := plan.describe_target(state):
        message = f"nothing left to train: {reached}; change clap.train.target_metrics to continue"
    elif last_step <= state.step:
        message = f"nothing left to train: all {plan.samples:,} samples are consumed"
    else:
        message = f"training to {plan.samples:,} samples"
        if plan.epoch_samples:
            message += f" ({plan.samples / plan.epoch_samples:g} epochs)"
        message += f": {last_step - state.step:,} steps"
    print(message)
    print(f"checkpoints: {checkpoints}", flush=True)

    # Rates would end too high, or be 0 for the last steps.
    schedule = deepspeed.get("scheduler", {}).get("params", {})
    scheduled_steps = schedule.get("total_num_steps", last_step)
    if scheduled_steps != last_step:
        print(
            f"warning: scheduler.params.total_num_steps is {scheduled_steps}, but the run ends"
            f" after {last_step} steps",
            flush=True,
        )
    if plan.epoch_samples is not None and plan.epoch_samples < plan.global_batch:
        print(
            f"warning: a global batch has {plan.global_batch:,} pairs, but the data only"
            f" {plan.epoch_samples:,};"
            " items repeat within a batch",
            flush=True,
        )


@contextmanager
def advice_on_non_finite(
    engine: ClapEngine, checkpointer: Checkpointer, logger: TrainLogger
) -> Iterator[None]:
    """Add advice to a NonFiniteError of the body. A collective then."""
    try:
        yield
    except NonFiniteError as error:
        # The save under way is of an earlier, good state.
        logger.log_saves(checkpointer.poll(None))
        checkpointer.close()
        step = checkpointer.newest_step() + 1
        bad_steps = f"{step}-{max(step, engine.steps)}"
        raise NonFiniteError(
            f"{error}. The bad state was not saved: the same command without --restart continues"
            f" at step {step}. If it fails again, skip the batches (--skip_steps {bad_steps}),"
            " lower optimizer.params.lr, use a longer warm-up or gradient_clipping, or resume"
            " from an earlier checkpoint (clap.train.resume CHECKPOINT)"
        ) from None
