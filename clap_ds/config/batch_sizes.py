"""Compute micro-batch, gradient accumulation and global batch. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
MICRO_BATCH, ACCUMULATION, GLOBAL_BATCH = NAMES


@dataclass(frozen=True)
class BatchSizes:
    """Samples per rank and forward pass, forward passes per optimizer step, and samples per step on
    all ranks."""

    micro_batch: int
    accumulation_steps: int
    global_batch: int

    @property
    def micro_step(self) -> int:
        """Samples per forward pass on all ranks."""
        return self.global_batch // self.accumulation_steps

    @classmethod
    def of(cls, config: Mapping[str, Any], world_size: int | None) -> BatchSizes:
        """Read a configuration as `DeepSpeedConfig._set_batch_related_parameters` does; without
          `world_size`, for the fewest
        ranks that fit. Raises ValueError, one line per missing, invalid or contradictory number."""
        given = {name: config[name] for name in NAMES if config.get(name) is not None}
        problems = [
            f"{name}: expected a whole number, at least 1, found {json.dumps(value)}"
            for name, value in given.items()
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if MICRO_BATCH not in given and GLOBAL_BATCH not in given:
            problems.append(
                f"{MICRO_BATCH}: missing; expected samples per GPU and forward pass, or {GLOBAL_BATCH}"
            )
        if problems:
            raise ValueError("\n".join(problems))
        micro_batch, steps, whole = map(given.get, NAMES)
        ranks = world_size or (
            max(1, whole // (micro_batch * steps)) if micro_batch and steps and whole else 1
        )
        steps = steps or (max(1, whole // (micro_batch * ranks)) if micro_batch and whole else 1)
        micro_batch = micro_batch or max(1, (whole or 0) // (steps * ranks))
        sizes = cls(micro_batch, steps, micro_batch * steps * ranks)
        if whole not in (None, sizes.global_batch):
            product = f"{micro_batch} × {steps} × {ranks} = {sizes.global_batch}"
            raise ValueError(
                f"{GLOBAL_BATCH}: expected {MICRO_BATCH} × {ACCUMULATION} × ranks = {product}, found {whole}"
            )
        return sizes

    def fill(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Add the per-rank sizes to a configuration; a given global batch stays for DeepSpeed to
        check."""
        kept = {
            name: value for name, value in config.items() if name not in NAMES or value is not None
        }
        return {**kept, MICRO_BATCH: self.micro_batch, ACCUMULATION: self.accumulation_steps}
