"""Write DeepSpeed's and our scalars to TensorBoard and DeepSpeed's other monitors (CSV, Weights &
Biases, Comet)."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from clap_ds.distributed.collectives import rank
from clap_ds.run_records.run_dir import warn_on_disk_full
from clap_ds.utils.files import own_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from clap_ds.engine.engine import ClapEngine

Scalar = tuple[str, float, int]  # tag, value, samples trained on so far
BINS = 64  # of histograms


def _hide_writer_error(error: threading.ExceptHookArgs) -> None:
    """Print a thread's error, except TensorBoard's of a failing disk, which it raises again where
    `Scalars` warns."""
    if type(error.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(error)


class Scalars:
    """Defer the writes of DeepSpeed's monitor from the timed steps to `write`, in the order of
    samples. If the `tensorboard` section has no output path, files go to `tensorboard` in `folder`.
    With `histogram_every_steps`, histograms of parameters and averaged gradients are written before
    every so many updates."""

    def __init__(
        self, engine: ClapEngine, folder: Path, histogram_every_steps: int | None = None
    ) -> None:
        section = engine.config.get("tensorboard", {})
        deepspeed = engine.deepspeed
        place = Path(section.get("output_path", folder), section.get("job_name", "tensorboard"))
        self._tensorboard: SummaryWriter | None = None
        if section.get("enabled", True) and rank() == 0:
            from torch.utils.tensorboard import (
                SummaryWriter,
            )  # a machine that only runs gpu_check lacks tensorboard

            with warn_on_disk_full(place), own_folder(place):  # TensorBoard would follow a link
                threading.excepthook = _hide_writer_error
                # TensorBoard discards entries of samples that will be trained on again.
                self._tensorboard = SummaryWriter(
                    str(place), purge_step=deepspeed.global_samples + 1
                )
        if histogram_every_steps:
            engine.before_update = partial(self._write_histograms, engine, histogram_every_steps)
        self._waiting: list[Scalar] = []
        self._write = engine.defer_monitor_events(
            self._waiting.extend, enabled=section.get("enabled", False)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.write()

    def write(self, scalars: Iterable[Scalar] = ()) -> None:
        """Write these and DeepSpeed's deferred scalars, on rank 0 only."""
        events = sorted([*self._waiting, *scalars], key=lambda scalar: scalar[2])
        self._waiting.clear()
        with warn_on_disk_full("DeepSpeed's monitor output"):
            if self._tensorboard is not None:
                for event in events:
                    self._tensorboard.add_scalar(*event)
                self._tensorboard.flush()
            self._write(events)

    @torch.no_grad()
    def _write_histograms(self, engine: ClapEngine, every: int) -> None:
        if self._tensorboard is None or (engine.steps + 1) % every:
            return
        samples = engine.deepspeed.global_samples + engine.deepspeed.train_batch_size()
        for name, parameter in engine.model.named_parameters():
            for group, tensor in (("parameters", parameter), ("gradients", parameter.grad)):
                if tensor is not None and tensor.isfinite().any():
                    finite = tensor[tensor.isfinite()].float()
                    with warn_on_disk_full("TensorBoard's histograms"):
                        self._tensorboard.add_histogram(
                            f"{group}/{name}", finite, samples, bins=BINS
                        )
