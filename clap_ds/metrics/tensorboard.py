"""Write DeepSpeed's scalars and this project's to TensorBoard and DeepSpeed's other monitors (CSV,
Weights & Biases, Comet)."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from clap_ds.distributed.collectives import rank
from clap_ds.run_records.run_dir import warn_on_disk_full
from clap_ds.utils.files import hold_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from clap_ds.engine.engine import ClapEngine

Scalar = tuple[str, float, int]
"""Tag, value, samples trained on so far."""
HISTOGRAM_BINS = 64


def _hide_writer_error(error: threading.ExceptHookArgs) -> None:
    """Print a thread's error, except TensorBoard's of a failing disk, which it raises again where
    `Scalars` warns."""
    if type(error.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(error)


class Scalars:
    """Scalars that are written outside the timed steps, in the order of samples, with those of
    DeepSpeed's monitors."""

    def __init__(
        self, engine: ClapEngine, folder: Path, histogram_every_steps: int | None = None
    ) -> None:
        """Defer the writes of DeepSpeed's monitors to `write`.

        Args:
            folder: holds `tensorboard` if that section has no output path.
            histogram_every_steps: write histograms of parameters and averaged gradients before
                every so many updates.
        """
        section = engine.config.get("tensorboard", {})
        path = Path(section.get("output_path", folder), section.get("job_name", "tensorboard"))
        self._tensorboard: SummaryWriter | None = None
        if section.get("enabled", True) and rank() == 0:
            # A machine that only runs gpu_check lacks tensorboard.
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard would follow a link.
            with warn_on_disk_full(path), hold_folder(path):
                threading.excepthook = _hide_writer_error
                # TensorBoard discards entries of samples that will be trained on again.
                next_sample = engine.deepspeed.global_samples + 1
                self._tensorboard = SummaryWriter(str(path), purge_step=next_sample)
        if histogram_every_steps:
            engine.pre_step_hook = partial(self._write_histograms, engine, histogram_every_steps)
        self._deferred: list[Scalar] = []
        self._write = engine.defer_monitor_events(
            self._deferred.extend, enabled=section.get("enabled", False)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.write()

    def write(self, scalars: Iterable[Scalar] = ()) -> None:
        """Write these and DeepSpeed's deferred scalars, on rank 0 only."""
        events = sorted([*self._deferred, *scalars], key=lambda scalar: scalar[2])
        self._deferred.clear()
        with warn_on_disk_full("DeepSpeed's monitor output"):
            if self._tensorboard is not None:
                for event in events:
                    self._tensorboard.add_scalar(*event)
                self._tensorboard.flush()
            self._write(events)

    @torch.no_grad()
    def _write_histograms(self, engine: ClapEngine, interval: int) -> None:
        if (engine.steps + 1) % interval != 0:
            return
        samples = engine.deepspeed.global_samples + engine.deepspeed.train_batch_size()
        for name, parameter in engine.model.named_parameters():
            self._write_histogram(f"parameters/{name}", parameter, samples)
            if parameter.grad is not None:
                self._write_histogram(f"gradients/{name}", parameter.grad, samples)

    def _write_histogram(self, tag: str, tensor: torch.Tensor, samples: int) -> None:
        # TensorBoard rejects NaNs and an empty tensor.
        values = tensor[tensor.isfinite()].float()
        if self._tensorboard is not None and len(values) > 0:
            with warn_on_disk_full("TensorBoard's histograms"):
                self._tensorboard.add_histogram(tag, values, samples, bins=HISTOGRAM_BINS)
