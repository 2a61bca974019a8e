"""How far a training run has come, and what came of saving it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: optimiser steps taken.
        samples: audio–caption pairs trained on, over all ranks.
        epoch: passes over the data.
        data: where each rank's data source stands (`BatchSource.state()`), by rank.
        world_size: ranks of the run that saved it.
        train_s: time trained so far, in seconds.
        best: best value of each evaluation metric so far.
        extra: whatever else the trainer needs, in words of JSON.
    """

    step: int
    samples: int
    epoch: float
    data: list[dict[str, Any]]
    world_size: int
    train_s: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Progress:
        content = json.loads(text)
        return cls(**{each.name: content[each.name] for each in fields(cls)})


@dataclass(frozen=True)
class SavedCheckpoint:
    """What came of saving.

    Attributes:
        saved: the checkpoint is on the disk, whole and read back.
        step: optimiser steps it stands for.
        path: its folder, where saved.
        begin, end: wall time, seconds since 1970.
        bytes: written; 0 where not saved.
        problem: why it was not saved.
    """

    saved: bool
    step: int
    path: Path | None
    begin: float
    end: float
    bytes: int = 0
    problem: str | None = None
