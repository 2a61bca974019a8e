"""How programs print their rates: of each dialect the lines, and what time they say has passed by which step.

DeepSpeed's rank 0 prints a running average R of samples/s at its step k. It covers every step since its timer began at step 3,
so with global batch B the timer has run (k - 2)·B/R seconds: the rate between any two lines is exact, whatever lies between.
Its lines are `epoch=0/micro_step=50/global_step=50, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c`.

open_clip prints `Train Epoch: 0 [ 616/100000 (1%)] Data (t): 0.012 Batch (t): 0.987, 623.7/s, 623.7/s/gpu LR: …`: samples of
the epoch, and seconds a step since its last line; the rates are of the last step alone. Earlier it left out the rate of a GPU,
and LAION-CLAP leaves out both.

A dialect of DeepSpeed's kind is one line in `DIALECTS`; another kind says how its lines make a curve.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

WHOLE = rb"(\d{1,15})"
_NUMBER = rb"-?(?:\d{1,20}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,4})?|inf|nan)"
_MEMORY = rb"(?:, MemAllocated=[0-9.]{1,20}GB, MaxMemAllocated=(\d{1,9}(?:\.\d{1,9})?)GB)?"
_CURRENT = rb", CurrSamplesPerSec=" + _NUMBER + rb"(?=[,\s])"


@dataclass(frozen=True)
class Dialect:
    """Lines with a step, the running average at it, and peak memory in GB where it is said.

    Attributes:
        gate: text that each has once, found faster than the pattern.
        untimed: first steps that the program doesn't time.
        has_data_wait: whether its times count the wait for data.
    """

    gate: bytes
    pattern: re.Pattern[bytes]
    untimed: int = 2
    has_data_wait: bool = False

    def points(self, groups: Sequence[Sequence[Any]]) -> tuple[Numbers, Numbers]:
        """What is kept of each line: where it stands, in a number that only rises in one run, and what it says."""
        return np.array([int(line[0]) for line in groups], float), np.array([float(line[1]) for line in groups])

    def facts(self, groups: Sequence[Sequence[Any]]) -> dict[str, int]:
        """What lines say of the run's shape, a global batch only roughly."""
        return {}

    def curve(self, positions: Numbers, values: Numbers, batch: float) -> tuple[Numbers, Numbers, float]:
        """(steps, seconds for each sample of a global batch until that step, global batch or 0 where it isn't said)."""
        return positions, (positions - self.untimed) / values, batch


class OpenClip(Dialect):
    """The value is the mean time of a step since the line before."""

    def points(self, groups: Sequence[Sequence[Any]]) -> tuple[Numbers, Numbers]:
        samples = [int(epoch) * int(of_epoch) + int(done) for epoch, done, of_epoch, *_ in groups]
        return np.array(samples, float), np.array([float(line[3]) for line in groups])

    def facts(self, groups: Sequence[Sequence[Any]]) -> dict[str, int]:
        rates = [(float(step_s) * float(rate), rate, of_gpu) for *_, step_s, rate, of_gpu in groups if rate]
        found = {"global_batch": round(float(np.median([batch for batch, *_ in rates])))} if rates else {}
        gpus = [round(float(rate) / float(of_gpu)) for _, rate, of_gpu in rates if of_gpu and float(of_gpu)]
        return found | ({"gpus": gpus[-1]} if gpus else {})

    def curve(self, positions: Numbers, values: Numbers, batch: float) -> tuple[Numbers, Numbers, float]:
        """A global batch divides all counts of samples; lines stand after 1, 101, 201, … steps, so nothing larger does."""
        divisor = float(np.gcd.reduce(positions.astype(np.int64)))
        exact = divisor / max(round(divisor / batch), 1) if batch else divisor
        batch = exact if not batch or 0.6 < exact / batch < 1.6 else batch
        steps = positions / batch
        return steps, np.cumsum(np.diff(steps, prepend=0) * values) / batch, batch


_TIMER = re.compile(rb"global_step=" + WHOLE + rb", RunningAvgSamplesPerSec=(" + _NUMBER + rb")" + _CURRENT + _MEMORY)
_OPEN_CLIP = re.compile(
    rb"Train Epoch: (\d{1,6}) \[ *" + WHOLE + rb"/(\d{1,12}) \(\d+%\)\] [^\n]{0,400}?Batch \(t\): (\d{1,9}\.\d{1,9})"
    rb"(?:, (" + _NUMBER + rb")/s(?:, (" + _NUMBER + rb")/s/gpu)?)?(?= )"
)  # fmt: skip
DIALECTS = (
    Dialect(b"RunningAvgSamplesPerSec=", _TIMER),
    OpenClip(b"Train Epoch: ", _OPEN_CLIP, untimed=0, has_data_wait=True),
)
