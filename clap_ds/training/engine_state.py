"""What DeepSpeed's engine holds at ZeRO-0: its files, its fp32 master weights, its sizes, and what it must have in common with
a checkpoint to go on from it.

DeepSpeed's own `save_checkpoint` decides what is in its file; here it only gets a place to write to that hashes what is
written and outlives a full disk. At ZeRO-0 rank 0 writes one file for all, so the world size may change between runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from clap_ds.config.model import ClapConfig
from clap_ds.engine.engine import ClapEngine
from clap_ds.weights.checkpoint_files import HashedFile
from clap_ds.weights.load import check_same_model
from clap_ds.weights.manifest import FileRecord, Manifest

TAG = "deepspeed"
"""Folder of DeepSpeed's file in a checkpoint."""


class HashedFiles(CheckpointEngine):
    """Where DeepSpeed saves to: hashed files on rank 0, nothing on others.

    Attributes:
        records: of the files written, by path relative to `folder`.
        problem: the first error of the disk. It isn't raised amid DeepSpeed's collectives, where other ranks would wait for
            this one.
    """

    def __init__(self, folder: Path, *, is_first: bool) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}
        self.problem: OSError | None = None
        self._folder = folder
        self._is_first = is_first

    @contextmanager
    def installed(self, engine: Any) -> Iterator[None]:
        """DeepSpeed's engine saves here."""
        before, engine.checkpoint_engine = engine.checkpoint_engine, self
        try:
            yield
        finally:
            engine.checkpoint_engine = before

    def create(self, info: CheckpointCommitInfo) -> None: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not self._is_first:
            return
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.problem = self.problem or error

    def save(self, state_dict: Any, path: str) -> None:
        if not self._is_first or self.problem is not None:
            return
        try:
            file: Any = HashedFile(Path(path))
            torch.save(state_dict, file)
            self.records[str(Path(path).relative_to(self._folder))] = file.close()
        except OSError as error:
            self.problem = error

    def load(self, path: str, map_location: Any = None) -> Any:
        raise NotImplementedError("for saving only")

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def master_weights(engine: ClapEngine) -> dict[str, Tensor]:
    """The model's state with fp32 weights: the optimiser's own copies where it has them, the model's converted elsewhere."""
    optimizer = engine.deepspeed.optimizer
    masters: dict[int, Tensor] = {}
    groups = getattr(optimizer, "fp16_groups", [])
    if hasattr(optimizer, "fp32_groups_flat"):
        copies = [
            _unflatten_dense_tensors(flat, group)
            for flat, group in zip(optimizer.fp32_groups_flat, groups, strict=True)
        ]
    else:
        copies = getattr(optimizer, "fp32_groups", [])
    for group, fp32_group in zip(groups, copies, strict=True):
        for parameter, fp32 in zip(group, fp32_group, strict=True):
            masters[id(parameter)] = fp32
    state = dict(engine.model.state_dict())
    for name, parameter in engine.model.named_parameters():
        state[name] = masters.get(id(parameter), parameter)
    return {name: tensor.detach().float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def estimated_bytes(engine: ClapEngine) -> int:
    """Size of a checkpoint after the first step: weights in the model's types, master weights, two moments a trained weight,
    and the fp32 weights of the safetensors file."""
    sixteen_bit = hasattr(engine.deepspeed.optimizer, "fp16_groups")
    state = engine.model.state_dict().values()
    total = sum(tensor.numel() * (tensor.element_size() + 4) for tensor in state)
    trained = sum(parameter.numel() for parameter in engine.model.parameters() if parameter.requires_grad)
    return total + trained * (8 + 4 * sixteen_bit)


def describe(engine: ClapEngine) -> dict[str, Any]:
    """What a run must have in common with a checkpoint to go on from it, in words of JSON."""
    deepspeed = engine.deepspeed
    inner = getattr(deepspeed.optimizer, "optimizer", None)
    scheduler = deepspeed.lr_scheduler
    trained = [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad]
    return {
        "optimizer": type(deepspeed.optimizer).__name__
        + (f" over {type(inner).__name__}" if inner is not None else ""),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "loss": type(engine.loss).__name__,
        "trained_towers": [tower for tower in ("audio", "text") if any(n.startswith(tower) for n in trained)],
        "num_trained_parameters": len(trained),
    }


def load(folder: Path, engine: ClapEngine) -> None:
    """Weights, optimiser, scheduler and DeepSpeed's counters from a checkpoint.

    Raises:
        ValueError: names or shapes differ, or there is no state of DeepSpeed's.
    """
    try:
        loaded, _ = engine.deepspeed.load_checkpoint(str(folder), tag=TAG)
    except RuntimeError as error:
        raise ValueError(f"{folder} doesn't fit this run: {str(error).splitlines()[0]}") from error
    if loaded is None:
        raise ValueError(f"{folder} holds no state of DeepSpeed's engine")


def check_fits(where: Path, manifest: Manifest, engine: ClapEngine) -> None:
    """Refuse a checkpoint that this engine can't go on from.

    Raises:
        ValueError: of another model, or of a run with another optimiser, precision, scheduler, loss or other frozen towers;
            names what differs.
    """
    theirs, ours = ClapConfig.model_validate(manifest.model), engine.model.config
    check_same_model(where, theirs, ours)
    here = describe(engine)
    differences = [
        f"{name} is {manifest.engine.get(name)!r} there, {value!r} here"
        for name, value in here.items()
        if manifest.engine.get(name) != value
    ]
    if differences:
        raise ValueError(
            f"{where} can't be gone on from: {'; '.join(differences)}. Its weights alone can be had with "
            "clap.train.initial_weights"
        )
