"""Progress of a training run, and the options and results of its checkpoints. Imports neither torch nor DeepSpeed."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from clap_ds.config.model import Count
from clap_ds.config.schema import score
from clap_ds.utils.files import parse_json

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
