"""What an engine holds that training resumes from: its state at ZeRO-0, its fp32 weights, its description. No pickles."""

import zlib
from typing import Any

import torch
from torch import Tensor

from clap_ds.engine.compile import reason_of
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import trained_towers
from clap_ds.engine.optimizer import by_parameter, master_tensors
from clap_ds.weights.formats import Checkpoint

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Of DeepSpeed's engine."""


def engine_state(engine: ClapEngine) -> dict[str, Any]:
    """Weights in the model's dtypes, the optimiser's and the scheduler's state and DeepSpeed's counters, at ZeRO-0 the same on
    all ranks. Its tensors are the engine's own."""
    engine.count_skipped()
    deepspeed = engine.deepspeed
    return {
        "module": deepspeed.module.state_dict(),
        "optimizer": deepspeed.optimizer.state_dict(),
        "lr_scheduler": None if deepspeed.lr_scheduler is None else deepspeed.lr_scheduler.state_dict(),
        **{name: getattr(deepspeed, name) for name in COUNTERS},
    }


def load_engine_state(engine: ClapEngine, state: dict[str, Any], where: object, *, scheduler: bool = True) -> None:
    """Put an engine into such a state; learning rate, betas and the like stay the run's own. Without `scheduler` the run's own
    goes on at the state's step. ValueError, with `where` it is from, where names or shapes differ."""
    deepspeed = engine.deepspeed
    own = [{name: group[name] for name in group if name not in ("params", "step")} for group in _groups(engine)]
    try:
        deepspeed.module.load_state_dict(state["module"])
        deepspeed.optimizer.load_state_dict(state["optimizer"])
        if scheduler and deepspeed.lr_scheduler is not None:
            deepspeed.lr_scheduler.load_state_dict(state["lr_scheduler"])
        for name in COUNTERS:
            setattr(deepspeed, name, int(state[name]))
    except Exception as error:  # of many types, whatever the state isn't
        raise ValueError(f"{where} can't be loaded into this run: {reason_of(error)}") from error
    for group, options in zip(_groups(engine), own, strict=True):
        group |= options
    _set_rates(engine, None if scheduler else deepspeed.global_steps)


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


def _groups(engine: ClapEngine) -> Any:
    return engine.deepspeed.optimizer.param_groups


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
    """The optimiser's own fp32 copies, or where it has none the model's parameters, by the id of the model's parameter."""
    optimizer = engine.deepspeed.optimizer
    return by_parameter(optimizer, master_tensors(optimizer))


def master_weights(engine: ClapEngine) -> dict[str, Tensor]:
    """The model's state with fp32 weights: the optimiser's own copies where it has them, the model's converted elsewhere."""
    masters = _masters(engine)
    state = dict(engine.model.state_dict())
    state |= {name: masters.get(id(parameter), parameter) for name, parameter in engine.model.named_parameters()}
    return {name: tensor.detach().float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def not_finite(state: Any, name: str = "") -> list[str]:
    """Names of tensors with a NaN or infinite number in a state of nested dictionaries and lists."""
    if isinstance(state, Tensor):
        if not state.is_floating_point() or not state.numel():
            return []
        return [] if torch.stack(state.aminmax()).isfinite().all() else [name]  # NaN if one is; in one pass
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return [bad for part, value in parts for bad in not_finite(value, f"{name}.{part}".removeprefix("."))]


def describe(engine: ClapEngine) -> dict[str, Any]:
    """What a run must have in common with a checkpoint to resume from it, in words of JSON."""
    outer, scheduler = engine.deepspeed.optimizer, engine.deepspeed.lr_scheduler
    inner = getattr(outer, "optimizer", None)
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    rates = len({group.get("lr_scale", 1.0) for group in outer.param_groups})
    layout = [names[each] for each in _masters(engine)], [each.numel() for each in master_tensors(outer)]
    return {
        "optimizer": " over ".join(type(each).__name__ for each in (outer, inner) if each is not None),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "loss": type(engine.loss).__name__,
        "trained_towers": trained_towers(engine.model),
        "learning_rates": 1 if rates == 1 else f"{rates} (groups {zlib.crc32(repr(layout).encode()):08x})",
    }
