"""Progress of a training run, and the options and results of its checkpoints.

Imports neither torch nor DeepSpeed.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from clap_ds.config.model import Count
from clap_ds.config.schema import to_higher_is_better
from clap_ds.utils.files import parse_json

# Steps of all starts, next to the checkpoints.
HISTORY = "history.jsonl"


@dataclass
class TrainState:
    """Progress of a run.

    Attributes:
        step: optimizer steps.
        samples: audio–caption pairs over all ranks.
        epoch: passes over the data, if the length of one is known.
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

    def update_best(
        self, metrics: dict[str, float], targets: dict[str, float], train_s: float
    ) -> None:
        """Keep the best metrics, and when the `targets` were reached."""
        for name, value in metrics.items():
            # `to_higher_is_better` is higher for better values, also of losses.
            best = self.best.get(name, value)
            if math.isfinite(value) and to_higher_is_better(name, value) >= to_higher_is_better(
                name, best
            ):
                self.best[name] = value
        is_reached = all(
            to_higher_is_better(name, metrics[name]) >= to_higher_is_better(name, value)
            for name, value in targets.items()
        )
        if targets and is_reached:
            self.extra |= {"target": targets, "time_to_target_s": train_s, "target_step": self.step}

    def prepare_save(self, data: list[dict[str, Any]], train_s: float) -> None:
        """Take over what only a checkpoint needs: the data sources' states by rank, and the
        training time."""
        self.data = data
        self.train_s = train_s
        self.saved_step = self.step

    def to_json(self) -> str:
        content = asdict(self)
        # It is the step when loaded.
        del content["saved_step"]
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse `to_json`'s text. Raises ValueError."""
        content = parse_json(text)
        try:
            content["saved_step"] = content["step"]
            # Later versions may add fields.
            known_fields = {attribute.name: content[attribute.name] for attribute in fields(cls)}
            return TypeAdapter(cls).validate_python(known_fields)
        except (LookupError, TypeError) as error:
            raise ValueError(f"a checkpoint's progress can't be read: {error!r}") from error


@dataclass(frozen=True)
class ResumeOptions:
    """Command-line options of resuming.

    Attributes:
        restart: move existing checkpoints away and start from scratch.
        resume_weights_only: resume after changes that only weights survive.
        skip_steps: first and last step whose batches are skipped.
    """

    restart: bool = False
    resume_weights_only: bool = False
    skip_steps: tuple[int, int] | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """Result of saving.

    Attributes:
        begin, end: seconds since 1970.
        path, bytes: folder and bytes written, if saving succeeded.
        problem: the error, if it failed.
        stalled_s: seconds for which training was blocked.
    """

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
