"""Sections of `clap` that only training has: how long, from what and with which batches; checkpoints; evaluation.

Part of `clap_ds.config.settings`, which reads and checks them together with the rest.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from clap_ds.config.check import NonNegativeInt, PositiveFloat, PositiveInt, Section


class TrainSettings(Section):
    """How long training goes on, what it starts from and what a batch is."""

    samples: PositiveInt | None = None
    """Audio–caption pairs to train on in all; give this or `epochs`."""
    epochs: PositiveFloat | None = None
    """Passes over the data to train for; give this or `samples`."""
    initial_weights: str | None = None
    """Start from these: a folder that `transformers.ClapModel` loads, a LAION-CLAP .pt file, a file of
    `clap_ds.weights.formats.save_safetensors`, or one of this project's checkpoints."""
    freeze: list[Literal["audio", "text"]] = []
    """Towers (with their projections) that are not trained."""
    accumulation: Literal["independent", "cached"] = "independent"
    """What the micro-batches of one optimiser step are: `independent` contrastive batches whose gradients are averaged
    (DeepSpeed's), or parts of one large batch whose exact gradient is found with cached features (GradCache, arXiv
    2101.06983)."""
    batch_ramp: dict[str, PositiveInt] = {}
    """Gradient accumulation steps from a number of samples on: {"0": 1, "1000000": 4}; without it,
    `gradient_accumulation_steps` throughout."""
    resume: str = "auto"
    """`auto`: go on from the newest good checkpoint in `clap.checkpoint.folder` (or its `sync_to`), if there is one; `never`;
    or the checkpoint to go on from."""
    stop_at: dict[str, float] = {}
    """Stop as soon as an evaluation reaches all of these: {"zero_shot_top1": 0.9}. The time it took is recorded."""
    shuffle_captions: bool = False
    """Control experiment: every clip gets another one's caption, so that there is nothing to learn."""
    log_every_steps: PositiveInt = 10
    """Steps between lines of progress, and between checks that the loss is finite."""


class CheckpointSettings(Section):
    """When the state of training is saved, where to, and which of the saved states are kept."""

    folder: str | None = None
    """Where checkpoints lie; null: `<output.root>/<label>-checkpoints`."""
    every_steps: PositiveInt | None = None
    """Optimiser steps from one checkpoint to the next; null: one at the end, and one when the run is told to stop."""
    keep_last: PositiveInt = 3
    keep_best: NonNegativeInt = 1
    """Checkpoints kept beyond the last ones for being best by `best_by`."""
    best_by: str = "zero_shot_top1"
    """Evaluation metric, larger is better, that tells the best."""
    sync_to: str | None = None
    """Folder, local or any fsspec URL, to which finished checkpoints are copied in the background and from which
    `clap.train.resume` takes them when there is none here. Credentials come from the environment alone."""


class RetrievalSettings(Section):
    """Audio–text retrieval on held-out clips."""

    shards: str | list[str]
    """Tar files with `txt` or `json` captions; each caption of a clip counts."""


class ZeroShotSettings(Section):
    """Zero-shot classification of held-out clips by captions made of class names."""

    shards: str | list[str]
    """Tar files whose items carry a `json` member with their class."""
    class_field: str = "kind"
    """Member of that json: a class name, or a list of them (multi-label)."""
    templates: Annotated[list[str], Field(min_length=1)] = ["{}", "the sound of {}", "a recording of {}"]
    """Captions with {} in the class name's place; a class is compared by the mean of its captions' embeddings."""
    classes: dict[str, list[str]] | None = None
    """Class name → the names it has in captions; null: the classes found in the shards, by their own names."""


class EvaluationSettings(Section):
    """What is evaluated, while training and by `clap_ds/evaluate.py`."""

    every_steps: PositiveInt | None = None
    """Optimiser steps between evaluations while training; null: once, at the end."""
    retrieval: RetrievalSettings | None = None
    zero_shot: ZeroShotSettings | None = None
    tokenizer: str | None = None
    """Hub name or folder of the tokenizer; null: that of `clap.data`."""
    micro_batch: PositiveInt | None = None
    """Clips per rank and forward pass; null: as in training."""
    num_workers: NonNegativeInt = 0
    """Decoding processes per rank."""
