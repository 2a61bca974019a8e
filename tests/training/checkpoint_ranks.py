"""What ranks do in tests of checkpoints: train a micro model a few steps, save, go on, load elsewhere."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as world_size

from clap_ds.config.sections import CheckpointSettings
from clap_ds.config.settings import RunSettings
from clap_ds.data.batch import Batch
from clap_ds.dist.agreement import gather_tensor
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.record.clock import PhaseTimer
from clap_ds.training import checkpoint
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.schedule import SavedCheckpoint, TrainingProgress
from clap_ds.training.start import freeze
from clap_ds.weights import checkpoint_files
from tests.training.reference_steps import CPU, run_settings

TIMER = PhaseTimer(CPU, instrumented=False)
ROWS = 6
"""Of every global batch, whatever the number of ranks."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": {"enabled": False}},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
SCHEDULER = {
    "type": "WarmupCosineLR",
    "params": {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_type": "linear", "cos_min_ratio": 0.1},
}


def settings(precision: str = "bf16", **changes: Any) -> RunSettings:
    optimizer = {"type": "AdamW", "params": {"lr": 5e-3}}
    rows = {"train_micro_batch_size_per_gpu": ROWS // world_size()}
    return run_settings(**{**PRECISIONS[precision], "optimizer": optimizer, **rows, **changes})


def engine(run: RunSettings, seed: int, *, noisy: bool = False) -> ClapEngine:
    """A fresh engine; `noisy`: with dropout, stochastic depth and SpecAugment."""
    torch.manual_seed(seed)
    rate = 0.3 if noisy else 0.0
    sigmoid = run.clap.loss.kind == "sigmoid"
    model = ClapModel(run.clap.preset(), drop_path=rate, text_dropout=rate, spec_augment=noisy, sigmoid=sigmoid)
    freeze(model, run.clap.train.freeze)
    built = ClapEngine(run, model, CPU)
    torch.manual_seed(seed + 10 + rank())
    if not noisy:
        norm = model.audio.batch_norm.eval()  # statistics of a rank's own rows would depend on the number of ranks
        norm.running_mean.fill_(-20)
        norm.running_var.fill_(90)
    return built


def batches(start: int) -> Iterator[Batch]:
    """This rank's rows of the global batches from `start` on: tones and their captions, the same every time but for noise."""
    rows = ROWS // world_size()
    mine = slice(rank() * rows, (rank() + 1) * rows)
    tones = torch.sin(2 * torch.pi * 200 * 2 ** torch.arange(ROWS)[:, None] * torch.arange(48000) / 48000)
    ids = torch.randint(3, 512, (ROWS, 16), generator=torch.Generator().manual_seed(0))
    number = start
    while True:
        noise = torch.randn(ROWS, 48000, generator=torch.Generator().manual_seed(number))
        waveforms = 0.3 * tones + 0.01 * noise
        yield Batch(waveforms[mine], ids[mine], torch.ones_like(ids[mine]))
        number += 1


def losses(engine: ClapEngine, start: int, number: int) -> list[float]:
    """Of the global batch, step by step."""
    source = batches(start)
    return [float(gather_tensor(engine.step(source, TIMER)).mean()) for _ in range(number)]


def progress(step: int) -> TrainingProgress:
    return TrainingProgress(
        step=step,
        samples=step * ROWS,
        epoch=step / 7,
        data=[{"rank": number, "step": step} for number in range(world_size())],
        train_s=1.5,
        best={"zero_shot_top1": 0.25},
        extra={"ramp": [1, 2]},
    )


def draws() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.rand())


def resumed(folder: str, precision: str, restore: bool = True, frozen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Losses and more of a run that goes on, and of another that goes on from its checkpoint, dropout and all."""
    run = settings(precision, scheduler=SCHEDULER, clap={"train": {"freeze": list(frozen)}})
    random.seed(rank())
    np.random.seed(rank())
    first = engine(run, 1, noisy=True)
    losses(first, 0, 3)
    checkpoints = CheckpointFolder(folder)
    saved = checkpoints.save(first, progress(3))
    going_on = losses(first, 3, 3), draws(), first.deepspeed.get_lr(), first.deepspeed.global_samples
    second = engine(run, 99, noisy=True)
    with pytest.MonkeyPatch.context() as patch:
        if not restore:
            patch.setattr(checkpoint, "restore_random_state", lambda state, device: None)
        loaded = CheckpointFolder(folder).load(folder, second)
    again = losses(second, 3, 3), draws(), second.deepspeed.get_lr(), second.deepspeed.global_samples
    return {
        "saved": saved,
        "uninterrupted": going_on,
        "resumed": again,
        "progress": loaded,
        "steps": (second.steps, second.deepspeed.global_steps, second.deepspeed.skipped_steps),
    }


def train_and_save(folder: str, precision: str) -> list[float]:
    """Three steps, a checkpoint, and the losses of four more."""
    run = settings(precision, scheduler=SCHEDULER)
    first = engine(run, 1)
    losses(first, 0, 3)
    assert CheckpointFolder(folder).save(first, progress(3)).saved
    return losses(first, 3, 4)


def load_and_train(folder: str, precision: str) -> tuple[list[float], list[float]]:
    """Losses of four steps from the checkpoint, and from a fresh engine."""
    run = settings(precision, scheduler=SCHEDULER)
    second = engine(run, 99)
    checkpoints = CheckpointFolder(folder)
    newest = checkpoints.newest()
    assert newest is not None
    assert len(checkpoints.load(newest, second).data) == 3 - world_size()
    return losses(second, 3, 4), losses(engine(run, 98), 3, 4)


def fail_at_file(folder: str, number: int) -> dict[str, Any]:
    """Save twice, the second time on a disk that is full from the `number`th file on; then train on and save again."""
    run = settings()
    trained = engine(run, 1)
    losses(trained, 0, 1)
    warnings: list[str] = []
    checkpoints = CheckpointFolder(folder, CheckpointSettings(keep_last=2), warn=warnings.append)
    first = checkpoints.save(trained, progress(1))
    files = 0
    write_file = checkpoint_files.write_file

    def full(path: Path, content: Any) -> Any:
        nonlocal files
        files += 1
        record = write_file(path, content)
        if files >= number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return record

    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoint, checkpoint_files):
            patch.setattr(module, "write_file", full)
        failed = checkpoints.save(trained, progress(2))
    left = sorted(path.name for path in Path(folder).iterdir()) if rank() == 0 else []
    newest = checkpoints.newest()
    after = losses(trained, 1, 1)
    second = checkpoints.save(trained, progress(3))
    return {"first": first, "failed": failed, "left": left, "newest": newest, "loss": after, "second": second,
            "warnings": warnings, "files": files}  # fmt: skip


def save_on(folder: str, steps: list[int]) -> tuple[list[SavedCheckpoint], list[str], tuple[int, float]]:
    """Save these steps of one engine; outcomes, warnings and the estimate made before."""
    trained = engine(settings(), 1)
    warnings: list[str] = []
    checkpoints = CheckpointFolder(folder, warn=warnings.append)
    estimate = checkpoints.estimate(trained)
    losses(trained, 0, 1)
    return [checkpoints.save(trained, progress(step)) for step in steps], warnings, estimate


def save_once(folder: str, tokenizer: str | None = None) -> Path | None:
    """One checkpoint of a bf16 run after two steps."""
    trained = engine(settings(), 1)
    losses(trained, 0, 2)
    return CheckpointFolder(folder, tokenizer=tokenizer).save(trained, progress(2)).path


def refusal(
    folder: str, precision: str = "bf16", changes: dict[str, Any] | None = None, joint_dim: int | None = None
) -> str:
    """Why a checkpoint isn't loaded into a run with some settings changed."""
    other = engine(settings(precision, **(changes or {})), 1)
    if joint_dim is not None:
        other.model.config = other.model.config.model_copy(update={"name": "other_model", "joint_dim": joint_dim})
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        CheckpointFolder(folder, warn=lambda message: None).load(folder, other)
    return str(refusal.value)


def refusal_when_unseen(folder: str) -> str:
    """Why a checkpoint isn't loaded that rank 1 doesn't see, as on a host without the file system."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "PROGRESS", "not seen" if rank() else checkpoint.PROGRESS)
        return refusal(folder)


def refusal_of_folder(folder: str) -> str:
    """Why checkpoints can't lie there."""
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        CheckpointFolder(folder)
    return str(refusal.value)


def weights_of(path: str) -> dict[str, torch.Tensor]:
    """bf16 parameters that an engine has after DeepSpeed alone has loaded a checkpoint, by name."""
    second = engine(settings(), 99)
    loaded, client_state = second.deepspeed.load_checkpoint(path)
    assert loaded is not None
    assert client_state["clap_ds"]["step"] == 2
    return {name: parameter.detach() for name, parameter in second.model.named_parameters()}


def metric_saves(folder: str, scores: list[float], **options: Any) -> tuple[list[str], list[str]]:
    """Names left in the folder after saving with these scores, and the warnings."""
    trained = engine(settings(), 1)
    warnings: list[str] = []
    checkpoints = CheckpointFolder(folder, CheckpointSettings(**options), warn=warnings.append)
    for step, score in enumerate(scores, start=1):
        checkpoints.save(trained, progress(step), metrics={"zero_shot_top1": score})
    return sorted(path.name for path in Path(folder).iterdir()), warnings


def save_until_killed(folder: str, saved: Any) -> None:
    """Saves without end, and sends each step after it is reported as saved. Run in a process of its own."""
    from clap_ds.dist import distributed

    distributed.initialize(distributed.Ranks(0, 1, 0, 1), compile_cpu_collective=False)
    trained = engine(settings(), 1)
    losses(trained, 0, 1)
    checkpoints = CheckpointFolder(folder, CheckpointSettings(keep_last=2, keep_best=0))
    newest = checkpoints.newest()
    step = int(newest.name.split("-")[1]) if newest else 0
    saved.send("ready")
    while True:
        step += 1
        assert checkpoints.save(trained, progress(step)).saved
        saved.send(step)


def load_newest(folder: str) -> tuple[int, list[float]]:
    """Step of the newest good checkpoint and losses from there."""
    second = engine(settings(), 99)
    loaded = checkpoint.CheckpointFolder(folder).load(folder, second)
    return loaded.step, losses(second, 1, 1)
