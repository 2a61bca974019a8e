"""What an engine holds that training resumes from: DeepSpeed's state, its fp32 weights, its description.

What DeepSpeed saves is its own affair: at ZeRO-0 one state, rank 0's, so that the world size may change between runs. How it is
kept is left to `clap_ds.training.checkpoint`.
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from clap_ds.engine.engine import ClapEngine
from clap_ds.weights.formats import Checkpoint

TAG = "deepspeed"
"""Folder of DeepSpeed's file in a checkpoint."""


class _Capture(TorchCheckpointEngine):
    """Takes what DeepSpeed would write: were the disk full amid its collectives, other ranks would wait for this one."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, Any] = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def save(self, state_dict: Any, path: str) -> None:
        self.states[str(Path(path))] = state_dict


def deepspeed_states(engine: ClapEngine, client_state: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed would save, by path relative to a checkpoint; nothing on ranks that don't save. A collective."""
    engine.count_skipped()
    capture = _Capture()
    before, engine.deepspeed.checkpoint_engine = engine.deepspeed.checkpoint_engine, capture
    try:
        engine.deepspeed.save_checkpoint(".", tag=TAG, client_state=client_state, save_latest=False)
    finally:
        engine.deepspeed.checkpoint_engine = before
    return capture.states


def load_deepspeed(engine: ClapEngine, folder: Path, *, scheduler: bool = True) -> None:
    """Weights, optimiser, scheduler and DeepSpeed's counters from a checkpoint; learning rate, betas and the like stay the
    run's own. Without `scheduler` the run's own goes on at the checkpoint's step.

    Raises:
        ValueError: names or shapes differ, it can't be read, or there is no state of DeepSpeed's.
    """
    own = [{name: group[name] for name in group if name not in ("params", "step")} for group in _groups(engine)]
    try:
        loaded, _ = engine.deepspeed.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=scheduler)
    except Exception as error:  # a file that can't be read ends in errors of many types, an AssertionError among them
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{folder} can't be loaded into this run: {reason}") from error
    if loaded is None:
        raise ValueError(f"{folder} holds no state of DeepSpeed's engine")
    for group, options in zip(_groups(engine), own, strict=True):
        group |= options
    _set_rates(engine, None if scheduler else engine.deepspeed.global_steps)


def load_weights_alone(engine: ClapEngine, weights: Checkpoint, steps: int, samples: int) -> None:
    """Weights, in fp32 where the optimiser keeps them so, after so many steps of another optimiser: this one begins anew, the
    scheduler goes on. Raises ValueError: the weights are another model's."""
    weights.load_into(engine.model)
    masters = _masters(engine)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if id(parameter) in masters:
                masters[id(parameter)].copy_(weights.state.get(name, parameter))
    engine.deepspeed.global_steps, engine.deepspeed.global_samples = steps, samples
    _set_rates(engine, steps)


def _groups(engine: ClapEngine) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = engine.deepspeed.optimizer.param_groups
    return groups


def _set_rates(engine: ClapEngine, steps: int | None = None) -> None:
    """Give the optimiser the rates that the scheduler has after so many steps; None: after those it has counted."""
    scheduler = engine.deepspeed.lr_scheduler
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        for _ in range(scheduler.last_epoch, steps or 0):
            scheduler.step()
        for group, rate in zip(_groups(engine), scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
    elif scheduler is not None:
        last = scheduler.last_batch_iteration if steps is None else steps - 1
        if last >= 0:
            scheduler.step(last)


def _masters(engine: ClapEngine) -> dict[int, Tensor]:
    """The optimiser's own fp32 copies, where it has them, by the id of the model's parameter."""
    optimizer = engine.deepspeed.optimizer
    groups, copies = getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", [])
    if hasattr(optimizer, "fp32_groups_flat"):
        copies = map(_unflatten_dense_tensors, optimizer.fp32_groups_flat, groups)
    chained = zip(itertools.chain(*groups), itertools.chain(*copies), strict=True)
    return {id(parameter): fp32 for parameter, fp32 in chained}


def master_weights(engine: ClapEngine) -> dict[str, Tensor]:
    """The model's state with fp32 weights: the optimiser's own copies where it has them, the model's converted elsewhere."""
    masters = _masters(engine)
    state = dict(engine.model.state_dict())
    state |= {name: masters.get(id(parameter), parameter) for name, parameter in engine.model.named_parameters()}
    return {name: tensor.detach().float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def not_finite(state: Any, name: str = "") -> list[str]:
    """Names of tensors with a NaN or infinite number in a state of nested dictionaries and lists."""
    if isinstance(state, Tensor):
        return [] if not state.is_floating_point() or bool(state.isfinite().all()) else [name]
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return [bad for part, value in parts for bad in not_finite(value, f"{name}.{part}".removeprefix("."))]


def describe(engine: ClapEngine) -> dict[str, Any]:
    """What a run must have in common with a checkpoint to resume from it, in words of JSON."""
    outer, scheduler = engine.deepspeed.optimizer, engine.deepspeed.lr_scheduler
    inner = getattr(outer, "optimizer", None)
    trained = [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad]
    return {
        "optimizer": " over ".join(type(each).__name__ for each in (outer, inner) if each is not None),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "loss": type(engine.loss).__name__,
        "trained_towers": [tower for tower in ("audio", "text") if any(n.startswith(tower) for n in trained)],
    }
