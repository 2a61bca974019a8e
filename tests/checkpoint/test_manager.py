"""Saving: in the background, on a failing disk, with numbers that aren't finite, and rotation."""

import errno
import threading
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clap_ds.checkpoint import manager
from clap_ds.checkpoint.checkpoint_files import STATE, WEIGHTS, Manifest
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.remote import RemoteFolder
from clap_ds.checkpoint.train_state import SavedCheckpoint
from clap_ds.config.schema import CheckpointSettings
from clap_ds.engine.engine import NonFiniteError
from clap_ds.run_records.lock import FolderLock
from clap_ds.utils.errors import UserError
from tests.checkpoint import trained_engines as engines
from tests.weights.fake_checkpoints import flip_bit, make_checkpoint


def test_folder_locked_by_another_run_is_left_alone(tmp_path):
    other = FolderLock(tmp_path)
    other.acquire()
    with pytest.raises(UserError, match="is locked by"), Checkpointer(tmp_path):
        pass
    other.release()
    with Checkpointer(tmp_path):
        pass
    assert not tmp_path.exists(), "nothing was saved"


def save_in_background(folder: str) -> tuple[list[SavedCheckpoint], list[float], list[float]]:
    """Write a checkpoint during three steps, and another one after them.

    By a simulated clock the steps take 10 s, and waiting for the end of the first 3 s.
    Return both results, and losses of the steps and of a run that resumes from the first.
    """
    run = engines.settings(clap={"train": {"ema_decay": 0.9}})
    engine = engines.build_engine(run, 1, noisy=True)
    engines.train(engine, 0, 2)
    checkpointer = Checkpointer(folder)
    may_write = threading.Event()
    clock_s = [100.0]
    save_tensors = manager.save_tensors

    def save_when_allowed(*content: Any) -> Any:
        assert may_write.wait(60)
        return save_tensors(*content)

    def wait_3_s(*arguments: Any) -> Any:
        clock_s[0] += 3.0
        may_write.set()
        return wait(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "save_tensors", save_when_allowed)
        patch.setattr(manager, "time", SimpleNamespace(time=lambda: clock_s[0]))
        checkpointer.save(engine, engines.progress(2), wait=False)
        uninterrupted = engines.train(engine, 2, 3)
        clock_s[0] += 10.0
        assert not checkpointer.poll()
        patch.setattr(manager, "wait", wait_3_s)
        during_steps = checkpointer.finish()
    (after_steps,) = checkpointer.save(engine, engines.progress(5))
    assert during_steps is not None
    other = engines.build_engine(run, 99, noisy=True)
    engines.load(Checkpointer(folder), other, during_steps.path)
    return [during_steps, after_steps], uninterrupted, engines.train(other, 2, 3)


def test_save_in_background_writes_state_at_beginning(two_ranks, tmp_path):
    results = two_ranks.run(save_in_background, str(tmp_path))
    for (save, later_save), uninterrupted, resumed in results:
        assert (save.problem, later_save.problem) == (None, None)
        assert (save.begin, save.end) == (100.0, 113.0)
        assert resumed == uninterrupted
    ((save, _), _, _) = results[0]
    assert save.stalled_s == 3.0


def save_non_finite(folder: str) -> tuple[SavedCheckpoint, str]:
    """Return rank 0's result of a save in the background, and the error on all ranks after it."""
    engine = engines.trained_engine()
    checkpointer = Checkpointer(folder)
    with torch.no_grad():
        engine.deepspeed.optimizer.fp32_groups_flat[0][7] = torch.inf
    checkpointer.save(engine, engines.progress(1), wait=False)
    (save,) = checkpointer.poll(None)
    with pytest.raises(NonFiniteError) as refusal:
        checkpointer.finish()
    return save, str(refusal.value)


def test_save_of_non_finite_numbers_ends_training(one_rank, tmp_path):
    ((save, message),) = one_rank.run(save_non_finite, str(tmp_path))
    assert (save.saved, save.problem) == (False, message)
    assert "are NaN or infinite after step 1" in message
    assert [*tmp_path.iterdir()] == []


def save_on_full_disk(folder: str) -> tuple[SavedCheckpoint, list[str]]:
    """Fail with a full disk, and save. Return the failed result, and warnings."""
    engine = engines.trained_engine()
    checkpointer = Checkpointer(folder)

    def write_half(path: Path, *content: Any) -> Any:
        path.write_bytes(b"cut short")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, engines.collect_warnings() as warnings:
        patch.setattr(manager, "save_tensors", write_half)
        (failed,) = checkpointer.save(engine, engines.progress(2))
    assert checkpointer.save(engine, engines.progress(3))[0].saved
    return failed, warnings


def test_full_disk_costs_one_checkpoint(one_rank, tmp_path):
    ((failed, (warning,)),) = one_rank.run(save_on_full_disk, str(tmp_path))
    assert not failed.saved
    assert f"step 2 could not be saved: {failed.problem}; training continues" in warning
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def save_with_scores(folder: str, remote_sync: str, tokenizer: str, scores: list[float]) -> None:
    engine = engines.trained_engine(2)
    rotation = CheckpointSettings(
        keep_last=2, keep_best=1, best_metric="zero_shot_top1", remote_sync=remote_sync
    )
    checkpointer = Checkpointer(folder, rotation, tokenizer=tokenizer)
    for step, score in enumerate(scores, start=1):
        (save,) = checkpointer.save(engine, engines.progress(step), {"zero_shot_top1": score})
        assert save.saved
    assert checkpointer.close() == []


def test_last_and_best_are_kept_and_copied_with_tokenizer(one_rank, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("made up")
    local = tmp_path / "local"
    remote = str(tmp_path / "remote")
    scores = [0.1, 0.9, float("nan"), 0.3, 0.2]
    one_rank.run(save_with_scores, str(local), remote, str(tmp_path / "tokenizer"), scores)
    names = ["step-00000002", "step-00000004", "step-00000005"]
    assert sorted(path.name for path in local.iterdir()) == names
    assert sorted(RemoteFolder(remote).read_all()) == names
    # Another host, which has only the copy, resumes from it.
    settings = CheckpointSettings(remote_sync=remote)
    newest = Checkpointer(tmp_path / "elsewhere", settings).find()
    assert newest == tmp_path / "elsewhere" / "step-00000005"
    assert Manifest.read(newest).tokenizer_in(newest) == str(newest / "tokenizer")
    assert (newest / "tokenizer" / "tokenizer.json").read_text() == "made up"


def test_rotation_keeps_other_runs_and_damaged_checkpoints(tmp_path):
    for step in (2, 3, 4):
        make_checkpoint(tmp_path, step, run="ours")
    flip_bit(tmp_path / "step-00000004" / STATE, 9)
    checkpointer = Checkpointer(tmp_path, CheckpointSettings(keep_last=1, keep_best=0))
    checkpointer.run_id = "ours"
    assert checkpointer.find() == tmp_path / "step-00000003"
    # The newest.
    make_checkpoint(tmp_path, 1, run="theirs")
    checkpointer._delete_old()
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "4"]


def test_without_valid_checkpoint_nothing_is_started_or_deleted(tmp_path):
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    flip_bit(tmp_path / "step-00000002" / STATE, 9)
    flip_bit(tmp_path / "step-00000003" / WEIGHTS, 9)
    paths = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="all 3 checkpoints are damaged") as refusal:
        Checkpointer(tmp_path).find()
    for reason in ("step-00000001", f"{STATE} has changed", "--restart"):
        assert reason in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == paths


def test_checkpoints_at_urls_are_downloaded_once(tmp_path):
    for step in (1, 2):
        make_checkpoint(tmp_path / "remote", step)
    local = Checkpointer(tmp_path / "local")
    url = f"file://{tmp_path}/remote"
    assert local.find(f"{url}/step-00000001") == tmp_path / "local" / "step-00000001"
    for _ in range(2):
        assert local.find(url) == tmp_path / "local" / "step-00000002"
    flip_bit(local.path / "step-00000002" / STATE, 9)
    assert local.find(url) == tmp_path / "local" / "step-00000002-2"
    with pytest.raises(ValueError, match="no checkpoint found"):
        local.find(f"{url}/step-00000003")
