"""How much a run trains: samples in all, micro-batches in each optimiser step, and the steps that makes.

The learning rate's course is DeepSpeed's `scheduler` section, which counts optimiser steps. Imports neither torch nor
DeepSpeed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from clap_ds.config.settings import RunSettings


@dataclass(frozen=True)
class Schedule:
    """Steps of a run.

    Attributes:
        samples: audio–caption pairs to train on in all; the step that reaches them is the last.
        samples_per_micro_step: of one micro-batch on every rank.
        accumulation: (samples, micro-batches per step from then on), ascending, the first from 0.
        epoch_samples: pairs in one pass over the data, where that is known.
    """

    samples: int
    samples_per_micro_step: int
    accumulation: tuple[tuple[int, int], ...]
    epoch_samples: int | None = None

    @classmethod
    def of(cls, run: RunSettings, *, world_size: int, epoch_samples: int | None) -> Schedule:
        """The schedule of `clap.train`.

        Raises:
            ValueError: epochs are wanted, and nothing says how many samples one has.
        """
        settings = run.clap.train
        samples = settings.samples
        if settings.epochs is not None:
            if epoch_samples is None:
                raise ValueError(
                    f"clap.train.epochs: {run.clap.data.source} data doesn't say how many samples an epoch has; give"
                    " clap.train.samples"
                )
            samples = math.ceil(settings.epochs * epoch_samples)
        assert samples is not None
        ramp = {0: run.gradient_accumulation_steps} | {int(start): n for start, n in settings.batch_ramp.items()}
        return cls(samples, run.micro_batch * world_size, tuple(sorted(ramp.items())), epoch_samples)

    def accumulation_at(self, samples: int) -> int:
        """Micro-batches of the step that begins after so many samples."""
        return [number for start, number in self.accumulation if start <= samples][-1]

    def is_done(self, samples: int) -> bool:
        return samples >= self.samples

    def steps_from(self, samples: int) -> int:
        """Steps left after so many samples."""
        steps = 0
        while samples < self.samples:
            batch = self.accumulation_at(samples) * self.samples_per_micro_step
            end = min([self.samples, *(start for start, _ in self.accumulation if start > samples)])
            number = math.ceil((end - samples) / batch)
            steps += number
            samples += number * batch
        return steps

    def epoch(self, samples: int) -> float:
        """Passes over the data after so many samples; 0 where the length of one isn't known."""
        return samples / self.epoch_samples if self.epoch_samples else 0.0

    def mismatch(self, scheduler: dict[str, Any], step: int, samples: int) -> str | None:
        """What to say if DeepSpeed's `scheduler` section plans for another number of steps than the run will have taken at its
        end.

        Args:
            step: optimiser steps taken so far.
            samples: pairs trained on so far.
        """
        planned = scheduler.get("params", {}).get("total_num_steps")
        total = step + self.steps_from(samples)
        if planned is None or planned == total:
            return None
        return f"scheduler.params.total_num_steps is {planned}, but the run ends after {total} steps"
