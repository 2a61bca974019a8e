"""A run that has changed since its checkpoint says so, and goes on only where that was accepted; one without a good checkpoint
neither starts anew nor deletes anything."""

from pathlib import Path
from typing import Any

import pytest

from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.start import Choices
from tests.rank_pool import RankPool
from tests.training import checkpoint_ranks as ranks
from tests.training import restoring_ranks as restoring
from tests.weights.fake_checkpoints import flip_bit, make_checkpoint

FREEZE: dict[str, Any] = {"clap": {"train": {"freeze": ["text"]}}}
SIGMOID: dict[str, Any] = {"clap": {"loss": {"kind": "sigmoid"}}}
OTHER_RATE = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}


@pytest.fixture(scope="module")
def saved(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 run's checkpoints after two steps."""
    folder = tmp_path_factory.mktemp("saved")
    one_rank.run(restoring.save_with_settings, str(folder))
    return folder


@pytest.mark.parametrize(
    ("precision", "changes", "reason"),
    [
        ("fp32", {}, "the precision is bf16 there, fp32 here"),
        ("bf16", FREEZE, "trained_towers is ['audio', 'text'] there, ['audio'] here"),
        ("bf16", SIGMOID, "loss is 'SoftmaxLoss' there, 'SigmoidLoss' here"),
        ("bf16", {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "there, 'FP16_UnfusedOptimizer over SGD' here"),
    ],
    ids=["precision", "towers", "loss", "optimizer"],
)
def test_another_training_goes_on_from_the_weights_if_that_is_accepted(
    one_rank: RankPool, saved: Path, precision: str, changes: dict[str, Any], reason: str
) -> None:
    ((refusal, _, _),) = one_rank.run(restoring.resume_otherwise, str(saved), precision, changes)
    assert reason in refusal
    assert "--accept_changes goes on from there" in refusal
    assert "the optimizer's state begins anew" in refusal
    ((refusal, warnings, found),) = one_rank.run(restoring.resume_otherwise, str(saved), precision, changes, True)
    assert refusal == ""
    assert reason in warnings[0]
    assert "its weights alone" in warnings[1]
    _, loss, same, _ = found
    assert same
    assert loss < 10


def test_other_settings_are_said_and_taken(one_rank: RankPool, saved: Path) -> None:
    changes = {**OTHER_RATE, "clap": {"train": {"samples": 999}}}
    ((refusal, (warning,), found),) = one_rank.run(restoring.resume_otherwise, str(saved), "bf16", changes)
    assert refusal == ""
    assert "optimizer.params.lr: 0.005 there, 0.0001 here" in warning
    assert "clap.train.samples: None there, 999 here" in warning
    assert found[0] == 1e-4
    # A schedule that is new goes on at the step where the run stands: the second of four of its warm-up.
    changes = {"scheduler": ranks.SCHEDULER}
    ((refusal, (warning,), found),) = one_rank.run(restoring.resume_otherwise, str(saved), "bf16", changes)
    assert refusal == ""
    assert "scheduler is None there, 'WarmupCosineLR' here" in warning
    assert (found[0], found[3]) == pytest.approx((5e-3 / 4, 5e-3 / 2))
    ((_, warnings, _),) = one_rank.run(restoring.resume_otherwise, str(saved), "bf16", {})
    assert warnings == []


def test_without_a_good_checkpoint_nothing_is_started_and_nothing_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    flip_bit(tmp_path / "step-00000002" / "deepspeed" / "mp_rank_00_model_states.pt", 9)
    flip_bit(tmp_path / "step-00000003" / "weights.safetensors", 9)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="none of 3 checkpoints is good") as refusal:
        CheckpointFolder(tmp_path).newest()
    reasons = ("step-00000001: no checkpoint", "model_states.pt has changed", "weights.safetensors has changed")
    assert all(reason in str(refusal.value) for reason in reasons)
    assert "; --from_weights 2 goes on from weights that are whole" in str(refusal.value)
    assert "--restart moves them aside" in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_read_that_fails_is_refused_or_said_and_deletes_nothing(
    two_ranks: RankPool, tmp_path: Path, failing_rank: int
) -> None:
    two_ranks.run(ranks.save, str(tmp_path), (0.1, 0.2))
    before = sorted(tmp_path.rglob("*"))
    found, theirs = two_ranks.run(restoring.fail_at_each_read, str(tmp_path), failing_rank)
    assert found == theirs  # no rank goes on alone
    refused = [outcome for outcome in found if not outcome.startswith("step ")]
    assert len(refused) > 2
    assert all("Input/output error" in outcome or "can't be loaded" in outcome for outcome in refused), refused
    # Of rank 0, which looks for checkpoints, the older one is taken for a newer that can't be read.
    assert ("step 1" in found) == (failing_rank == 0)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_schedule_of_torchs_goes_on(one_rank: RankPool, tmp_path: Path) -> None:
    ((whole, resumed),) = one_rank.run(restoring.rates_of_a_torch_schedule, str(tmp_path))
    assert whole == pytest.approx([5e-3 * 0.5**step for step in range(1, 5)])
    assert resumed == pytest.approx(whole[2:])


@pytest.mark.parametrize(
    ("choices", "resume", "jobs", "begun_at"),
    [
        (Choices(restart=True), "auto", ["7.ab/0", "7.ab/1", "8.cd/0", "8.cd/1"], [0, 1, 0, 1]),
        (Choices(from_weights=5), "auto", ["7.ab/0", "7.ab/1", "8.cd/0"], [5, 6, 5]),
        (Choices(restart=True), "auto", ["", ""], [0, 0]),  # typed twice, it is meant twice
        (Choices(), "{}/step-00000005", ["7.ab/0", "7.ab/1", "8.cd/0", ""], [5, 6, 7, 8]),
        (Choices(), "auto", ["", ""], [5, 6]),
    ],
    ids=["restart", "from_weights", "restart, no job", "path", "auto"],
)
def test_a_job_does_once_what_its_command_says_of_the_beginning(
    one_rank: RankPool, tmp_path: Path, choices: Choices, resume: str, jobs: list[str], begun_at: list[int]
) -> None:
    assert one_rank.run(restoring.starts, str(tmp_path / "here"), jobs, choices, resume) == [begun_at]
