"""What ranks do in tests of checkpoints: train a micro model a few steps, save, go on, load elsewhere."""

from __future__ import annotations

import errno
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.batch import Batch
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.record.clock import PhaseTimer
from clap_ds.training import checkpoint, random_state
from clap_ds.training.checkpoint import CheckpointFolder, Progress, SavedCheckpoint
from clap_ds.training.start import freeze
from clap_ds.weights import checkpoint_files
from tests.conftest import micro_run

DEVICE = torch.device("cpu")
TIMER = PhaseTimer(DEVICE, instrumented=False)
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


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def settings(precision: str = "bf16", **changes: Any) -> RunSettings:
    content = micro_run(
        **{
            **PRECISIONS[precision],
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
            "train_micro_batch_size_per_gpu": ROWS // world_size(),
            **changes,
            "clap": {"gradient_bucket_mb": 0.05, **changes.get("clap", {})},
        }
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        return load_run(file.name)


def engine(run: RunSettings, seed: int, *, noisy: bool = False) -> ClapEngine:
    """A fresh engine; `noisy`: with dropout, stochastic depth and SpecAugment."""
    torch.manual_seed(seed)
    rate = 0.3 if noisy else 0.0
    sigmoid = run.clap.loss.kind == "sigmoid"
    model = ClapModel(run.clap.preset(), drop_path=rate, text_dropout=rate, spec_augment=noisy, sigmoid=sigmoid)
    freeze(model, run.clap.train.freeze)
    built = ClapEngine(run, model, DEVICE)
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
    values = []
    for _ in range(number):
        loss = engine.step(source, TIMER)
        if dist.is_initialized():
            dist.all_reduce(loss)
        values.append(float(loss) / world_size())
    return values


def progress(step: int) -> Progress:
    return Progress(
        step=step,
        samples=step * ROWS,
        epoch=step / 7,
        data=[{"rank": number, "step": step} for number in range(world_size())],
        world_size=world_size(),
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
    if not restore:
        random_state_restore, random_state.restore = random_state.restore, lambda state, device: None
    loaded = CheckpointFolder(folder).load(folder, second)
    if not restore:
        random_state.restore = random_state_restore
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
    assert checkpoints.load(newest, second).world_size == 3 - world_size()
    return losses(second, 3, 4), losses(engine(run, 98), 3, 4)


def fail_at_file(folder: str, number: int) -> dict[str, Any]:
    """Save twice, the second time on a disk that is full from the `number`th file on; then train on and save again."""
    run = settings()
    trained = engine(run, 1)
    losses(trained, 0, 1)
    warnings: list[str] = []
    checkpoints = CheckpointFolder(folder, keep_last=2, warn=warnings.append)
    first = checkpoints.save(trained, progress(1))
    files = 0
    close = checkpoint_files.HashedFile.close

    def full(file: checkpoint_files.HashedFile) -> Any:
        nonlocal files
        files += 1
        if files >= number:
            close(file)
            raise OSError(errno.ENOSPC, "No space left on device")
        return close(file)

    checkpoint_files.HashedFile.close = full  # type: ignore[method-assign]
    try:
        failed = checkpoints.save(trained, progress(2))
    finally:
        checkpoint_files.HashedFile.close = close  # type: ignore[method-assign]
    left = sorted(path.name for path in Path(folder).iterdir()) if rank() == 0 else []
    newest = checkpoints.newest()
    after = losses(trained, 1, 1)
    second = checkpoints.save(trained, progress(3))
    return {"first": first, "failed": failed, "left": left, "newest": newest, "loss": after, "second": second,
            "warnings": warnings, "files": files}  # fmt: skip


def save_on(
    folder: str, steps: list[int], **options: Any
) -> tuple[list[SavedCheckpoint], list[str], tuple[int, float]]:
    """Save these steps of one engine; outcomes, warnings and the estimate made before."""
    trained = engine(settings(), 1)
    warnings: list[str] = []
    checkpoints = CheckpointFolder(folder, warn=warnings.append, **options)
    estimate = checkpoints.estimate(trained)
    losses(trained, 0, 1)
    return [checkpoints.save(trained, progress(step)) for step in steps], warnings, estimate


def save_with(folder: str, precision: str, changes: dict[str, Any]) -> Path | None:
    """One checkpoint of a run with some settings changed."""
    trained = engine(settings(precision, **changes), 1)
    losses(trained, 0, 2)
    return CheckpointFolder(folder).save(trained, progress(2)).path


def refusal(folder: str, precision: str, changes: dict[str, Any], joint_dim: int | None = None) -> str:
    """Why a checkpoint isn't loaded into another run."""
    other = engine(settings(precision, **changes), 1)
    if joint_dim is not None:
        other.model.config = other.model.config.model_copy(update={"name": "other_model", "joint_dim": joint_dim})
    try:
        CheckpointFolder(folder, warn=lambda message: None).load(folder, other)
    except ValueError as error:
        return str(error)
    return "not refused"


def refusal_when_unseen(folder: str) -> str:
    """Why a checkpoint isn't loaded that rank 1 doesn't see, as on a host without the file system."""
    other = engine(settings(), 1)
    if rank() == 1:
        name, checkpoint.PROGRESS = checkpoint.PROGRESS, "not seen"
    try:
        CheckpointFolder(folder).load(folder, other)
    except ValueError as error:
        return str(error)
    finally:
        if rank() == 1:
            checkpoint.PROGRESS = name
    return "not refused"


def refusal_of_folder(folder: str) -> str:
    """Why checkpoints can't lie there."""
    try:
        CheckpointFolder(folder)
    except ValueError as error:
        return str(error)
    return "not refused"


def weights_of(path: str) -> dict[str, torch.Tensor]:
    """bf16 parameters and fp32 master weights that an engine has after loading, by name; those DeepSpeed loads alone."""
    second = engine(settings(), 99)
    loaded, client_state = second.deepspeed.load_checkpoint(path)
    assert loaded is not None
    assert client_state["clap_ds"]["step"] == 2
    return {name: parameter.detach() for name, parameter in second.model.named_parameters()}


def metric_saves(folder: str, scores: list[float], **options: Any) -> tuple[list[str], list[str]]:
    """Names left in the folder after saving with these scores, and the warnings."""
    trained = engine(settings(), 1)
    warnings: list[str] = []
    checkpoints = CheckpointFolder(folder, warn=warnings.append, **options)
    for step, score in enumerate(scores, start=1):
        checkpoints.save(trained, progress(step), metrics={"zero_shot_top1": score})
    return sorted(path.name for path in Path(folder).iterdir()), warnings


def save_until_killed(folder: str, seed: int, told: Any) -> None:
    """Saves without end, telling each step after it is reported as saved. Run in a process of its own."""
    from clap_ds.dist import distributed

    distributed.initialize(distributed.Ranks(0, 1, 0, 1), compile_cpu_collective=False)
    trained = engine(settings(), 1)
    losses(trained, 0, 1)
    checkpoints = CheckpointFolder(folder, keep_last=2, keep_best=0)
    newest = checkpoints.newest()
    step = int(newest.name.split("-")[1]) if newest else 0
    told.send("ready")
    while True:
        step += 1
        assert checkpoints.save(trained, progress(step)).saved
        told.send(step)


def load_newest(folder: str) -> tuple[int, list[float]]:
    """Step of the newest good checkpoint and losses from there."""
    second = engine(settings(), 99)
    loaded = checkpoint.CheckpointFolder(folder).load(folder, second)
    return loaded.step, losses(second, 1, 1)
