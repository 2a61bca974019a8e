"""Get and set the engine state that training resumes from, without pickles: ZeRO-0 state, fp32
weights, description.

An optimizer's state has no names: it is by position in a group, or one flat tensor per group. In
checkpoints each group is in the order of the model's parameters, whatever order the optimizer has
(`factory.parameter_groups`).
"""

from typing import Any
from warnings import catch_warnings

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from clap_ds.engine.compile import reason_of
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import trained_towers
from clap_ds.engine.optimizer import grouped_parameters
from clap_ds.weights.formats import Checkpoint

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Counters of DeepSpeed's engine."""


def engine_state(engine: ClapEngine) -> dict[str, Any]:
    """Return weights in the model's dtypes, optimizer and scheduler state, and DeepSpeed's
    counters. At ZeRO-0 they are the same on all ranks. Tensors are the engine's own, except for
    copies of groups that had another order."""
    engine.count_skipped()
    deepspeed = engine.deepspeed
    return {
        "module": deepspeed.module.state_dict(),
        "optimizer": _reorder_groups(deepspeed.optimizer.state_dict(), engine, to_model_order=True),
        "lr_scheduler": None
        if deepspeed.lr_scheduler is None
        else deepspeed.lr_scheduler.state_dict(),
        **{name: getattr(deepspeed, name) for name in COUNTERS},
    }


def load_engine_state(engine: ClapEngine, state: dict[str, Any], where: object) -> None:
    """Restore such a state, except options like learning rate, betas and schedule, which stay the
    run's own. The schedule continues at the state's step. Raises ValueError, naming `where`, if
    names or shapes differ."""
    deepspeed = engine.deepspeed
    own = [
        {name: group[name] for name in group if name not in ("params", "step")}
        for group in _groups(engine)
    ]
    try:
        deepspeed.module.load_state_dict(state["module"])
        deepspeed.optimizer.load_state_dict(
            _reorder_groups(state["optimizer"], engine, to_model_order=False)
        )
        for name in COUNTERS:
            setattr(deepspeed, name, int(state[name]))
    except Exception as error:  # of many types
        raise ValueError(f"{where} can't be loaded into this run: {reason_of(error)}") from error
    for group, options in zip(_groups(engine), own, strict=True):
        group |= options
    schedule = state["lr_scheduler"] or {}  # its steps don't count those that DeepSpeed skipped
    _advance(
        engine,
        schedule.get(
            "last_epoch", 1 + schedule.get("last_batch_iteration", deepspeed.global_steps - 1)
        ),
    )


def _reorder_groups(
    state: dict[str, Any], engine: ClapEngine, *, to_model_order: bool
) -> dict[str, Any]:
    """Return an optimizer's state, of torch or of DeepSpeed's 16-bit wrappers, with each group's
    parameters in the order of the model, or from that order in the optimizer's. The given state
    doesn't change."""
    positions: dict[Tensor, int] = {
        parameter: number for number, parameter in enumerate(engine.model.parameters())
    }
    reordered = tree_map(lambda leaf: leaf, state)  # copies dictionaries and lists, not tensors
    inner = reordered.get(OPTIMIZER_STATE_DICT, reordered)
    for number, parameters in enumerate(grouped_parameters(engine.deepspeed.optimizer)):
        in_model_order = sorted(parameters, key=positions.__getitem__)
        orders = (parameters, in_model_order) if to_model_order else (in_model_order, parameters)
        if "fp32_groups_flat" in state:
            moments = inner["state"].get(number, {})
            for name in moments.keys() - {"step"}:
                moments[name] = _reorder(moments[name], *orders)
        else:
            group = inner["param_groups"][number]
            group["params"] = _reorder(group["params"], *orders)
        for name in {"fp32_groups", "fp32_groups_flat"} & state.keys():
            reordered[name][number] = _reorder(state[name][number], *orders)
    return reordered


def _reorder(values: Any, before: list[Tensor], after: list[Tensor]) -> Any:
    """Return a list of a value per parameter, or their flat tensor, in the order `after` instead of
    `before`."""
    if [*map(id, before)] == [*map(id, after)]:
        return values  # without copying a flat tensor
    is_flat = isinstance(values, Tensor)
    parts = values.split([parameter.numel() for parameter in before]) if is_flat else values
    part_of = dict(zip(before, parts, strict=True))
    reordered = [part_of[parameter] for parameter in after]
    return torch.cat(reordered) if is_flat else reordered


def load_weights_alone(engine: ClapEngine, weights: Checkpoint, steps: int, samples: int) -> None:
    """Load weights, in fp32 if the optimizer keeps them so, after `steps` steps. The optimizer
    state starts from scratch and the scheduler continues. Raises ValueError if the weights are of
    another model."""
    weights.load_into(engine.model)
    with torch.no_grad():
        for name, master in engine.masters.items():
            master.copy_(weights.state.get(name, engine.model.get_parameter(name)))
    engine.deepspeed.global_steps = steps
    engine.deepspeed.global_samples = samples
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
    return {
        name: tensor.detach().float() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


def not_finite(state: Any) -> list[str]:
    """Return names of tensors with a NaN or infinite number in a state of nested dictionaries and
    lists."""
    named = [
        (keystr(path), leaf)
        for path, leaf in tree_flatten_with_path(state)[0]
        if isinstance(leaf, Tensor)
    ]
    floats = [(name, leaf) for name, leaf in named if leaf.is_floating_point() and leaf.numel()]
    return [
        name for name, leaf in floats if not torch.stack(leaf.aminmax()).isfinite().all()
    ]  # NaNs propagate


def describe(engine: ClapEngine) -> dict[str, Any]:
    """Return what a run and a checkpoint must have in common to resume, as JSON values."""
    outer = engine.deepspeed.optimizer
    scheduler = engine.deepspeed.lr_scheduler
    inner = getattr(outer, "optimizer", None)
    return {
        "optimizer": " over ".join(
            type(each).__name__ for each in (outer, inner) if each is not None
        ),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "loss": type(engine.loss).__name__,
        "trained_towers": trained_towers(engine.model),
        "parameter_groups": [
            [each["name"], sum(map(Tensor.numel, each["params"]))] for each in _groups(engine)
        ],
    }
