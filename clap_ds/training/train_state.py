"""Length, state and due actions of a training run. Imports neither torch nor DeepSpeed."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter

from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.config.files import parse_json
from clap_ds.config.metrics import score
from clap_ds.config.model import Count
from clap_ds.config.schema import CheckpointSettings, EvaluationSettings, TrainSettings

HISTORY = "history.jsonl"
"""Steps of all starts, next to the checkpoints."""


@dataclass
class TrainState:
    """Progress of a run.

    Attributes:
        step, samples, epoch: optimizer steps, audio–caption pairs over all ranks, passes over the
          data.
        data: state of each rank's data source (`BatchSource.state()`), by rank.
        train_s: training time so far, in seconds.
        best: best value of each evaluation metric so far.
        extra: `target` that was reached, `time_to_target_s` and `target_step`.
        saved_step: step of the last checkpoint; not part of the saved state.
    """

    step: Count = 0
    samples: Count = 0
    epoch: float | None = None
    data: list[dict[str, Any]] = field(default_factory=list)
    train_s: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    saved_step: int = 0

    def note(self, metrics: dict[str, float], wanted: dict[str, float], train_s: float) -> None:
        """Keep the best metrics, and when the `wanted` ones were reached."""
        for name, value in metrics.items():
            if math.isfinite(value) and score(name, value) >= score(
                name, self.best.get(name, value)
            ):
                self.best[name] = value
        if wanted and all(
            score(name, metrics[name]) >= score(name, value) for name, value in wanted.items()
        ):
            self.extra |= {"target": wanted, "time_to_target_s": train_s, "target_step": self.step}

    def reached(self, wanted: dict[str, float]) -> str | None:
        """Return a message with step and time at which an evaluation reached the target, or
        None."""
        if (seconds := self.time_to(wanted)) is None:
            return None
        values = ", ".join(f"{name} {value:g}" for name, value in wanted.items())
        return f"target reached at step {self.extra.get('target_step', self.step)}, after {seconds:,.0f} s: {values}"

    def time_to(self, wanted: dict[str, float]) -> float | None:
        return (
            self.extra["time_to_target_s"]
            if wanted and self.extra.get("target") == wanted
            else None
        )

    def data_of(self, rank: int) -> dict[str, Any] | None:
        return self.data[rank % len(self.data)] if self.data else None

    def to_json(self) -> str:
        return json.dumps(
            {name: value for name, value in asdict(self).items() if name != "saved_step"}, indent=1
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse `to_json`'s text. Raises ValueError."""
        content = parse_json(text)
        try:
            content["saved_step"] = content["step"]
            return TypeAdapter(cls).validate_python(
                {each.name: content[each.name] for each in fields(cls)}
            )
        except (LookupError, TypeError) as error:
            raise ValueError(f"a checkpoint's progress can't be read: {error!r}") from error


@dataclass(frozen=True)
class ResumeOptions:
    """Command-line options of resuming. `skip_steps`: first and last step whose batches are
    skipped."""

    restart: bool = False
    resume_weights_only: bool = False
    skip_steps: tuple[int, int] | None = None


class Due(NamedTuple):
    """What is due after a step."""

    log: bool
    evaluate: bool
    save: bool
    stop: bool


@dataclass(frozen=True)
class TrainPlan:
    """Length of a run, and steps between its actions (None: only at the end).

    Attributes:
        samples: total audio–caption pairs.
        global_batch: the global batch, after the `ramp`: [samples, global batch from then on].
        epoch_samples: pairs in one pass over the data, if known.
    """

    samples: int
    global_batch: int
    epoch_samples: int | None = None
    log_every: int = 10
    evaluate_every: int | None = None
    save_every: int | None = None
    target_metrics: dict[str, float] = field(default_factory=dict)
    ramp: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        train: TrainSettings,
        evaluation: EvaluationSettings,
        checkpoint: CheckpointSettings,
        sizes: BatchSizes,
        epoch_samples: int | None,
    ) -> Self:
        """Compute it from a run's sections. ValueError if epochs are requested and their length is
        unknown."""
        samples = train.max_samples
        epochs = train.epochs
        if epochs is not None:
            if epoch_samples is None:
                raise ValueError(
                    "clap.train.epochs: the length of an epoch of remote shards is unknown without their manifest.json"
                    " (clap-ds shards prepare); add it, or set clap.train.max_samples"
                )
            samples = math.ceil(epochs * epoch_samples)
        assert samples is not None
        every = train.log_every_steps, evaluation.every_steps, checkpoint.every_steps
        return cls(
            samples,
            sizes.global_batch,
            epoch_samples,
            *every,
            train.target_metrics,
            train.batch_ramp,
        )

    def is_done(self, state: TrainState) -> bool:
        """Return whether all samples are consumed, or the target metrics reached."""
        return state.samples >= self.samples or state.reached(self.target_metrics) is not None

    def batch(self, samples: int) -> int:
        """Return the global batch of the step that starts after so many samples."""
        return next(
            (batch for start, batch in reversed(self.ramp) if samples >= start), self.global_batch
        )

    def advance(self, state: TrainState) -> None:
        """Count a step."""
        state.step += 1
        state.samples += self.batch(state.samples)
        state.epoch = round(state.samples / self.epoch_samples, 6) if self.epoch_samples else None

    def due(self, state: TrainState, signal: int, is_late: bool = False) -> Due:
        """Return what is due after a step, given the signal to stop, or 0, and whether a checkpoint
          is late. A save stays due
        until one has started."""
        is_last = state.samples >= self.samples
        stop = signal != 0 or self.is_done(state)
        evaluate = is_last or (
            self.evaluate_every is not None and state.step % self.evaluate_every == 0
        )
        every = self.save_every
        save = (
            stop
            or is_late
            or (every is not None and state.step // every > state.saved_step // every)
        )
        log = evaluate or save or state.step % self.log_every == 0
        return Due(log, evaluate and not signal, save, stop)

    def last_step(self, state: TrainState) -> int:
        """Return the run's last step."""
        step = state.step
        samples = state.samples
        for end in [*(start for start, _ in self.ramp[1:]), self.samples]:
            steps = max(0, math.ceil((min(end, self.samples) - samples) / self.batch(samples)))
            step = step + steps
            samples = samples + steps * self.batch(samples)
        return step


@dataclass(frozen=True)
class SavedCheckpoint:
    """Result of saving: `path` and `bytes` written, or the `problem`. `begin` and `end` are seconds
    since 1970; training was blocked for `stalled_s` seconds."""

    step: int
    begin: float
    end: float
    path: Path | None = None
    bytes: int = 0
    problem: str | None = None
    stalled_s: float = 0.0

    @property
    def saved(self) -> bool:
        return self.path is not None
