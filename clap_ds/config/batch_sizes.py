"""Compute micro-batch, gradient accumulation and global batch. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# DeepSpeed's names, in the order of `BatchSizes`
NAMES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
MICRO_BATCH, ACCUMULATION, GLOBAL_BATCH = NAMES


@dataclass(frozen=True)
class BatchSizes:
    """Numbers of samples and forward passes in a step."""

    # samples per rank and forward pass
    micro_batch: int
    # forward passes per optimizer step
    gradient_accumulation_steps: int
    # samples per optimizer step on all ranks
    global_batch: int

    @property
    def micro_step(self) -> int:
        """Samples per forward pass on all ranks."""
        return self.global_batch // self.gradient_accumulation_steps

    @classmethod
    def from_config(cls, config: Mapping[str, Any], world_size: int | None) -> BatchSizes:
        """Read a configuration as `DeepSpeedConfig._set_batch_related_parameters` does.

        Without `world_size`, the fewest ranks that fit are assumed. Raises ValueError with one line
        per missing, invalid or contradictory number.
        """
        _check_numbers(config)
        micro_batch, gradient_accumulation_steps, global_batch = (
            config.get(name) for name in NAMES
        )
        num_ranks = world_size or 1
        if world_size is None and micro_batch and gradient_accumulation_steps and global_batch:
            num_ranks = max(1, global_batch // (micro_batch * gradient_accumulation_steps))
        if gradient_accumulation_steps is None:
            gradient_accumulation_steps = 1
            if micro_batch and global_batch:
                gradient_accumulation_steps = max(1, global_batch // (micro_batch * num_ranks))
        if micro_batch is None:
            micro_batch = max(1, config[GLOBAL_BATCH] // (gradient_accumulation_steps * num_ranks))
        product = micro_batch * gradient_accumulation_steps * num_ranks
        # Divisions above round down, so a global batch may not be reached.
        if global_batch not in (None, product):
            formula = f"{MICRO_BATCH} × {ACCUMULATION} × ranks"
            factors = f"{micro_batch} × {gradient_accumulation_steps} × {num_ranks} = {product}"
            raise ValueError(
                f"{GLOBAL_BATCH}: expected {formula} = {factors}, found {global_batch}"
            )
        return cls(micro_batch, gradient_accumulation_steps, product)

    def fill(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration with the per-rank sizes, and its global batch if it has one, which
        DeepSpeed checks."""
        filled = {
            **config,
            MICRO_BATCH: self.micro_batch,
            ACCUMULATION: self.gradient_accumulation_steps,
        }
        # DeepSpeed takes null for a number here.
        if filled.get(GLOBAL_BATCH) is None:
            filled.pop(GLOBAL_BATCH, None)
        return filled


def _check_numbers(config: Mapping[str, Any]) -> None:
    problems = []
    for name in NAMES:
        value = config.get(name)
        # In Python, true is a whole number.
        is_positive = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value is not None and not is_positive:
            problems.append(
                f"{name}: expected a whole number, at least 1, found {json.dumps(value)}"
            )
    if config.get(MICRO_BATCH) is None and config.get(GLOBAL_BATCH) is None:
        meaning = "samples per GPU and forward pass"
        problems.append(f"{MICRO_BATCH}: missing; expected {meaning}, or {GLOBAL_BATCH}")
    if problems:
        raise ValueError("\n".join(problems))
