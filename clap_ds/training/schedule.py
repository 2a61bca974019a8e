"""How much a run trains (samples in all, micro-batches in each optimiser step, the steps that makes) and how far it has come.

The learning rate's course is DeepSpeed's `scheduler` section, which counts optimiser steps. Imports neither torch nor
DeepSpeed.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from clap_ds.config.files import parse_json
from clap_ds.config.metrics import best_metric, score
from clap_ds.config.settings import RunSettings


@dataclass(frozen=True)
class Schedule:
    """Steps of a run.

    Attributes:
        samples: audio–caption pairs to train on in all; the step that reaches them is the last.
        samples_per_micro_step: of one micro-batch on every rank.
        accumulation: (samples, micro-batches per step from then on), ascending, the first from 0.
        epoch_samples: pairs in one pass over the data; None where that isn't known, or there are no such passes.
    """

    samples: int
    samples_per_micro_step: int
    accumulation: tuple[tuple[int, int], ...]
    epoch_samples: int | None = None

    @classmethod
    def of(cls, run: RunSettings, *, world_size: int, epoch_samples: int | None) -> Self:
        """The schedule of `clap.train`; raises ValueError: epochs are wanted, and nothing says how many samples one has."""
        settings = run.clap.train
        samples = settings.samples
        if settings.epochs is not None:
            if epoch_samples is None:
                raise ValueError(
                    "clap.train.epochs: nothing says how many samples an epoch has: remote shards need a manifest.json beside"
                    " them (clap-shards prepare); or give clap.train.samples"
                )
            samples = math.ceil(settings.epochs * epoch_samples)
        assert samples is not None
        return cls(samples, run.micro_batch * world_size, _ramp(run), epoch_samples)

    def accumulation_at(self, samples: int) -> int:
        """Micro-batches of the step that begins after so many samples."""
        return [number for start, number in self.accumulation if start <= samples][-1]

    def next_steps(self, samples: int, most: int) -> list[int]:
        """Micro-batches of each of the next steps, `most` at most, after so many samples."""
        steps: list[int] = []
        while len(steps) < most and not self.is_done(samples):
            steps.append(self.accumulation_at(samples))
            samples += steps[-1] * self.samples_per_micro_step
        return steps

    def is_done(self, samples: int) -> bool:
        return samples >= self.samples

    def ahead(self, samples: int) -> tuple[int, int]:
        """Steps left after so many samples, and the samples after them."""
        steps = 0
        while samples < self.samples:
            batch = self.accumulation_at(samples) * self.samples_per_micro_step
            end = min([self.samples, *(start for start, _ in self.accumulation if start > samples)])
            number = math.ceil((end - samples) / batch)
            steps += number
            samples += number * batch
        return steps, samples

    def epoch(self, samples: int) -> float | None:
        """Passes over the data after so many samples; None where the length of one isn't known."""
        return round(samples / self.epoch_samples, 6) if self.epoch_samples else None

    def mismatch(self, scheduler: dict[str, Any], step: int, samples: int) -> str | None:
        """What to say if DeepSpeed's `scheduler` section plans for another number of steps than the run will have taken at its
        end, of which `step` steps and `samples` samples are done."""
        planned = scheduler.get("params", {}).get("total_num_steps")
        total = step + self.ahead(samples)[0]
        if planned is None or planned == total:
            return None
        return f"scheduler.params.total_num_steps is {planned}, but the run ends after {total} steps"


def _ramp(run: RunSettings) -> tuple[tuple[int, int], ...]:
    """(samples, micro-batches per step from then on), ascending, the first from 0."""
    ramp = {0: run.gradient_accumulation_steps} | {int(start): n for start, n in run.clap.train.batch_ramp.items()}
    return tuple(sorted(ramp.items()))


def global_batches(run: RunSettings, world_size: int) -> list[int]:
    """Pairs that one contrastive loss tells apart, from each stage of `clap.train.batch_ramp` on."""
    together = [number if run.clap.train.accumulation == "cached" else 1 for _, number in _ramp(run)]
    return [run.micro_batch * world_size * number for number in together]


@dataclass
class TrainingProgress:
    """How far a run has come.

    Attributes:
        step, samples, epoch: optimiser steps taken, audio–caption pairs trained on over all ranks, passes over the data
            (None where there are none that could be counted).
        data: where each rank's data source stands (`BatchSource.state()`), by rank.
        train_s: time trained so far, in seconds.
        best: best value of each evaluation metric so far.
        extra: `target` that was reached, `time_to_target_s` and `target_step`; `plateau`: metric, its best value, at which
            step, and the evaluations since then.
    """

    step: int = 0
    samples: int = 0
    epoch: float | None = None
    data: list[dict[str, Any]] = field(default_factory=list)
    train_s: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def note(self, metrics: dict[str, float], run: RunSettings, train_s: float) -> None:
        """Remember an evaluation's metrics where they are the best, the time where they reach all of `clap.train.stop_at`, and
        how long there has been no gain for `clap.train.stop_on_plateau`."""
        for name, value in metrics.items():
            if math.isfinite(value) and score(name, value) >= score(name, self.best.get(name, value)):
                self.best[name] = value
        wanted, plateau = run.clap.train.stop_at, run.clap.train.stop_on_plateau
        if wanted and all(score(name, metrics[name]) >= score(name, value) for name, value in wanted.items()):
            self.extra |= {"target": wanted, "time_to_target_s": train_s, "target_step": self.step}
        if plateau is not None and (metric := plateau.metric or best_metric(run)):
            self._note_plateau(metric, metrics[metric], plateau.least_gain)

    def _note_plateau(self, metric: str, value: float, least_gain: float) -> None:
        before = self.extra.get("plateau", {})
        if before.get("metric") != metric:
            before = {"metric": metric, "best": -score(metric, math.inf), "step": self.step, "evaluations": 0}
        if score(metric, value) > score(metric, before["best"]) + least_gain:
            self.extra["plateau"] = {"metric": metric, "best": value, "step": self.step, "evaluations": 0}
        else:
            self.extra["plateau"] = {**before, "evaluations": before["evaluations"] + 1}

    def why_over(self, run: RunSettings) -> str | None:
        """What ends training before its samples are through, for people; None where nothing does."""
        wanted, plateau = run.clap.train.stop_at, run.clap.train.stop_on_plateau
        seconds, noted = self.time_to(wanted), self.extra.get("plateau", {})
        if seconds is not None:
            reached = ", ".join(f"{name} {value:g}" for name, value in wanted.items())
            return (
                f"target reached at step {self.extra.get('target_step', self.step)}, after {seconds:,.0f} s: {reached}"
            )
        if plateau is None or noted.get("metric") != (plateau.metric or best_metric(run)):
            return None
        if noted["evaluations"] < plateau.evaluations:
            return None
        since = f"since step {noted['step']}, where it was {noted['best']:.4g}"
        return f"no gain in {noted['metric']} for {noted['evaluations']} evaluations, {since}"

    def time_to(self, wanted: dict[str, float]) -> float | None:
        """Seconds of training to the evaluation that reached what is wanted; None where nothing is, or none has."""
        return self.extra["time_to_target_s"] if wanted and self.extra.get("target") == wanted else None

    def data_of(self, rank: int) -> dict[str, Any] | None:
        """Where a rank's data goes on; None: at the beginning."""
        return self.data[rank % len(self.data)] if self.data else None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        content = parse_json(text)
        return cls(**{each.name: content[each.name] for each in fields(cls)})


@dataclass(frozen=True)
class SavedCheckpoint:
    """What came of saving after `step` optimiser steps: `path` and `bytes` written, or the `problem`. `begin` and `end` are
    seconds since 1970."""

    step: int
    begin: float
    end: float
    path: Path | None = None
    bytes: int = 0
    problem: str | None = None

    @property
    def saved(self) -> bool:
        """It is on the disk, whole and read back."""
        return self.path is not None
