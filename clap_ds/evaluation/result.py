"""What an evaluation found: each metric with its chance level and its uncertainty, and the clips it rests on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from clap_ds.data.shard_reader import Broken

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Measure:
    """One metric, all of it from 0 to 1.

    Attributes:
        value: what the model reaches.
        chance: the expectation of a model that says the same of everything.
        low, high: interval that holds the true value with 95 % probability.
    """

    value: float
    chance: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, value: float, chance: float, num_clips: int) -> Measure:
        """A mean over clips of values from 0 to 1."""
        return cls(value, chance, *wilson(value, num_clips))


@dataclass(frozen=True)
class TaskResult:
    """One task's metrics.

    Attributes:
        counts: what they rest on: clips, captions, classes.
        measures: by the metric's name.
    """

    counts: dict[str, int]
    measures: dict[str, Measure]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        tasks: by name, `retrieval` and `zero_shot`.
        broken: what the shards hold that couldn't be used.
    """

    tasks: dict[str, TaskResult]
    broken: list[Broken]

    @property
    def metrics(self) -> dict[str, float]:
        return {name: measure.value for task in self.tasks.values() for name, measure in task.measures.items()}

    def to_dict(self) -> dict[str, Any]:
        """In words of JSON."""
        return {
            "metrics": self.metrics,
            "tasks": {name: asdict(task) for name, task in self.tasks.items()},
            "num_broken_items": len(self.broken),
            "broken_items": [asdict(broken) for broken in self.broken],
        }


def wilson(proportion: float, number: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion. For means of other values from 0 to 1 it is too wide rather than too narrow:
    none vary more than those that are 0 or 1."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    spread = z * math.sqrt(proportion * (1 - proportion) / number + z**2 / (4 * number**2))
    centre = proportion + z**2 / (2 * number)
    scale = 1 + z**2 / number
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
