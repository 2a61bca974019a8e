"""Find and load a checkpoint (full state or weights only), and report how the run's configuration
differs from it."""

import glob
import zlib
from pathlib import Path
from typing import Any

from clap_ds.config.files import flatten, read_bytes
from clap_ds.config.model import ClapConfig, TextConfig
from clap_ds.config.overrides import find_field
from clap_ds.config.redaction import redacted_all
from clap_ds.config.schema import ShardData
from clap_ds.config.settings import RunSettings, precision_of
from clap_ds.data.shard_assignment import expand_sources
from clap_ds.data.shard_manifest import describe_contents
from clap_ds.distributed.collectives import rank, run_on_rank0
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.grad_cache import restore_random_state
from clap_ds.engine.state import describe, load_engine_state, load_weights_alone
from clap_ds.training.remote_sync import RemoteFolder
from clap_ds.training.train_state import TrainState
from clap_ds.weights.checkpoint_files import (
    RAW,
    STATE,
    TOKENIZER,
    WEIGHTS,
    Manifest,
    newest_good,
    read_all,
    warn,
)
from clap_ds.weights.hub import check_recorded
from clap_ds.weights.load import check_same_model, differences, load_weights
from clap_ds.weights.state_file import read_state_file
from clap_ds.weights.tokenizer import load_tokenizer

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
        engine: this run's `clap_ds.engine.state.describe`.
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
