"""Length and progress of a training run. Imports neither torch nor DeepSpeed."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from clap_ds.config.files import parse_json
from clap_ds.config.metrics import score
from clap_ds.config.settings import RunSettings


@dataclass(frozen=True)
class Schedule:
    """Length of a run: total `samples` (pairs), and `epoch_samples` in one pass over the data, if known."""

    samples: int
    samples_per_step: int
    epoch_samples: int | None = None

    @classmethod
    def of(cls, run: RunSettings, *, world_size: int, epoch_samples: int | None) -> Self:
        """Compute it from `clap.train`. ValueError if epochs are requested and their length is unknown."""
        samples, epochs = run.clap.train.max_samples, run.clap.train.epochs
        if epochs is not None:
            if epoch_samples is None:
                raise ValueError(
                    "clap.train.epochs: the length of an epoch of remote shards is unknown without their manifest.json"
                    " (clap-shards prepare); add it, or set clap.train.max_samples"
                )
            samples = math.ceil(epochs * epoch_samples)
        assert samples is not None
        return cls(samples, run.batch_sizes(world_size).global_batch, epoch_samples)

    def is_done(self, samples: int) -> bool:
        return samples >= self.samples

    def ahead(self, samples: int) -> tuple[int, int]:
        """Return the steps left after `samples` samples, and the total samples after them."""
        steps = max(0, math.ceil((self.samples - samples) / self.samples_per_step))
        return steps, samples + steps * self.samples_per_step

    def epoch(self, samples: int) -> float | None:
        return round(samples / self.epoch_samples, 6) if self.epoch_samples else None


def pairs_together(run: RunSettings, world_size: int) -> int:
    """Return the number of pairs in one contrastive loss."""
    sizes = run.batch_sizes(world_size)
    return sizes.global_batch if run.clap.train.accumulation == "gradcache" else sizes.micro_batch * world_size


@dataclass
class TrainingProgress:
    """Progress of a run.

    Attributes:
        step, samples, epoch: optimizer steps, audio–caption pairs over all ranks, passes over the data.
        data: state of each rank's data source (`BatchSource.state()`), by rank.
        train_s: training time so far, in seconds.
        best: best value of each evaluation metric so far.
        extra: `target` that was reached, `time_to_target_s` and `target_step`.
    """

    step: int = 0
    samples: int = 0
    epoch: float | None = None
    data: list[dict[str, Any]] = field(default_factory=list)
    train_s: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def note(self, metrics: dict[str, float], wanted: dict[str, float], train_s: float) -> None:
        for name, value in metrics.items():
            if math.isfinite(value) and score(name, value) >= score(name, self.best.get(name, value)):
                self.best[name] = value
        if wanted and all(score(name, metrics[name]) >= score(name, value) for name, value in wanted.items()):
            self.extra |= {"target": wanted, "time_to_target_s": train_s, "target_step": self.step}

    def reached(self, wanted: dict[str, float]) -> str | None:
        """Return a message with step and time at which an evaluation reached the target, or None."""
        if (seconds := self.time_to(wanted)) is None:
            return None
        values = ", ".join(f"{name} {value:g}" for name, value in wanted.items())
        return f"target reached at step {self.extra.get('target_step', self.step)}, after {seconds:,.0f} s: {values}"

    def time_to(self, wanted: dict[str, float]) -> float | None:
        return self.extra["time_to_target_s"] if wanted and self.extra.get("target") == wanted else None

    def data_of(self, rank: int) -> dict[str, Any] | None:
        return self.data[rank % len(self.data)] if self.data else None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        content = parse_json(text)
        return TypeAdapter(cls).validate_python({each.name: content[each.name] for each in fields(cls)})


@dataclass(frozen=True)
class SavedCheckpoint:
    """Result of saving: `path` and `bytes` written, or the `problem`. `begin` and `end` are seconds since 1970; training was
    blocked for `stalled_s` seconds."""

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
