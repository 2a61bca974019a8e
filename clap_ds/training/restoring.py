"""The checkpoint to go on from, and an engine in its state: all of it, or the weights alone; what to say where none is good."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from clap_ds.config.files import read_bytes
from clap_ds.config.settings import RunSettings
from clap_ds.engine.cached_step import restore_random_state
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.state import describe, load_engine_state, load_weights_alone
from clap_ds.ranks.agreement import on_first, rank
from clap_ds.training.changes import compare
from clap_ds.training.remote import RemoteFolder
from clap_ds.training.schedule import TrainingProgress
from clap_ds.weights import checkpoint_files as files
from clap_ds.weights.checkpoint_files import STATE, WEIGHTS, Manifest, warn
from clap_ds.weights.load import load_weights
from clap_ds.weights.state_file import read_pickled_state, read_state_file

PROGRESS = "progress.json"
_PICKLED = {"engine": "deepspeed/mp_rank_00_model_states.pt", "random": "random_states.pt"}
"""Of checkpoints of format 1."""


def restore(
    folder: Path, engine: ClapEngine, run: RunSettings | None, *, accept_changes: bool, convert: bool = False
) -> TrainingProgress:
    """Put the engine, and this rank's random number generators, in the state of a whole checkpoint. A collective; arguments and
    errors are those of `CheckpointFolder.load`."""
    changes = on_first(lambda: compare(folder, Manifest.read(folder), engine.model.config, describe(engine), run))
    if changes.other_model:
        raise ValueError(
            f"{folder} can't be resumed: {'; '.join(changes.to_accept)}: its weights don't go into this model. --restart moves"
            " it aside and starts anew, as another clap.checkpoint.folder does"
        )
    if changes.to_accept and not accept_changes:
        begins = ", the optimizer's state begins anew" if changes.weights_only else ""
        raise ValueError(
            f"{folder} can't be resumed: {'; '.join(changes.to_accept)}. --accept_changes goes on from there with what this run"
            f" has{begins}; --restart starts anew"
        )
    if rank() == 0 and (found := [*changes.to_accept, *changes.others]):
        warn(f"settings have changed since {folder.name}: {'; '.join(found)}")
    if changes.weights_only:
        return restore_weights(folder, engine)
    state = _read_state(folder, convert=convert)
    load_engine_state(engine, state, folder, scheduler=not changes.scheduler)
    try:
        progress, states = TrainingProgress.from_json(read_bytes(folder / PROGRESS)), state["random"]
    except (OSError, LookupError) as error:
        raise ValueError(f"{folder} can't be read: {error}") from error
    engine.steps = progress.step
    if rank() < len(states):
        restore_random_state(states[rank()], engine.model.logit_scale.device)
    return progress


def _read_state(folder: Path, *, convert: bool) -> dict[str, Any]:
    """A checkpoint's state. One of format 1 is a pickle, and read only where that is asked for."""
    if not (folder / _PICKLED["engine"]).exists():
        found = read_state_file(folder / STATE)
    elif convert:
        found = read_pickled_state(folder / _PICKLED["engine"]) | {
            "random": read_pickled_state(folder / _PICKLED["random"])
        }
    else:
        raise ValueError(
            f"{folder} is of format 1, whose state is a pickle: --convert_checkpoint reads it, by torch's reader that runs"
            " nothing; what is saved from then on is none"
        )
    if not isinstance(found, dict):
        raise ValueError(f"{folder}: {STATE} holds no state")
    return found


def restore_weights(folder: Path, engine: ClapEngine) -> TrainingProgress:
    """The weights alone, and how far training had come, which is counted from 0 where that file is damaged. Raises ValueError:
    they are another model's, or not finite."""
    weights = load_weights(folder / WEIGHTS)
    progress = on_first(lambda: _progress(folder))
    if rank() == 0:
        counts = f"goes on at step {progress.step}" if progress.step else f"counts from 0, as {PROGRESS} is damaged"
        warn(f"{folder}: its weights alone: the optimizer and random numbers begin anew, training {counts}")
    load_weights_alone(engine, weights, progress.step, progress.samples)
    engine.steps = progress.step
    return progress


def _progress(folder: Path) -> TrainingProgress:
    with suppress(OSError):
        if files.hash_file(folder / PROGRESS) == Manifest.read(folder).files[PROGRESS].hash:
            return TrainingProgress.from_json(read_bytes(folder / PROGRESS))
    return TrainingProgress()


def find_newest(folder: Path, sync_to: str | None, damaged: dict[str, str]) -> Path | None:
    """The newest good checkpoint in a folder, brought there from `sync_to` if there is none; `damaged` gets why others in it
    aren't, by name. Raises ValueError: `sync_to` can't be read, or there are checkpoints and not one is good."""
    found, remote = files.newest_good(folder, damaged), dict[str, str]()
    if found is None and sync_to is not None:
        try:
            found = RemoteFolder(sync_to).download_newest(folder, remote)
        except Exception as error:  # of whatever type the file system's package has
            raise ValueError(
                f"clap.checkpoint.sync_to: {sync_to} can't be read ({type(error).__name__}: {error});"
                " clap.train.resume 'never' starts without"
            ) from error
    if found is None and (damaged or remote):
        raise ValueError(_none_is_good(folder, [*damaged.values(), *remote.values()]))
    return found


def _none_is_good(folder: Path, reasons: list[str]) -> str:
    """What to say where there are checkpoints, and none is whole."""
    there = files.read_all(folder)
    whole = (manifest.step for name, manifest in there.items() if files.weights_are_whole(folder / name))
    steps = ", ".join(f"--from_weights {step}" for step in dict.fromkeys(whole))
    weights = f"; {steps} goes on from weights that are whole, with a new optimizer state" if steps else ""
    listed = "".join(f"\n  {reason}" for reason in reasons)
    return (
        f"{folder}: none of {len(reasons)} checkpoints is good, and nothing has been started or deleted:{listed}\n"
        "  What can be done: the same command again, where reading failed only for the moment"
        f"{weights}; --restart moves them aside and starts anew"
    )
