"""Find and load a checkpoint (full state or weights only), and report how the run's configuration
differs from it.

Get and set the engine state that training resumes from, without pickles: ZeRO-0 state, fp32
weights, description.

An optimizer's state has no names: it is by position in a group, or one flat tensor per group. In
checkpoints each group is in the order of the model's parameters, whatever order the optimizer has
(`factory.parameter_groups`).
"""

import glob
import zlib
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from clap_ds.checkpoint.checkpoint_files import (
    RAW,
    STATE,
    TOKENIZER,
    WEIGHTS,
    Manifest,
    newest_good,
    read_all,
    read_state_file,
    warn,
)
from clap_ds.checkpoint.load_weights import check_same_model, differences, load_weights
from clap_ds.checkpoint.remote import RemoteFolder
from clap_ds.checkpoint.train_state import TrainState
from clap_ds.config.arguments import find_field
from clap_ds.config.model import ClapConfig, TextConfig
from clap_ds.config.schema import ShardData
from clap_ds.config.settings import RunSettings, precision_of
from clap_ds.data.shard_assignment import expand_sources
from clap_ds.data.shard_manifest import describe_contents
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
from clap_ds.utils.files import flatten, read_bytes
from clap_ds.utils.redaction import redacted_all
from clap_ds.weights.formats import Checkpoint
from clap_ds.weights.hub import check_recorded, load_tokenizer

PROGRESS = "progress.json"
_OF_NO_CONSEQUENCE = (
    "clap.output", "clap.checkpoint", "clap.bench", "clap.hardware", "clap.debug", "clap.train.resume",
    "clap.train.log_every_steps",
)  # fmt: skip
_IDENTITY = (
    "clap.contents", "clap.loss", "clap.model.preset", "clap.model.pretrained_text", "clap.seed", "clap.train.freeze",
)  # fmt: skip
"""What a run has in common with its checkpoints."""
_PROBES = ["A dog barks; rain falls on a tin roof.", "ÜBER 3 Vögel singen…"]


def describe_run(run: RunSettings) -> dict[str, Any]:
    """Return a run's JSON for its checkpoints, with the contents of its data and initial weights by
    field as `clap.contents`.

    They are the same wherever the files are. Weights on the Hub and a folder of checkpoints only
    have a name. Raises ValueError for missing shards, and for a missing file of weights with them.
    """
    clap = run.clap
    contents = dict[str, str]()
    missing = ""
    if clap.train.pretrained is not None:
        path = Path(clap.train.pretrained)
        files = [path] if path.is_file() else path.glob("*.safetensors")
        contents["train.pretrained"] = f"{path.name}: {describe_contents([*map(str, files)])}"
        if path.suffix and not path.exists():
            missing = f"\nclap.train.pretrained: {path}: no such file"
    if isinstance(clap.data, ShardData):
        try:
            sources = expand_sources(clap.data.shards)
        except ValueError as error:
            raise ValueError(f"{error}{missing}") from None
        contents["data.shards"] = describe_contents(
            [shard for source in sources for shard in source.shards]
        )
    config = run.resolved()
    config["clap"]["contents"] = contents
    return config


def find_checkpoint_folder(run: RunSettings, config: dict[str, Any]) -> Path:
    """Return the folder with a run's checkpoints, also if its data or initial weights have moved,
    or else a new one. Then print other runs of the same name, how they differ and how to resume
    them. `config`: `describe_run` of it."""
    folder = run.checkpoint_folder
    if run.clap.checkpoint.folder is not None:
        return folder
    config = redacted_all(config)
    options: dict[Path, str] = {}
    for path in sorted(
        folder.parent.glob(f"{glob.escape(run.run_name)}-{'[0-9a-f]' * 8}-checkpoints")
    ):
        damaged: dict[str, str] = {}
        manifests = [*read_all(path, damaged).values()]
        if damaged and not manifests and path != folder:
            options[path] = (
                f"--set clap.checkpoint.folder={path} (none of its {len(damaged)} checkpoints can be read)"
            )
        for manifest in manifests[:1]:
            settings = manifest.settings
            is_same = all(
                find_field(settings, name) == find_field(config, name) for name in _IDENTITY
            )
            # Earlier versions recorded no contents.
            if is_same or (path == folder and find_field(settings, "clap.contents") is None):
                return path
            changes = "; ".join(_different_settings(settings, config))
            options[path] = f"--set clap.checkpoint.folder={path} (step {manifest.step}; {changes})"
    if folder in options:  # it has the same paths, but their contents have changed
        checksum = zlib.crc32(repr(config["clap"]["contents"]).encode())
        folder = folder.with_name(f"{run.run_name}-{checksum:08x}-checkpoints")
    if options:
        print(
            f"{folder} is new. Other runs named {run.run_name} resume with:",
            *options.values(),
            sep="\n  ",
            flush=True,
        )
    return folder


def find_newest(folder: Path, url: str | None, remote_sync: str | None) -> Path | None:
    """Return the newest good checkpoint at a URL, or without one in a folder or, if it has none, at
    `remote_sync`. From URLs it is downloaded into the folder. Raises ValueError if a URL can't be
    read or has none, or if all are damaged."""
    damaged = dict[str, str]()
    remote = dict[str, str]()
    place = url or remote_sync
    found = None if url else newest_good(folder, damaged)
    if found is None and place is not None:
        try:
            found = RemoteFolder(place).download_newest(folder, remote)
        except Exception as error:  # its type depends on the file system's package
            raise ValueError(f"{place} can't be read ({type(error).__name__}: {error})") from error
    if found is None and url and not remote:
        raise ValueError(f"{url}: no checkpoint found")
    if found is None and (reasons := [*damaged.values(), *remote.values()]):
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise ValueError(
            f"{folder}: all {len(reasons)} checkpoints are damaged; nothing was started or deleted:{listed}\n"
            "  Rerun the same command, or pass --restart to move them aside and start from scratch"
        )
    return found


def restore(
    folder: Path,
    engine: ClapEngine,
    config: dict[str, Any],
    tokenizer: str | None,
    *,
    resume_weights_only: bool,
) -> TrainState:
    """Restore the engine and this rank's random number generators; only weights and progress after
    accepted changes. A collective; raises ValueError for changes that need
    `resume_weights_only`."""
    to_accept, others = run_on_rank0(
        lambda: compare(folder, engine.model.config, describe(engine), config, tokenizer)
    )
    if to_accept and not resume_weights_only:
        advice = "--resume_weights_only continues from its weights with a new optimizer state; --restart starts from scratch"
        if any(
            change.startswith("the tokenizer") for change in to_accept
        ):  # the weights are of other token ids
            advice = "Set clap.data.tokenizer to the former one; --restart starts from scratch"
        raise ValueError(f"{folder} can't be resumed: {'; '.join(to_accept)}. {advice}")
    if rank() == 0 and (found := [*to_accept, *others]):
        alone = "; only its weights and step are restored" if to_accept else ""
        warn(f"settings have changed since {folder.name}: {'; '.join(found)}{alone}")
    progress = TrainState.from_json(read_bytes(folder / PROGRESS))
    engine.steps = progress.step
    if engine.average is not None:
        engine.average.load(load_weights(folder / WEIGHTS, engine.model.config).state)
    if to_accept:
        weights = load_weights(
            folder / (RAW if (folder / RAW).exists() else WEIGHTS), engine.model.config
        )
        load_weights_alone(engine, weights, progress.step, progress.samples)
        return progress
    state = read_state_file(folder / STATE)
    load_engine_state(engine, state, folder)
    if rank() < len(state["random"]):
        restore_random_state(state["random"][rank()], engine.model.logit_scale.device)
    return progress


def compare(
    folder: Path,
    model: ClapConfig,
    engine: dict[str, Any],
    config: dict[str, Any],
    tokenizer: str | None,
) -> tuple[list[str], list[str]]:
    """Describe how a run differs from a checkpoint: differences that need acceptance, and others.

    Args:
        engine: this run's `clap_ds.checkpoint.restore.describe`.
        config: this run's JSON; if empty, only model, engine and tokenizer are compared.
    """
    manifest = Manifest.read(folder)
    check_same_model(folder, ClapConfig.model_validate(manifest.model), model)
    found = differences(engine | manifest.engine, engine)
    others = [each for each in found if each.startswith("scheduler is")]
    to_accept = [each for each in found if each not in others]
    is_trusted = manifest.tokenizer == TOKENIZER
    if problem := tokenizer_problem(
        manifest.tokenizer_in(folder), tokenizer, model.text, is_trusted=is_trusted
    ):
        to_accept.append(f"the tokenizer: {problem}")
    if manifest.settings and config:
        there = precision_of(manifest.settings)
        here = precision_of(config)
        if there != here:
            to_accept.append(f"the precision is {there} there, {here} here")
        others += _different_settings(manifest.settings, redacted_all(config))
        rates = [
            find_field(settings, "clap.train.lr_scale") or {}
            for settings in (manifest.settings, config)
        ]
        if rates[0] != rates[1]:  # which explains other groups
            lr_scale = "clap.train.lr_scale is {} there, {} here".format(*rates)
            to_accept = [
                lr_scale if change.startswith("parameter_groups") else change
                for change in to_accept
            ]
    return to_accept, others


def tokenizer_problem(
    theirs: str | None, ours: str | None, text: TextConfig, *, is_trusted: bool = True
) -> str | None:
    """Describe how two tokenizers differ; None if they don't, or if one is None. Unless
    `is_trusted`, `theirs` is a name that a file of others states."""
    if theirs is None or ours is None or theirs == ours:
        return None
    try:
        if not is_trusted:
            check_recorded(theirs, "the checkpoint", "clap.data.tokenizer")
        other = load_tokenizer(ours, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id)
        one = load_tokenizer(theirs, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id)
    except ValueError as error:
        return f"{theirs} there and {ours} here can't be compared: {error}"
    if (
        one.get_vocab() != other.get_vocab()
        or one(_PROBES)["input_ids"] != other(_PROBES)["input_ids"]
    ):
        return f"{ours} gives captions other token ids than {theirs}, which the weights were trained with"
    return None


def _different_settings(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    there = flatten(theirs)
    here = flatten(ours)
    return [
        f"{name}: {there.get(name, 'not set')!r} there, {here.get(name, 'not set')!r} here"
        for name in dict.fromkeys((*here, *there))
        if there.get(name) != here.get(name)
        and not name.startswith(_OF_NO_CONSEQUENCE)
        # Fields of `clap` that only one side has are another version's or another kind's.
        and (not name.startswith("clap.") or (name in there and name in here))
    ]


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
    for number, parameters in enumerate(parameters_by_group(engine.deepspeed.optimizer)):
        in_model_order = sorted(parameters, key=positions.__getitem__)
        orders = (parameters, in_model_order) if to_model_order else (in_model_order, parameters)
        if FLAT_MASTERS in state:
            moments = inner["state"].get(number, {})
            for name in moments.keys() - {"step"}:
                moments[name] = _reorder(moments[name], *orders)
        else:
            group = inner["param_groups"][number]
            group["params"] = _reorder(group["params"], *orders)
        for name in {MASTERS, FLAT_MASTERS} & state.keys():
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
