"""Restore the engine from a checkpoint, after comparing it with the run's configuration.

At ZeRO-0 every rank has the whole state, so that one rank saves it and each loads it. No pickles
are used. An optimizer's state has no names: it is by position in a group, or one flat tensor per
group. In checkpoints each group is in the order of the model's parameters, whatever order the
optimizer has (`factory.parameter_groups`).
"""

from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from clap_ds.checkpoint.checkpoint_files import (
    PROGRESS,
    STATE,
    TOKENIZER,
    CheckpointFolder,
    read_state_file,
)
from clap_ds.checkpoint.load_weights import check_same_model, differences, read_weights
from clap_ds.checkpoint.train_state import TrainState
from clap_ds.config.arguments import find_field
from clap_ds.config.model import ClapConfig, TextConfig
from clap_ds.config.settings import find_precision
from clap_ds.distributed.collectives import rank, run_on_rank0
from clap_ds.engine.compile import reason_of
from clap_ds.engine.deepspeed_compat import (
    FLAT_MASTERS,
    MASTERS,
    OPTIMIZER_STATE_DICT,
    parameters_by_group,
)
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import trained_towers
from clap_ds.engine.grad_cache import restore_random_state
from clap_ds.utils.errors import warn
from clap_ds.utils.files import flatten, read_bytes
from clap_ds.utils.redaction import redact_all
from clap_ds.weights.formats import Checkpoint
from clap_ds.weights.hub import check_recorded, load_tokenizer

# Settings that don't affect what is trained.
_WITHOUT_EFFECT = (
    "clap.output",
    "clap.checkpoint",
    "clap.bench",
    "clap.profile",
    "clap.hardware",
    "clap.debug",
    "clap.train.resume",
    "clap.train.log_every_steps",
)
# Captions that show whether two tokenizers are alike.
_PROBES = ["A dog barks; rain falls on a tin roof.", "ÜBER 3 Vögel singen…"]
# Counters of DeepSpeed's engine.
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def restore(
    checkpoint: CheckpointFolder,
    engine: ClapEngine,
    config: dict[str, Any],
    tokenizer: str | None,
    *,
    resume_weights_only: bool,
) -> TrainState:
    """Restore the engine and this rank's random number generators; only weights and progress after
    accepted changes. A collective; raises ValueError for changes that need
    `resume_weights_only`."""
    to_accept, harmless = run_on_rank0(
        lambda: compare(checkpoint, engine.model.config, describe_engine(engine), config, tokenizer)
    )
    if to_accept and not resume_weights_only:
        advice = (
            "--resume_weights_only continues from its weights with a new optimizer state;"
            " --restart starts from scratch"
        )
        # With another tokenizer the weights would get other token ids.
        if any(change.startswith("the tokenizer") for change in to_accept):
            advice = "Set clap.data.tokenizer to the former one; --restart starts from scratch"
        raise ValueError(f"{checkpoint.path} can't be resumed: {'; '.join(to_accept)}. {advice}")
    changes = [*to_accept, *harmless]
    if changes and rank() == 0:
        message = f"settings have changed since {checkpoint.path.name}: {'; '.join(changes)}"
        if to_accept:
            message += "; only its weights and step are restored"
        warn(message)

    progress = TrainState.from_json(read_bytes(checkpoint.path / PROGRESS))
    engine.steps = progress.step
    if engine.ema is not None:
        engine.ema.load(read_weights(checkpoint).state)
    if to_accept:
        # Training continues from the raw weights.
        weights = read_weights(checkpoint, raw=True)
        load_weights_alone(engine, weights, progress.step, progress.samples)
        return progress
    state = read_state_file(checkpoint.path / STATE)
    load_engine_state(engine, state, checkpoint.path)
    # Ranks beyond those that saved keep their seeds.
    if rank() < len(state["random"]):
        restore_random_state(state["random"][rank()], engine.model.logit_scale.device)
    return progress


def compare(
    checkpoint: CheckpointFolder,
    model: ClapConfig,
    engine: dict[str, Any],
    config: dict[str, Any],
    tokenizer: str | None,
) -> tuple[list[str], list[str]]:
    """Describe how a run differs from a checkpoint.

    Args:
        engine: this run's `describe_engine`.
        config: this run's JSON; if empty, only model, engine and tokenizer are compared.

    Returns:
        Differences that need acceptance, and harmless ones.
    """
    manifest = checkpoint.manifest
    check_same_model(checkpoint.path, ClapConfig.model_validate(manifest.model), model)
    to_accept = []
    harmless = []
    # Fields that another version didn't record count as equal.
    for change in differences(engine | manifest.engine, engine):
        # A new schedule continues at the step.
        if change.startswith("scheduler is"):
            harmless.append(change)
        else:
            to_accept.append(change)
    problem = tokenizer_problem(
        manifest.tokenizer_in(checkpoint.path),
        tokenizer,
        model.text,
        is_trusted=manifest.tokenizer == TOKENIZER,
    )
    if problem:
        to_accept.append(f"the tokenizer: {problem}")
    if not manifest.settings or not config:
        return to_accept, harmless

    saved_precision = find_precision(manifest.settings)
    precision = find_precision(config)
    if saved_precision != precision:
        to_accept.append(f"the precision is {saved_precision} there, {precision} here")
    saved_lr_scale = find_field(manifest.settings, "clap.train.lr_scale") or {}
    lr_scale = find_field(config, "clap.train.lr_scale") or {}
    if saved_lr_scale != lr_scale:
        # This explains other parameter groups.
        cause = f"clap.train.lr_scale is {saved_lr_scale} there, {lr_scale} here"
        to_accept = [
            cause if change.startswith("parameter_groups") else change for change in to_accept
        ]
    harmless += compare_settings(manifest.settings, redact_all(config))
    return to_accept, harmless


def compare_settings(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Describe how the settings of a checkpoint's run differ from the current ones."""
    saved = flatten(saved)
    current = flatten(current)
    changes = []
    # All names, in the order of the run's JSON.
    for name in dict.fromkeys((*current, *saved)):
        if name.startswith(_WITHOUT_EFFECT) or saved.get(name) == current.get(name):
            continue
        # Fields of `clap` that only one side has are another version's or another kind's.
        if name.startswith("clap.") and (name not in saved or name not in current):
            continue
        saved_value = saved.get(name, "not set")
        value = current.get(name, "not set")
        changes.append(f"{name}: {saved_value!r} there, {value!r} here")
    return changes


def tokenizer_problem(
    recorded: str | None, current: str | None, text: TextConfig, *, is_trusted: bool = True
) -> str | None:
    """Describe how two tokenizers differ; None if they don't, or if one is None. Unless
    `is_trusted`, `recorded` is a name that a file of others states."""
    if recorded is None or current is None or recorded == current:
        return None
    sizes: Any = {"vocab_size": text.vocab_size, "pad_token_id": text.pad_token_id}
    try:
        if not is_trusted:
            check_recorded(recorded, "the checkpoint", "clap.data.tokenizer")
        tokenizer = load_tokenizer(current, **sizes)
        recorded_tokenizer = load_tokenizer(recorded, **sizes)
    except ValueError as error:
        return f"{recorded} there and {current} here can't be compared: {error}"
    same_vocabulary = tokenizer.get_vocab() == recorded_tokenizer.get_vocab()
    same_ids = tokenizer(_PROBES)["input_ids"] == recorded_tokenizer(_PROBES)["input_ids"]
    if same_vocabulary and same_ids:
        return None
    return (
        f"{current} gives captions other token ids than {recorded},"
        " which the weights were trained with"
    )


def describe_engine(engine: ClapEngine) -> dict[str, Any]:
    """Return what a run and a checkpoint must have in common to resume, as JSON values."""
    optimizer = engine.deepspeed.optimizer
    optimizer_names = [type(optimizer).__name__]
    # DeepSpeed's 16-bit optimizers wrap another one.
    wrapped = getattr(optimizer, "optimizer", None)
    if wrapped is not None:
        optimizer_names.append(type(wrapped).__name__)
    scheduler = engine.deepspeed.lr_scheduler
    groups = [
        [group["name"], sum(parameter.numel() for parameter in group["params"])]
        for group in optimizer.param_groups
    ]
    return {
        "optimizer": " over ".join(optimizer_names),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "loss": type(engine.loss).__name__,
        "trained_towers": trained_towers(engine.model),
        "parameter_groups": groups,
    }


def engine_state(engine: ClapEngine) -> dict[str, Any]:
    """Return weights in the model's dtypes, optimizer and scheduler state, and DeepSpeed's
    counters. At ZeRO-0 they are the same on all ranks. Tensors are the engine's own, except for
    copies of groups that had another order."""
    # DeepSpeed's counter lags behind steps skipped on the device.
    engine.count_skipped()
    deepspeed = engine.deepspeed
    scheduler = deepspeed.lr_scheduler
    return {
        "module": deepspeed.module.state_dict(),
        "optimizer": _reorder_groups(deepspeed.optimizer.state_dict(), engine, to_model_order=True),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        **{name: getattr(deepspeed, name) for name in COUNTERS},
    }


def load_engine_state(engine: ClapEngine, state: dict[str, Any], source: object) -> None:
    """Restore such a state, except options like learning rate, betas and schedule, which stay the
    run's own. The schedule continues at the state's step. Raises ValueError, naming the source, if
    names or shapes differ."""
    deepspeed = engine.deepspeed
    # DeepSpeed may replace the groups while it loads.
    options = [dict(group) for group in deepspeed.optimizer.param_groups]
    for group_options in options:
        del group_options["params"]
        group_options.pop("step", None)
    try:
        deepspeed.module.load_state_dict(state["module"])
        optimizer_state = _reorder_groups(state["optimizer"], engine, to_model_order=False)
        deepspeed.optimizer.load_state_dict(optimizer_state)
        for name in COUNTERS:
            setattr(deepspeed, name, int(state[name]))
    # Errors are of many types.
    except Exception as error:
        raise ValueError(f"{source} can't be loaded into this run: {reason_of(error)}") from error
    # The run may have another learning rate, or betas.
    for group, group_options in zip(deepspeed.optimizer.param_groups, options, strict=True):
        group |= group_options
    # The scheduler's steps don't count those that DeepSpeed skipped.
    schedule = state["lr_scheduler"] or {}
    last_iteration = schedule.get("last_batch_iteration", deepspeed.global_steps - 1)
    _advance_scheduler(engine, schedule.get("last_epoch", last_iteration + 1))


def _reorder_groups(
    state: dict[str, Any], engine: ClapEngine, *, to_model_order: bool
) -> dict[str, Any]:
    """Return an optimizer's state, of torch or of DeepSpeed's 16-bit wrappers, in another order of
    each group's parameters: the model's, or from it the optimizer's. The given state doesn't
    change."""
    positions: dict[Tensor, int] = {
        parameter: number for number, parameter in enumerate(engine.model.parameters())
    }
    # Copies dictionaries and lists, not tensors.
    reordered = tree_map(lambda leaf: leaf, state)
    inner = reordered.get(OPTIMIZER_STATE_DICT, reordered)
    for number, parameters in enumerate(parameters_by_group(engine.deepspeed.optimizer)):
        in_model_order = sorted(parameters, key=positions.__getitem__)
        orders = (parameters, in_model_order) if to_model_order else (in_model_order, parameters)
        if FLAT_MASTERS in state:
            # The inner optimizer has one flat parameter per group.
            moments = inner["state"].get(number, {})
            for name in moments.keys() - {"step"}:
                moments[name] = _reorder(moments[name], *orders)
        else:
            group = inner["param_groups"][number]
            group["params"] = _reorder(group["params"], *orders)
        # fp32 master weights, which DeepSpeed's 16-bit optimizers hold by group.
        for name in {MASTERS, FLAT_MASTERS} & state.keys():
            reordered[name][number] = _reorder(state[name][number], *orders)
    return reordered


def _reorder(values: Any, old_order: list[Tensor], new_order: list[Tensor]) -> Any:
    """Return a list of a value per parameter, or their flat tensor, in the new order of
    parameters."""
    # This saves copying a flat tensor.
    if [*map(id, old_order)] == [*map(id, new_order)]:
        return values
    if not isinstance(values, Tensor):
        value_of = dict(zip(old_order, values, strict=True))
        return [value_of[parameter] for parameter in new_order]
    # A flat tensor is cut into the parameters' pieces.
    parts = values.split([parameter.numel() for parameter in old_order])
    part_of = dict(zip(old_order, parts, strict=True))
    return torch.cat([part_of[parameter] for parameter in new_order])


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
    _advance_scheduler(engine, steps)


def _advance_scheduler(engine: ClapEngine, steps: int) -> None:
    """Advance the scheduler to the rates after `steps` steps."""
    scheduler = engine.deepspeed.lr_scheduler
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        # It warns because it steps before its optimizer.
        with catch_warnings(action="ignore"):
            for _ in range(scheduler.last_epoch, steps):
                scheduler.step()
    # DeepSpeed's schedulers count from 0.
    elif scheduler is not None and steps:
        scheduler.step(steps - 1)


def fp32_state(engine: ClapEngine) -> dict[str, Tensor]:
    """Return the model's state in fp32, with the optimizer's copies of weights if it has them."""
    state = {**engine.model.state_dict(), **engine.masters}
    return {
        name: tensor.detach().float() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


def non_finite_tensors(state: Any) -> list[str]:
    """Return names of tensors with a NaN or infinite number in a state of nested dictionaries and
    lists."""
    names = []
    for path, leaf in tree_flatten_with_path(state)[0]:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.numel() == 0:
            continue
        # A NaN anywhere is both minimum and maximum.
        if not torch.stack(leaf.aminmax()).isfinite().all():
            names.append(keystr(path))
    return names
