"""Get and set the engine state that training resumes from, without pickles: ZeRO-0 state, fp32 weights, description."""

import zlib
from typing import Any

import torch
from torch import Tensor

from clap_ds.engine.compile import reason_of
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import trained_towers
from clap_ds.weights.formats import Checkpoint

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Counters of DeepSpeed's engine."""


def engine_state(engine: ClapEngine) -> dict[str, Any]:
    """Return weights in the model's dtypes, optimizer and scheduler state, and DeepSpeed's counters. At ZeRO-0 they are the
    same on all ranks. Tensors are the engine's own."""
    engine.count_skipped()
    deepspeed = engine.deepspeed
    return {
        "module": deepspeed.module.state_dict(),
        "optimizer": deepspeed.optimizer.state_dict(),
        "lr_scheduler": None if deepspeed.lr_scheduler is None else deepspeed.lr_scheduler.state_dict(),
        **{name: getattr(deepspeed, name) for name in COUNTERS},
    }


def load_engine_state(engine: ClapEngine, state: dict[str, Any], where: object, *, scheduler: bool = True) -> None:
    """Restore such a state, except options like learning rate and betas, which stay the run's own. Without `scheduler` the
    run's own continues at the state's step. Raises ValueError, naming `where`, if names or shapes differ."""
    deepspeed = engine.deepspeed
    own = [{name: group[name] for name in group if name not in ("params", "step")} for group in _groups(engine)]
    try:
        deepspeed.module.load_state_dict(state["module"])
        deepspeed.optimizer.load_state_dict(state["optimizer"])
        if scheduler and deepspeed.lr_scheduler is not None:
            deepspeed.lr_scheduler.load_state_dict(state["lr_scheduler"])
        for name in COUNTERS:
            setattr(deepspeed, name, int(state[name]))
    except Exception as error:  # of many types
        raise ValueError(f"{where} can't be loaded into this run: {reason_of(error)}") from error
    for group, options in zip(_groups(engine), own, strict=True):
        group |= options
    _set_rates(engine, None if scheduler else deepspeed.global_steps)


def load_weights_alone(engine: ClapEngine, weights: Checkpoint, steps: int, samples: int) -> None:
    """Load weights, in fp32 if the optimizer keeps them so, after `steps` steps. The optimizer state starts from scratch and
    the scheduler continues. Raises ValueError if the weights are of another model."""
    weights.load_into(engine.model)
    with torch.no_grad():
        for name, master in engine.masters.items():
            master.copy_(weights.state.get(name, engine.model.get_parameter(name)))
    engine.deepspeed.global_steps, engine.deepspeed.global_samples = steps, samples
    _set_rates(engine, steps)


def _groups(engine: ClapEngine) -> Any:
    return engine.deepspeed.optimizer.param_groups


def _set_rates(engine: ClapEngine, steps: int | None = None) -> None:
    """Set the optimizer's rates to the scheduler's after `steps` steps (None: those it has counted)."""
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


def fp32_state(engine: ClapEngine) -> dict[str, Tensor]:
    """Return the model's state in fp32, with the optimizer's copies of weights if it has them."""
    state = {**engine.model.state_dict(), **engine.masters}
    return {name: tensor.detach().float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def not_finite(state: Any, name: str = "") -> list[str]:
    """Return names of tensors with a NaN or infinite number in a state of nested dictionaries and lists."""
    if isinstance(state, Tensor):
        if not state.is_floating_point() or not state.numel():
            return []
        return [] if torch.stack(state.aminmax()).isfinite().all() else [name]  # aminmax propagates NaN
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return [bad for part, value in parts for bad in not_finite(value, f"{name}.{part}".removeprefix("."))]


def describe(engine: ClapEngine) -> dict[str, Any]:
    """Return what a run and a checkpoint must have in common to resume, as JSON values."""
    outer, scheduler = engine.deepspeed.optimizer, engine.deepspeed.lr_scheduler
    inner = getattr(outer, "optimizer", None)
    rates = len({group.get("lr_scale", 1.0) for group in outer.param_groups})
    tensors = getattr(outer, "fp32_groups_flat", engine.masters.values())
    layout = [*engine.masters], [each.numel() for each in tensors]
    return {
        "optimizer": " over ".join(type(each).__name__ for each in (outer, inner) if each is not None),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "loss": type(engine.loss).__name__,
        "trained_towers": trained_towers(engine.model),
        "learning_rates": 1 if rates == 1 else f"{rates} (groups {zlib.crc32(repr(layout).encode()):08x})",
    }
