"""An interrupted run resumes exactly; changes are reported; a failing disk costs only the
checkpoint; a run deletes only its own checkpoints."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clap_ds.checkpoint import manager
from clap_ds.checkpoint.checkpoint_files import STATE, Manifest
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.remote import RemoteFolder
from clap_ds.checkpoint.train_state import ResumeOptions
from clap_ds.config.schema import CheckpointSettings
from tests.rank_pool import RankPool
from tests.training import checkpoint_ranks as ranks
from tests.weights.fake_checkpoints import flip_bit, make_checkpoint


@pytest.mark.parametrize(("precision", "frozen"), [("bf16", ("audio",)), ("autocast", ())])
def test_an_interrupted_run_equals_an_uninterrupted_one(
    two_ranks: RankPool, tmp_path: Path, precision: str, frozen: tuple[str, ...]
) -> None:
    for rank, found in enumerate(two_ranks.run(ranks.resumed, str(tmp_path), precision, frozen)):
        assert found["resumed"] == found["uninterrupted"]
        assert found["steps"] == (6, 6, 0)
        progress = found["progress"]
        saved = found["saved"]
        assert progress.data_of(rank) == {"rank": rank, "step": 3}
        assert (progress.samples, progress.train_s) == (18, 1.5)
        assert (progress.best, progress.extra) == ({"zero_shot_top1": 0.25}, {"ramp": [1, 2]})
        assert saved.path == tmp_path / "step-00000003"


@pytest.mark.parametrize("alignments", [(1, 8), (8, 1)])
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("bf16", {"type": "AdamW", "params": {"lr": 5e-3}}),
        ("bf16", {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}}),
        ("fp32", {"type": "AdamW", "params": {"lr": 5e-3}}),
    ],
    ids=["flat", "parameter by parameter", "fp32"],
)
def test_a_checkpoint_of_another_order_of_parameters_resumes_exactly(
    one_rank: RankPool,
    tmp_path: Path,
    precision: str,
    optimizer: dict[str, Any],
    alignments: tuple[int, int],
) -> None:
    """Optimizer groups in the model's order (alignment 1) are those of earlier versions."""
    ((orders, states),) = one_rank.run(
        ranks.resumed_in_another_order, str(tmp_path), precision, optimizer, alignments
    )
    assert orders[0] != orders[1]
    assert states[0] == states[1]


def test_what_is_written_behind_training_is_the_state_when_it_began(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    found = two_ranks.run(ranks.save_behind, str(tmp_path))
    assert found[0][0][0].stalled_s == 5.0
    for saved, uninterrupted, resumed in found:
        assert [each.problem for each in saved] == [None, None]
        sizes = [
            path.stat().st_size for path in saved[0].path.rglob("*") if path.name != "manifest.json"
        ]
        assert (saved[0].begin, saved[0].end, saved[0].bytes) == (100.0, 115.0, sum(sizes))
        assert resumed == uninterrupted


def test_numbers_that_are_not_finite_behind_training_end_it(
    one_rank: RankPool, tmp_path: Path
) -> None:
    ((told, refusal),) = one_rank.run(ranks.poisoned_behind, str(tmp_path))
    assert (told.saved, told.problem) == (False, refusal)
    assert "are NaN or infinite after step 1" in refusal
    assert [*tmp_path.iterdir()] == []


@pytest.fixture(scope="module")
def saved(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 run's folder with a checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("saved")
    one_rank.run(ranks.save, str(folder))
    return folder


@pytest.mark.parametrize(
    ("precision", "changes", "reason"),
    [
        ("fp32", {}, "the precision is bf16 there, fp32 here"),
        ("bf16", {"clap": {"train": {"freeze": ["text"]}}}, "['audio'] here"),
        (
            "bf16",
            {"clap": {"train": {"lr_scale": {"text": 0.1}}}},
            "clap.train.lr_scale is {} there, {'text': 0.1} here",
        ),
        (
            "bf16",
            {"clap": {"loss": {"kind": "sigmoid"}}},
            "loss is 'SoftmaxLoss' there, 'SigmoidLoss' here",
        ),
    ],
)
def test_another_training_goes_on_from_the_weights_if_that_is_accepted(
    one_rank: RankPool, saved: Path, precision: str, changes: dict[str, Any], reason: str
) -> None:
    ((refusal, _),) = one_rank.run(ranks.resume_otherwise, str(saved), precision, changes)
    assert all(part in refusal for part in (reason, "--resume_weights_only"))
    ((warning, found),) = one_rank.run(ranks.resume_otherwise, str(saved), precision, changes, True)
    assert all(part in warning for part in (reason, "only its weights and step are restored"))
    _, same, loss, _ = found
    assert same
    assert loss < 10


def test_other_settings_are_said_and_taken(one_rank: RankPool, saved: Path) -> None:
    def resume(changes: dict[str, Any]) -> Any:
        return one_rank.run(ranks.resume_otherwise, str(saved), "bf16", changes)[0]

    other_rate = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    warning, found = resume({**other_rate, "clap": {"train": {"max_samples": 999}}})
    assert "optimizer.params.lr: 0.005 there, 0.0001 here" in warning
    assert "clap.train.max_samples: None there, 999 here" in warning
    assert found[:2] == (1e-4, True)
    # A new schedule continues at the run's step: the second of four of its warm-up.
    warning, found = resume({"scheduler": ranks.SCHEDULER})
    assert "scheduler is None there, 'WarmupCosineLR' here" in warning
    assert (found[0], found[3]) == pytest.approx((5e-3 / 4, 5e-3 / 2))
    cooldown = {
        "type": "WarmupStableDecayLR",
        "params": {"total_num_steps": 4, "decay_num_steps": 3},
    }
    assert resume({"scheduler": cooldown})[1][::3] == pytest.approx((5e-3 * 2 / 3, 5e-3 / 3))
    assert resume({})[0] == ""


@pytest.mark.parametrize(
    ("choices", "resume", "jobs", "begun_at"),
    [
        (
            ResumeOptions(restart=True),
            "auto",
            ["7.ab/0", "7.ab/1", "8.cd/0", "8.cd/1"],
            [0, 1, 0, 1],
        ),
        (ResumeOptions(), "{}/step-00000005", ["7.ab/0", "7.ab/1", "8.cd/0", ""], [5, 6, 7, 8]),
        (ResumeOptions(), "auto", ["", ""], [5, 6]),
    ],
    ids=["restart", "path", "auto"],
)
def test_a_job_does_once_what_its_command_says_of_the_beginning(
    one_rank: RankPool,
    tmp_path: Path,
    choices: ResumeOptions,
    resume: str,
    jobs: list[str],
    begun_at: list[int],
) -> None:
    assert one_rank.run(ranks.starts, str(tmp_path / "here"), jobs, choices, resume) == [begun_at]


def test_without_a_good_checkpoint_nothing_is_started_and_nothing_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    flip_bit(tmp_path / "step-00000002" / STATE, 9)
    flip_bit(tmp_path / "step-00000003" / "weights.safetensors", 9)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="all 3 checkpoints are damaged") as refusal:
        Checkpointer(tmp_path).find()
    for reason in (
        "step-00000001",
        f"{STATE} has changed",
        "weights.safetensors has changed",
        "--restart",
    ):
        assert reason in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoints_at_urls_are_downloaded_once(tmp_path: Path) -> None:
    for step in (1, 2):
        make_checkpoint(tmp_path / "theirs", step)
    here = Checkpointer(tmp_path / "here")
    url = f"file://{tmp_path}/theirs"
    assert here.find(f"{url}/step-00000001") == tmp_path / "here" / "step-00000001"
    for _ in range(2):
        assert here.find(url) == tmp_path / "here" / "step-00000002"
    flip_bit(here.path / "step-00000002" / STATE, 9)
    assert here.find(url) == tmp_path / "here" / "step-00000002-2"
    assert len([*here.path.iterdir()]) == 3
    for wrong in (f"{url}/step-00000003", f"{url}/nowhere"):
        with pytest.raises(ValueError, match="no checkpoint found"):
            here.find(wrong)


def test_a_checkpoint_is_late_after_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(manager, "time", SimpleNamespace(time=lambda: now[0]))
    folders = [
        Checkpointer(tmp_path, CheckpointSettings(every_minutes=minutes))
        for minutes in (None, 3.0, 2.0)
    ]
    now[0] += 120
    assert [each.is_late() for each in folders] == [False, False, True]


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(
    one_rank: RankPool, tmp_path: Path
) -> None:
    ((failed, (warning,), left),) = one_rank.run(ranks.fail_at_weights, str(tmp_path))
    assert all(part in warning for part in ("step 2", failed.problem, "training continues"))
    assert (failed.saved, failed.bytes, left) == (False, 0, ["step-00000001"])


def test_what_others_wrote_is_left_alone(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        make_checkpoint(tmp_path, step, run="ours")
    flip_bit(tmp_path / "step-00000004" / STATE, 9)
    checkpoints = Checkpointer(tmp_path, CheckpointSettings(keep_last=1, keep_best=0))
    checkpoints.run_id = "ours"
    assert checkpoints.find() == tmp_path / "step-00000003"
    make_checkpoint(tmp_path, 1, run="theirs")  # the newest
    checkpoints._delete_superfluous()
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "4"]


def test_last_and_best_are_kept_and_copied_with_the_tokenizer(
    one_rank: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("made up")
    there = str(tmp_path / "there")
    scores = (0.1, 0.9, float("nan"), 0.3, 0.2)
    save = partial(
        ranks.save, keep_last=2, keep_best=1, best_metric="zero_shot_top1", remote_sync=there
    )
    one_rank.run(save, str(tmp_path / "here"), scores, str(tmp_path / "tokenizer"))
    kept = [f"step-0000000{step}" for step in (2, 4, 5)]
    assert (
        sorted(path.name for path in (tmp_path / "here").iterdir())
        == sorted(RemoteFolder(there).read_all())
        == kept
    )
    newest = Checkpointer(tmp_path / "elsewhere", CheckpointSettings(remote_sync=there)).find()
    assert newest == tmp_path / "elsewhere" / "step-00000005"
    assert Checkpointer(tmp_path / "empty").find() is None
    assert Manifest.read(newest).tokenizer_in(newest) == str(newest / "tokenizer")
    assert (newest / "tokenizer" / "tokenizer.json").read_text() == "made up"
