"""What ranks do in tests of resuming: a run that has changed, reads that fail, starts of one command."""

import builtins
import errno
import io
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import get_rank as rank

from clap_ds.config.errors import AgreedError
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.state import master_weights
from clap_ds.ranks.agreement import gather, together
from clap_ds.ranks.distributed import Ranks
from clap_ds.record.directory import RunDirectory
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.start import Choices, TrainingStart
from clap_ds.weights import checkpoint_files
from clap_ds.weights.formats import load_safetensors
from tests.training.checkpoint_ranks import engine, losses, progress, settings, warned


def save_with_settings(folder: str) -> None:
    """A checkpoint after two steps of a bf16 run that states its settings."""
    trained = engine(settings(), 1)
    losses(trained, 0, 2)
    assert CheckpointFolder(folder, run=settings()).save(trained, progress(2)).saved


def resume_otherwise(
    folder: str, precision: str, changes: dict[str, Any], accept: bool = False
) -> tuple[str, list[str], Any]:
    """A run with other settings than the checkpoint's resumes from it: why it is refused, else ""; the warnings; and its
    learning rate, its first loss, whether its fp32 weights were the checkpoint's to the bit, and its next learning rate."""
    run = settings(precision, **changes)
    other = engine(run, 99)
    with warned() as warnings:
        try:
            CheckpointFolder(folder, run=run).load(folder, other, accept_changes=accept)
        except ValueError as error:
            return str(error), warnings, None
    saved = load_safetensors(checkpoint_files.newest_good(Path(folder)) / "weights.safetensors").state
    trained = {name for name, parameter in other.model.named_parameters() if parameter.requires_grad and name in saved}
    same = all(torch.equal(tensor, saved[name]) for name, tensor in master_weights(other).items() if name in trained)
    rates = other.deepspeed.get_lr()
    return "", warnings, (rates[0], losses(other, other.steps, 1)[0], same, other.deepspeed.get_lr()[0])


def fail_at_each_read(folder: str, failing_rank: int) -> list[str]:
    """What comes of resuming where a rank can't read one file or folder, for each read in turn: why it is refused, or the step
    that training goes on from."""
    trained, found, left = engine(settings(), 99), list[str](), 0

    def failing(read: Callable[..., Any]) -> Callable[..., Any]:
        def instead(path: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal left
            if isinstance(path, str | Path) and f"{path}/".startswith(f"{folder}/") and "w" not in str(arguments[:1]):
                left -= 1
                if left == 0 and rank() == failing_rank:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return read(path, *arguments, **options)

        return instead

    for number in itertools.count(1):
        left = number
        outcome = ""
        with pytest.MonkeyPatch.context() as patch, warned() as warnings:
            for module, name in ((builtins, "open"), (io, "open"), (os, "listdir"), (os, "scandir")):
                patch.setattr(module, name, failing(getattr(module, name)))
            checkpoints = CheckpointFolder(folder)

            def resume(checkpoints: CheckpointFolder = checkpoints) -> str:
                newest = checkpoints.newest()
                return "silently anew" if newest is None else f"step {checkpoints.load(newest, trained).step}"

            try:
                outcome = together(resume)
            except AgreedError as error:
                outcome = str(error)
        if gather(left)[failing_rank] > 0:
            return found
        if outcome == "step 1" and rank() == 0 and not any("passed over" in warning for warning in warnings):
            outcome = "silently from an older one"
        found.append(outcome)


def starts(folder: str, jobs: list[str], choices: Choices, resume: str = "auto") -> list[int]:
    """Steps at which starts of one command begin in a folder that holds step 5 of another run, by the attempts of jobs that
    they are; each saves a step more."""
    trained = engine(settings(), 1)
    losses(trained, 0, 1)
    theirs = CheckpointFolder(folder)
    theirs.begin("theirs")
    theirs.save(trained, progress(5))
    resume = resume.format(folder)
    run = settings(clap={"checkpoint": {"folder": folder, "keep_last": 9}, "train": {"samples": 99, "resume": resume}})
    found = []
    for job in jobs:
        with tempfile.TemporaryDirectory() as record:
            start = TrainingStart(run, Ranks(0, 1, 0, 1, job_folder=Path(job) if job else None), choices)
            start.prepare(trained, RunDirectory(Path(record)))
        found.append(start.progress.step)
        assert start.checkpoints.save(trained, progress(start.progress.step + 1)).saved
        start.close()
    return found


def rates_of_a_torch_schedule(folder: str) -> tuple[list[float], list[float]]:
    """The learning rate after each of four steps, and after the last two where they follow on a checkpoint."""
    run = settings("fp32", scheduler={"type": "ExponentialLR", "params": {"gamma": 0.5}})

    def rates(trained: ClapEngine, start: int, steps: int) -> list[float]:
        return [losses(trained, start + step, 1) and trained.deepspeed.get_lr()[0] for step in range(steps)]

    first, second = engine(run, 1), engine(run, 99)
    whole = rates(first, 0, 2)
    assert CheckpointFolder(folder).save(first, progress(2)).saved
    whole += rates(first, 2, 2)
    CheckpointFolder(folder).load(folder, second)
    return whole, rates(second, 2, 2)
