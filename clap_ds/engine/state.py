"""Get and set the engine state that training resumes from, without pickles: ZeRO-0 state, fp32 weights, description."""

from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

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


def load_engine_state(engine: ClapEngine, state: dict[str, Any], where: object) -> None:
    """Restore such a state, except options like learning rate, betas and schedule, which stay the run's own. The schedule
    continues at the state's step. Raises ValueError, naming `where`, if names or shapes differ."""
    deepspeed = engine.deepspeed
    own = [{name: group[name] for name in group if name not in ("params", "step")} for group in _groups(engine)]
    try:
        deepspeed.module.load_state_dict(state["module"])
        deepspeed.optimizer.load_state_dict(state["optimizer"])
        for name in COUNTERS:
            setattr(deepspeed, name, int(state[name]))
    except Exception as error:  # of many types
        raise ValueError(f"{where} can't be loaded into this run: {reason_of(error)}") from error
    for group, options in zip(_groups(engine), own, strict=True):
        group |= options
    schedule = state["lr_scheduler"] or {}  # its steps don't count those that DeepSpeed skipped
    _advance(engine, schedule.get("last_epoch", 1 + schedule.get("last_batch_iteration", deepspeed.global_steps - 1)))


def load_weights_alone(engine: ClapEngine, weights: Checkpoint, steps: int, samples: int) -> None:
    """Load weights, in fp32 if the optimizer keeps them so, after `steps` steps. The optimizer state starts from scratch and
    the scheduler continues. Raises ValueError if the weights are of another model."""
    weights.load_into(engine.model)
    with torch.no_grad():
        for name, master in engine.masters.items():
            master.copy_(weights.state.get(name, engine.model.get_parameter(name)))
    engine.deepspeed.global_steps, engine.deepspeed.global_samples = steps, samples
    _advance(engine, steps)


def _groups(engine: ClapEngine) -> Any:
    return engine.deepspeed.optimizer.param_groups


def _advance(engine: ClapEngine, steps: int) -> None:
    """Advance the scheduler to the rates after `steps` steps."""
    scheduler = engine.deepspeed.lr_scheduler
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        with catch_warnings(action="ignore"):  # of a scheduler that steps before its optimizer
            for _ in range(scheduler.last_epoch, steps):
                scheduler.step()
    elif scheduler is not None and steps:
        scheduler.step(steps - 1)


def fp32_state(engine: ClapEngine) -> dict[str, Tensor]:
    """Return the model's state in fp32, with the optimizer's copies of weights if it has them."""
    state = {**engine.model.state_dict(), **engine.masters}
    return {name: tensor.detach().float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def not_finite(state: Any) -> list[str]:
    """Return names of tensors with a NaN or infinite number in a state of nested dictionaries and lists."""
    named = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(state)[0] if isinstance(leaf, Tensor)]
    floats = [(name, leaf) for name, leaf in named if leaf.is_floating_point() and leaf.numel()]
    return [name for name, leaf in floats if not torch.stack(leaf.aminmax()).isfinite().all()]  # NaNs propagate


def describe(engine: ClapEngine) -> dict[str, Any]:
    """Return what a run and a checkpoint must have in common to resume, as JSON values."""
    outer, scheduler = engine.deepspeed.optimizer, engine.deepspeed.lr_scheduler
    inner = getattr(outer, "optimizer", None)
    return {
        "optimizer": " over ".join(type(each).__name__ for each in (outer, inner) if each is not None),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "loss": type(engine.loss).__name__,
        "trained_towers": trained_towers(engine.model),
        "parameter_groups": [[each["name"], sum(map(Tensor.numel, each["params"]))] for each in _groups(engine)],
    }
