"""An interrupted run goes on as if it had not been, on as many ranks as there are then; a failing disk costs no more than the
checkpoint."""

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._utils import _flatten_dense_tensors

from clap_ds.config.sections import CheckpointSettings
from clap_ds.engine.state import master_weights
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.weights import formats as weights
from clap_ds.weights.checkpoint_files import Manifest
from tests import needs
from tests.ranks import RankPool
from tests.training import checkpoint_ranks as ranks
from tests.weights.fake_checkpoints import flip_bit, make_checkpoint


@pytest.mark.parametrize(("precision", "frozen"), [("bf16", ()), ("fp32", ()), ("autocast", ()), ("bf16", ("text",))])
def test_an_interrupted_run_equals_an_uninterrupted_one(
    two_ranks: RankPool, tmp_path: Path, precision: str, frozen: tuple[str, ...]
) -> None:
    for rank, found in enumerate(two_ranks.run(ranks.resumed, str(tmp_path), precision, True, frozen)):
        assert found["resumed"] == found["uninterrupted"]
        assert found["steps"] == (6, 6, 0)
        assert found["progress"].data[rank] == {"rank": rank, "step": 3}
        assert (found["progress"].samples, found["progress"].train_s) == (18, 1.5)
        assert (found["progress"].best, found["progress"].extra) == ({"zero_shot_top1": 0.25}, {"ramp": [1, 2]})
        saved = found["saved"]
        assert saved.saved
        assert saved.path == tmp_path / "step-00000003"
        assert saved.bytes == sum(record.bytes for record in Manifest.read(saved.path).files.values())
        assert saved.begin < saved.end


def test_without_the_generators_state_it_would_not(two_ranks: RankPool, tmp_path: Path) -> None:
    for found in two_ranks.run(ranks.resumed, str(tmp_path), "bf16", False):
        assert found["resumed"][0] != found["uninterrupted"][0]
        assert found["resumed"][1] != found["uninterrupted"][1]
        assert found["resumed"][2] == found["uninterrupted"][2]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("saved_on", [2, 1])
def test_it_goes_on_on_another_number_of_ranks(
    two_ranks: RankPool, one_rank: RankPool, tmp_path: Path, saved_on: int, precision: str
) -> None:
    before, after = (two_ranks, one_rank) if saved_on == 2 else (one_rank, two_ranks)
    expected = before.run(ranks.train_and_save, str(tmp_path), precision)[0]
    for gone_on, fresh in after.run(ranks.load_and_train, str(tmp_path), precision):
        # Sums over 3 rows or 6: in fp32 2 roundings of 2⁻²³ are found, in bf16 half a one of 2⁻⁷, four steps add theirs.
        tolerance = 1e-5 if precision == "fp32" else 3e-2
        assert gone_on == pytest.approx(expected, rel=tolerance)
        assert fresh != pytest.approx(expected, rel=2 * tolerance)


@pytest.mark.parametrize("number", [1, 2, 4, 6])
def test_a_full_disk_costs_the_checkpoint_and_nothing_else(two_ranks: RankPool, tmp_path: Path, number: int) -> None:
    results = two_ranks.run(ranks.fail_at_file, str(tmp_path), number)
    assert results[0]["files"] >= number
    assert results[0]["left"] == ["step-00000001"]
    (warning,) = results[0]["warnings"]
    assert "the checkpoint of step 2 could not be saved: [Errno 28] No space left" in warning
    assert "training goes on" in warning
    for found in results:
        failed = found["failed"]
        assert (failed.saved, failed.bytes) == (False, 0)
        assert "No space left" in failed.problem
        assert found["newest"] == found["first"].path
        assert found["loss"][0] < 10
        assert found["second"].saved


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the micro preset and a half."""
    folder = tmp_path / "disk"
    folder.mkdir()
    needs.root("a small file system is mounted")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2000k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_really_full(one_rank: RankPool, small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    ((outcomes, warnings, _),) = one_rank.run(ranks.save_on, str(folder), [1, 2])
    assert [outcome.saved for outcome in outcomes] == [True, False]
    assert "fewer than 2 fit" in warnings[0]
    assert "No space left" in warnings[1]
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    ((step, losses),) = one_rank.run(ranks.load_newest, str(folder))
    assert step == 1
    assert losses[0] < 10


def test_the_estimate_is_near_what_is_written(one_rank: RankPool, tmp_path: Path) -> None:
    ((outcomes, warnings, (num_bytes, seconds)),) = one_rank.run(ranks.save_on, str(tmp_path), [1])
    assert num_bytes == pytest.approx(outcomes[0].bytes, rel=0.15)
    assert 0 < seconds < 60
    assert not warnings
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]  # no probe is left


def test_the_exported_weights_are_the_fp32_masters(one_rank: RankPool, tmp_path: Path) -> None:
    (path,) = one_rank.run(ranks.save_once, str(tmp_path))
    exported = weights.load_safetensors(path / "weights.safetensors").state
    (in_bf16,) = one_rank.run(ranks.weights_of, str(path))
    finer = 0
    for name, parameter in in_bf16.items():
        assert exported[name].dtype == torch.float32
        assert torch.equal(exported[name].to(parameter.dtype), parameter), name
        finer += not torch.equal(exported[name], parameter.float())
    assert finer > 20


def test_masters_in_one_flat_tensor_are_taken_apart(tmp_path: Path) -> None:
    """As DeepSpeed has them under FusedAdam and `FlatAdamW`."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to(torch.bfloat16)
    groups = [[model[0].weight, model[1].bias], [model[0].bias]]
    masters = [[torch.randn(parameter.shape) for parameter in group] for group in groups]
    optimizer = SimpleNamespace(fp16_groups=groups, fp32_groups_flat=[_flatten_dense_tensors(m) for m in masters])
    state = master_weights(SimpleNamespace(model=model, deepspeed=SimpleNamespace(optimizer=optimizer)))  # type: ignore[arg-type]
    assert torch.equal(state["0.weight"], masters[0][0])
    assert torch.equal(state["1.bias"], masters[0][1])
    assert torch.equal(state["0.bias"], masters[1][0])
    assert torch.equal(state["1.weight"], model[1].weight.float())
    assert state["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize(
    ("precision", "changes", "reason"),
    [
        ("fp32", {}, "optimizer is 'FP16_Optimizer over FlatAdamW' there, 'FlatAdamW' here"),
        ("bf16", {"scheduler": ranks.SCHEDULER}, "scheduler is None there, 'WarmupCosineLR' here"),
        (
            "bf16",
            {"clap": {"train": {"freeze": ["text"]}}},
            "trained_towers is ['audio', 'text'] there, ['audio'] here",
        ),
        ("bf16", {"clap": {"loss": {"kind": "sigmoid"}}}, "loss is 'SoftmaxLoss' there, 'SigmoidLoss' here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    two_ranks: RankPool, tmp_path: Path, precision: str, changes: dict[str, Any], reason: str
) -> None:
    two_ranks.run(ranks.save_once, str(tmp_path))
    for refusal in two_ranks.run(ranks.refusal, str(tmp_path), precision, changes):
        assert reason in refusal
        assert "can't be resumed" in refusal
        assert "clap.train.initial_weights" in refusal


def test_a_checkpoint_of_another_preset_is_refused(one_rank: RankPool, tmp_path: Path) -> None:
    one_rank.run(ranks.save_once, str(tmp_path))
    (refusal,) = one_rank.run(ranks.refusal, str(tmp_path), "bf16", {}, 64)
    assert "holds model micro, this run has other_model: joint_dim is 32 there, 64 here" in refusal


def test_what_is_damaged_missing_or_unseen_is_refused_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    path, _ = two_ranks.run(ranks.save_once, str(tmp_path))
    for refusal in two_ranks.run(ranks.refusal_when_unseen, str(tmp_path)):
        assert "rank 1 can't see" in refusal
        assert "where every host sees them" in refusal
    flip_bit(path / "deepspeed" / "mp_rank_00_model_states.pt", 5000)
    for place, reason in (
        (tmp_path, "no good checkpoint here"),
        (path, "mp_rank_00_model_states.pt has changed since it was written"),
        (tmp_path / "nowhere", "no good checkpoint here"),
    ):
        assert all(reason in refusal for refusal in two_ranks.run(ranks.refusal, str(place)))


@pytest.mark.parametrize("best_by", ["zero_shot_top1", "zero_shot_top2"])
def test_last_and_best_are_kept(one_rank: RankPool, tmp_path: Path, best_by: str) -> None:
    save = partial(ranks.metric_saves, keep_last=2, keep_best=1, best_by=best_by)
    ((names, warnings),) = one_rank.run(save, str(tmp_path), [0.1, 0.9, float("nan"), 0.3, 0.2])
    best = ["step-00000002"] if best_by == "zero_shot_top1" else []
    assert names == [*best, "step-00000004", "step-00000005"]
    assert bool(warnings) == (not best)
    assert best or "'zero_shot_top2' is not among the metrics: zero_shot_top1" in warnings[0]


def test_a_tokenizer_in_a_folder_comes_along(one_rank: RankPool, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("made up")
    (path,) = one_rank.run(ranks.save_once, str(tmp_path / "checkpoints"), str(tmp_path / "tokenizer"))
    assert (path / "tokenizer" / "tokenizer.json").read_text() == "made up"
    assert "tokenizer/tokenizer.json" in Manifest.read(path).files
    (named,) = one_rank.run(ranks.save_once, str(tmp_path / "checkpoints"), "FacebookAI/roberta-base")
    assert (Manifest.read(path).tokenizer, Manifest.read(named).tokenizer) == ("tokenizer", "FacebookAI/roberta-base")


def test_it_is_brought_back_from_where_it_was_copied(tmp_path: Path) -> None:
    settings = CheckpointSettings(sync_to=str(tmp_path / "there"))
    checkpoints = CheckpointFolder(tmp_path / "here", settings, warn=pytest.fail)
    checkpoints._rotate_and_copy(make_checkpoint(tmp_path / "here", 4), {})
    assert checkpoints.close() == []
    elsewhere = CheckpointFolder(tmp_path / "elsewhere", settings, warn=pytest.fail)
    assert elsewhere.newest() == tmp_path / "elsewhere" / "step-00000004"
    assert CheckpointFolder(tmp_path / "empty", warn=pytest.fail).newest() is None


def test_a_place_that_cannot_be_read_is_no_empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = CheckpointFolder(tmp_path / "here", CheckpointSettings(sync_to="memory://anything"))

    def down(url: str) -> None:
        raise ConnectionError("the network is down")

    monkeypatch.setattr("clap_ds.training.checkpoint.RemoteFolder", down)
    with pytest.raises(ValueError, match=r"sync_to: memory://anything can't be read .*the network is down"):
        checkpoints.newest()


def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for refusal in two_ranks.run(ranks.refusal_of_folder, str(tmp_path / "file" / "checkpoints")):
        assert refusal == f"clap.checkpoint.folder: {tmp_path}/file/checkpoints can't be written: Not a directory"
