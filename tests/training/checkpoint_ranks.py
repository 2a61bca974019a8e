"""Functions that ranks run in checkpoint tests: train a micro model a few steps, save, continue,
load elsewhere."""

import errno
import io
import itertools
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as world_size

from clap_ds.checkpoint import checkpoint_files, manager
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.restore import fp32_state
from clap_ds.checkpoint.resume import resume
from clap_ds.checkpoint.train_state import ResumeOptions, SavedCheckpoint, TrainState
from clap_ds.config.schema import CheckpointSettings
from clap_ds.config.settings import RunSettings
from clap_ds.data.batch import Batch
from clap_ds.distributed.collectives import gather_tensor, reduce_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.engine import factory
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.engine.factory import freeze
from clap_ds.engine.loss import LOSSES
from clap_ds.engine.optimizer import master_weights
from clap_ds.model.clap import ClapModel
from clap_ds.run_records.run_dir import RunDirectory
from tests.training.reference_steps import engine_of, run_settings

ROWS = 6
"""Rows of a global batch for any number of ranks."""
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
_COURSE = {
    "total_num_steps": 12,
    "warmup_num_steps": 4,
    "warmup_type": "linear",
    "cos_min_ratio": 0.1,
}
SCHEDULER = {"type": "WarmupCosineLR", "params": _COURSE}


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect warnings, available after the block."""
    found: list[str] = []
    with redirect_stderr(io.StringIO()) as text:
        yield found
    found += [line for line in text.getvalue().splitlines() if line.startswith("warning: ")]


def settings(precision: str = "bf16", **changes: Any) -> RunSettings:
    run = {
        "bf16": {"enabled": precision == "bf16"},
        **(AUTOCAST if precision == "autocast" else {}),
    }
    adam = {"type": "AdamW", "params": {"lr": 5e-3}}
    size = ROWS // world_size()
    return run_settings(
        **run | {"optimizer": adam, "train_micro_batch_size_per_gpu": size} | changes
    )


def engine(run: RunSettings, seed: int, *, noisy: bool = False) -> ClapEngine:
    """Return a new engine; `noisy`: with dropout, stochastic depth and SpecAugment."""
    torch.manual_seed(seed)
    noise: dict[str, Any] = {
        "drop_path": 0.3 * noisy,
        "text_dropout": 0.3 * noisy,
        "spec_augment": noisy,
    }
    model = ClapModel(run.clap.preset(), **noise, learns_bias=LOSSES[run.clap.loss.kind].needs_bias)
    freeze(model, run.clap.train.freeze)
    built = engine_of(run, model)
    torch.manual_seed(seed + 10 + rank())
    if not noisy:
        norm = (
            model.audio.batch_norm.eval()
        )  # statistics of one rank's rows would depend on the number of ranks
        norm.running_mean.fill_(-20)
        norm.running_var.fill_(90)
    return built


def batches(start: int) -> Iterator[Batch]:
    """Yield this rank's rows of the global batches from `start` on: tones and captions, constant
    except for noise."""
    rows = ROWS // world_size()
    mine = slice(rank() * rows, (rank() + 1) * rows)
    tones = torch.sin(
        2 * torch.pi * 200 * 2 ** torch.arange(ROWS)[:, None] * torch.arange(48000) / 48000
    )
    ids = torch.randint(3, 512, (ROWS, 16), generator=torch.Generator().manual_seed(0))
    for number in itertools.count(start):
        noise = torch.randn(ROWS, 48000, generator=torch.Generator().manual_seed(number))
        yield Batch((0.3 * tones + 0.01 * noise)[mine], ids[mine], torch.ones_like(ids[mine]))


def losses(engine: ClapEngine, start: int, number: int) -> list[float]:
    """Return the global batch's loss per step."""
    source = batches(start)
    return [reduce_on_rank0(float(engine.step(source)), fmean) for _ in range(number)]


def trained_engine(steps: int = 1) -> ClapEngine:
    """Of a bf16 run."""
    trained = engine(settings(), 1)
    losses(trained, 0, steps)
    return trained


def progress(step: int) -> TrainState:
    data = [{"rank": number, "step": step} for number in range(world_size())]
    return TrainState(
        step, step * ROWS, step / 7, data, 1.5, {"zero_shot_top1": 0.25}, {"ramp": [1, 2]}
    )


def load(
    folder: Checkpointer, into: ClapEngine, path: Path | None = None, **options: Any
) -> TrainState:
    found = folder.find(path and str(path))
    assert found is not None
    return folder.load(found, into, **options)


def resumed(folder: str, precision: str, frozen: tuple[str, ...]) -> dict[str, Any]:
    """Return losses of a run that continues, and of one that resumes from its checkpoint, with
    dropout."""
    train = {
        "freeze": list(frozen),
        "ema_decay": 0.9,
        "lr_scale": {"text": 0.5} if "audio" in frozen else {},
    }
    run = settings(precision, scheduler=SCHEDULER, clap={"train": train})

    def three_steps(trained: ClapEngine) -> tuple[object, ...]:
        draws = losses(trained, 3, 3), float(torch.rand(1))
        assert trained.average is not None
        average = [each.tolist() for each in trained.average.weights.values()]
        return *draws, trained.deepspeed.get_lr(), trained.deepspeed.global_samples, average

    first = engine(run, 1, noisy=True)
    losses(first, 0, 3)
    (saved,) = Checkpointer(folder).save(first, progress(3))
    uninterrupted = three_steps(first)
    second = engine(run, 99, noisy=True)
    loaded = load(Checkpointer(folder), second)
    again = three_steps(second)
    steps = second.steps, second.deepspeed.global_steps, second.deepspeed.skipped_steps
    found = {"saved": saved, "uninterrupted": uninterrupted, "resumed": again, "progress": loaded}
    return {**found, "steps": steps}


def resumed_in_another_order(
    folder: str, precision: str, optimizer: dict[str, Any], alignments: tuple[int, int]
) -> tuple[list[list[str]], list[dict[str, list[float]]]]:
    """Save a run with groups of one alignment, and resume it with another. Return both optimizers'
    orders of parameters, and their masters and moments by name."""
    run = settings(precision, optimizer=optimizer)
    engines = []
    for alignment in alignments:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factory, "ALIGNED", alignment)
            engines.append(engine(run, alignment))
    first, second = engines
    losses(first, 0, 3)
    Checkpointer(folder).save(first, progress(3))
    load(Checkpointer(folder), second)
    return [[*each.masters] for each in engines], [_masters_and_moments(each) for each in engines]


@torch.no_grad()
def _masters_and_moments(trained: ClapEngine) -> dict[str, list[float]]:
    """Return each parameter's master weights, first and second moments. Overwrites the engine's."""
    outer = trained.deepspeed.optimizer
    inner = getattr(outer, "optimizer", outer)
    values: dict[str, list[float]] = {
        name: master.flatten().tolist() for name, master in trained.masters.items()
    }
    for moment in ("exp_avg", "exp_avg_sq"):
        for group in inner.param_groups:
            for master in group["params"]:
                master.copy_(inner.state[master][moment])
        for name, master in master_weights(trained.model, outer).items():
            values[name] += master.flatten().tolist()
    return values


def save(
    folder: str,
    scores: tuple[float | None, ...] = (None,),
    tokenizer: str | None = None,
    **options: Any,
) -> list[SavedCheckpoint]:
    """Save checkpoints of a bf16 run after two steps, one per score."""
    trained = trained_engine(2)
    checkpoints = Checkpointer(
        folder, CheckpointSettings(**options), tokenizer=tokenizer, config=settings().resolved()
    )
    saved = [
        checkpoints.save(
            trained, progress(step), None if score is None else {"zero_shot_top1": score}
        )[0]
        for step, score in enumerate(scores, start=1)
    ]
    assert checkpoints.close() == []
    return saved


def fail_at_weights(folder: str) -> tuple[SavedCheckpoint, list[str], list[str]]:
    """Save, fail with a full disk at the weights, train, and save. Return the failed result,
    warnings and files."""
    trained = trained_engine()
    write = manager.save_tensors
    checkpoints = Checkpointer(folder)
    assert checkpoints.save(trained, progress(1))[0].saved

    def full(path: Path, *content: Any) -> Any:
        if path.name == "state.safetensors":
            return write(path, *content)
        path.write_bytes(b"cut short")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, warned() as warnings:
        patch.setattr(manager, "save_tensors", full)
        (failed,) = checkpoints.save(trained, progress(2))
    left = [path.name for path in Path(folder).iterdir()]
    losses(trained, 1, 1)
    assert checkpoints.save(trained, progress(3))[0].saved
    return failed, warnings, left


def save_behind(folder: str) -> tuple[list[SavedCheckpoint | None], list[float], list[float]]:
    """Write a checkpoint during three steps, and another one. Return losses of the steps and of a
    run that resumes from the first. Starting the first takes 2 s, the steps 10 s, and its end 3
    s."""
    run = settings(clap={"train": {"ema_decay": 0.9}})
    now = [100.0]
    trained = engine(run, 1, noisy=True)
    losses(trained, 0, 2)
    checkpoints = Checkpointer(folder)
    goes_on = threading.Event()
    write = manager.save_tensors
    lasting = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            manager, "save_tensors", lambda *content: goes_on.wait(60) and write(*content)
        )
        patch.setattr(manager, "time", SimpleNamespace(time=lambda: now[0]))
        patch.setattr(manager, "gather_tensor", lambda own: (lasting(2.0), gather_tensor(own))[1])
        checkpoints.save(trained, progress(2), wait=False)
        uninterrupted = losses(trained, 2, 3)
        lasting(10.0)
        assert not checkpoints.poll()
        patch.setattr(
            manager, "wait", lambda *futures: (lasting(3.0), goes_on.set(), wait(*futures))[2]
        )
        first = checkpoints.finish()
    (second,) = checkpoints.save(trained, progress(5))
    assert first is not None
    other = engine(run, 99, noisy=True)
    load(Checkpointer(folder), other, first.path)
    return [first, second], uninterrupted, losses(other, 2, 3)


def poisoned_behind(folder: str) -> tuple[SavedCheckpoint | None, str]:
    """Return rank 0's result of a checkpoint that isn't finite, and the error on all ranks at the
    next one."""
    trained = trained_engine()
    checkpoints = Checkpointer(folder)
    with torch.no_grad():
        trained.deepspeed.optimizer.fp32_groups_flat[0][7] = torch.inf
    checkpoints.save(trained, progress(1), wait=False)
    (told,) = checkpoints.poll(None)
    with pytest.raises(NonFiniteError) as refusal:
        checkpoints.finish()
    return told, str(refusal.value)


def resume_otherwise(
    folder: str, precision: str, changes: dict[str, Any], accept: bool = False
) -> tuple[str, Any]:
    """Resume a run with settings that differ from the checkpoint's. Return the error or warning,
    and its learning rate, whether its fp32 weights equal the checkpoint's bits, its first loss, and
    its next learning rate."""
    run = settings(precision, **changes)
    other = engine(run, 99)
    with warned() as warnings:
        try:
            load(Checkpointer(folder, config=run.resolved()), other, resume_weights_only=accept)
        except ValueError as error:
            return str(error), None
    saved = load_weights(checkpoint_files.newest_good(Path(folder)) / "weights.safetensors").state
    trained = {
        name
        for name, parameter in other.model.named_parameters()
        if parameter.requires_grad and name in saved
    }
    same = all(
        torch.equal(tensor, saved[name])
        for name, tensor in fp32_state(other).items()
        if name in trained
    )
    rate = other.deepspeed.get_lr()[0]
    return "".join(warnings), (
        rate,
        same,
        losses(other, other.steps, 1)[0],
        other.deepspeed.get_lr()[0],
    )


def starts(folder: str, jobs: list[str], choices: ResumeOptions, wanted: str = "auto") -> list[int]:
    """Return the steps at which starts of one command begin, given their job attempts, in a folder
    with step 5 of another run; each start saves one more step."""
    trained = trained_engine()
    theirs = Checkpointer(folder)
    theirs.run_id = "theirs"
    theirs.save(trained, progress(5))
    wanted = wanted.format(folder)
    rule = CheckpointSettings(keep_last=9)
    found = []
    for job in jobs:
        ranks = Ranks(0, 1, 0, 1, job_folder=Path(job) if job else None)
        of_job = Checkpointer(folder, rule, job=ranks.job_folder and ranks.job_folder.parent)
        with tempfile.TemporaryDirectory() as record, of_job as checkpoints:
            begun = resume(checkpoints, trained, wanted, choices, ranks, RunDirectory(Path(record)))
            found.append(begun.step)
            assert checkpoints.save(trained, progress(begun.step + 1))[0].saved
    return found
