"""Find and load a checkpoint (full state or weights only), and report how the run's configuration differs from it."""

from pathlib import Path
from typing import Any

from clap_ds.config.files import flatten, read_bytes
from clap_ds.config.model import ClapConfig, TextConfig
from clap_ds.config.redaction import redacted_all
from clap_ds.config.settings import precision_of
from clap_ds.distributed.collectives import rank, run_on_rank0
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.grad_cache import restore_random_state
from clap_ds.engine.state import describe, load_engine_state, load_weights_alone
from clap_ds.training.remote_sync import RemoteFolder
from clap_ds.training.train_state import TrainState
from clap_ds.weights.checkpoint_files import RAW, STATE, WEIGHTS, Manifest, newest_good, warn
from clap_ds.weights.load import check_same_model, differences, load_weights
from clap_ds.weights.state_file import read_state_file
from clap_ds.weights.tokenizer import load_tokenizer

PROGRESS = "progress.json"
_OF_NO_CONSEQUENCE = (
    *("clap.output", "clap.checkpoint", "clap.bench", "clap.hardware", "clap.debug"),
    *("clap.train.resume", "clap.train.log_every_steps"),
)
_PROBES = ["A dog barks; rain falls on a tin roof.", "ÜBER 3 Vögel singen…"]


def find_newest(folder: Path, url: str | None, remote_sync: str | None) -> Path | None:
    """Return the newest good checkpoint at a URL, or without one in a folder or, if it has none, at `remote_sync`. From URLs it
    is downloaded into the folder. Raises ValueError if a URL can't be read or has none, or if all are damaged."""
    damaged, remote, place = dict[str, str](), dict[str, str](), url or remote_sync
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
    folder: Path, engine: ClapEngine, config: dict[str, Any], tokenizer: str | None, *, resume_weights_only: bool
) -> TrainState:
    """Restore the engine and this rank's random number generators; only weights and progress after accepted changes.
    A collective; raises ValueError for changes that need `resume_weights_only`."""
    to_accept, others = run_on_rank0(lambda: compare(folder, engine.model.config, describe(engine), config, tokenizer))
    if to_accept and not resume_weights_only:
        raise ValueError(
            f"{folder} can't be resumed: {'; '.join(to_accept)}. --resume_weights_only continues from its weights with a new"
            " optimizer state; --restart starts from scratch"
        )
    if rank() == 0 and (found := [*to_accept, *others]):
        alone = "; only its weights and step are restored" if to_accept else ""
        warn(f"settings have changed since {folder.name}: {'; '.join(found)}{alone}")
    progress = TrainState.from_json(read_bytes(folder / PROGRESS))
    engine.steps = progress.step
    if engine.average is not None:
        engine.average.load(load_weights(folder / WEIGHTS).state)
    if to_accept:
        weights = load_weights(folder / (RAW if (folder / RAW).exists() else WEIGHTS))
        load_weights_alone(engine, weights, progress.step, progress.samples)
        return progress
    state = read_state_file(folder / STATE)
    load_engine_state(engine, state, folder)
    if rank() < len(state["random"]):
        restore_random_state(state["random"][rank()], engine.model.logit_scale.device)
    return progress


def compare(
    folder: Path, model: ClapConfig, engine: dict[str, Any], config: dict[str, Any], tokenizer: str | None
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
    if problem := tokenizer_problem(manifest.tokenizer_in(folder), tokenizer, model.text):
        to_accept.append(f"the tokenizer: {problem}")
    if manifest.settings and config:
        there, here = precision_of(manifest.settings), precision_of(config)
        if there != here:
            to_accept.append(f"the precision is {there} there, {here} here")
        others += _different_settings(redacted_all(manifest.settings), redacted_all(config))
    return to_accept, others


def tokenizer_problem(theirs: str | None, ours: str | None, text: TextConfig) -> str | None:
    """Describe how two tokenizers differ; None if they don't, or if one is None."""
    if theirs is None or ours is None or theirs == ours:
        return None
    try:
        other = load_tokenizer(ours, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id)
        one = load_tokenizer(theirs, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id)
    except ValueError as error:
        return f"{theirs} there and {ours} here can't be compared: {error}"
    if one.get_vocab() != other.get_vocab() or one(_PROBES)["input_ids"] != other(_PROBES)["input_ids"]:
        return f"{ours} gives captions other token ids than {theirs}, which the weights were trained with"
    return None


def _different_settings(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    there, here = flatten(theirs), flatten(ours)
    return [
        f"{name}: {there.get(name, 'not set')!r} there, {here.get(name, 'not set')!r} here"
        for name in dict.fromkeys((*here, *there))
        if there.get(name) != here.get(name)
        and not any(f"{name}.".startswith(f"{section}.") for section in _OF_NO_CONSEQUENCE)
        # Fields of `clap` that only one side has are another version's or another kind's.
        and (not name.startswith("clap.") or (name in there and name in here))
    ]
