"""An interrupted run resumes as if it had not been, on as many ranks as there are then; a failing disk costs no more than the
checkpoint."""

from functools import partial
from pathlib import Path

import pytest
import torch

from clap_ds.config.sections import CheckpointSettings
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.remote import RemoteFolder
from clap_ds.weights import formats as weights
from clap_ds.weights.checkpoint_files import Manifest
from tests.rank_pool import RankPool
from tests.training import checkpoint_ranks as ranks
from tests.weights.fake_checkpoints import flip_bit


@pytest.mark.parametrize(("precision", "frozen"), [("bf16", ()), ("autocast", ()), ("bf16", ("text",))])
def test_an_interrupted_run_equals_an_uninterrupted_one(
    two_ranks: RankPool, tmp_path: Path, precision: str, frozen: tuple[str, ...]
) -> None:
    for rank, found in enumerate(two_ranks.run(ranks.resumed, str(tmp_path), precision, frozen)):
        assert found["resumed"] == found["uninterrupted"]
        assert found["steps"] == (6, 6, 0)
        progress, saved = found["progress"], found["saved"]
        assert progress.data[rank] == {"rank": rank, "step": 3}
        assert (progress.samples, progress.train_s) == (18, 1.5)
        assert (progress.best, progress.extra) == ({"zero_shot_top1": 0.25}, {"ramp": [1, 2]})
        assert saved.path == tmp_path / "step-00000003"
        assert saved.bytes == sum(record.bytes for record in Manifest.read(saved.path).files.values())
        assert saved.begin < saved.end


@pytest.mark.parametrize(("saved_on", "precision"), [(2, "bf16"), (1, "fp32")])
def test_it_resumes_on_another_number_of_ranks(
    two_ranks: RankPool, one_rank: RankPool, tmp_path: Path, saved_on: int, precision: str
) -> None:
    before, after = (two_ranks, one_rank) if saved_on == 2 else (one_rank, two_ranks)
    expected = before.run(ranks.train_and_save, str(tmp_path), precision)[0]
    for resumed, fresh in after.run(ranks.load_and_train, str(tmp_path), precision):
        # Sums over 3 rows or 6: in fp32 2 roundings of 2⁻²³ are found, in bf16 half a one of 2⁻⁷, four steps add theirs.
        tolerance = 1e-5 if precision == "fp32" else 3e-2
        assert resumed == pytest.approx(expected, rel=tolerance)
        assert fresh != pytest.approx(expected, rel=2 * tolerance)


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(two_ranks: RankPool, tmp_path: Path) -> None:
    numbers = [1, 2, 4, 6]
    by_rank = two_ranks.run(ranks.fail_at_file, str(tmp_path), numbers)
    for number, found in zip(numbers, by_rank[0], strict=True):
        assert (found["files"], found["left"]) == (number, ["step-00000001"])
        (warning,) = found["warnings"]
        assert "the checkpoint of step 2 could not be saved: [Errno 28] No space left" in warning
        assert "training goes on" in warning
    for failed in (found["failed"] for found in (*by_rank[0], *by_rank[1])):
        assert (failed.saved, failed.bytes) == (False, 0)
        assert "No space left" in failed.problem


def test_a_run_whose_folder_was_taken_over_leaves_it_to_the_other(two_ranks: RankPool, tmp_path: Path) -> None:
    found = two_ranks.run(ranks.save_after_a_takeover, str(tmp_path))
    for saved, _ in found:
        assert not saved.saved
        assert saved.problem.startswith(f"{tmp_path} was taken over by host tux7, ")
    assert "the checkpoint of step 1 could not be saved" in found[0][1][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-00000009.partial", "writer.json"]


def test_the_estimate_is_near_what_is_written(one_rank: RankPool, tmp_path: Path) -> None:
    (((saved,), _),) = one_rank.run(ranks.save, str(tmp_path))
    (((num_bytes, seconds), warnings, of_little_room),) = one_rank.run(ranks.estimates, str(tmp_path))
    assert num_bytes == pytest.approx(saved.bytes, rel=0.15)
    assert 0 < seconds < 60
    assert not warnings
    assert "5 of 1.2 MB each can be there at a time" in of_little_room[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]  # no probe is left


def test_the_exported_weights_are_the_fp32_masters(one_rank: RankPool, tmp_path: Path) -> None:
    (((saved,), _),) = one_rank.run(ranks.save, str(tmp_path))
    exported = weights.load_safetensors(saved.path / "weights.safetensors").state
    (in_bf16,) = one_rank.run(ranks.weights_of, str(saved.path))
    for name, parameter in in_bf16.items():
        assert exported[name].dtype == torch.float32
        assert torch.equal(exported[name].to(parameter.dtype), parameter), name
    assert sum(not torch.equal(exported[name], parameter.float()) for name, parameter in in_bf16.items()) > 20


@pytest.mark.parametrize("fit", [2, 1])
def test_on_a_small_disk_the_oldest_gives_way_but_for_the_best(one_rank: RankPool, tmp_path: Path, fit: int) -> None:
    ((there, warnings, saved),) = one_rank.run(ranks.save_on_a_small_disk, str(tmp_path), fit, [0.2, 0.9, 0.3, 0.1])
    names = [f"step-0000000{step}" for step in range(1, 5)]
    if fit == 2:  # room for one old one beside a draft, and it is the best
        assert there == [names[:1], names[:2], names[1:3], [names[1], names[3]]]
        assert saved
        assert all(any(f"{name} is given up" in text for text in warnings) for name in (names[0], names[2]))
    else:
        assert there == [names[:1]] * 4
        assert not saved
        assert "the checkpoint of step 4 could not be saved: [Errno 28]" in warnings[-1]


def test_weights_that_are_not_finite_are_not_saved(two_ranks: RankPool, tmp_path: Path) -> None:
    for refusal, left in two_ranks.run(ranks.save_poisoned, str(tmp_path)):
        assert "NaN or infinite after step 1" in refusal
        assert "weights.audio." in refusal
        assert left == []


def test_what_is_damaged_missing_or_unseen_is_refused_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    ((saved,), _), _ = two_ranks.run(ranks.save, str(tmp_path))
    for refusal in two_ranks.run(ranks.refusal_when_unseen, str(tmp_path)):
        assert "rank 1 can't see" in refusal
        assert "where every host sees them" in refusal
    flip_bit(saved.path / "deepspeed" / "mp_rank_00_model_states.pt", 5000)
    for place, reason in (
        (tmp_path, "mp_rank_00_model_states.pt has changed since it was written"),
        (saved.path, "mp_rank_00_model_states.pt has changed since it was written"),
        (tmp_path / "nowhere", "no good checkpoint here"),
    ):
        assert all(reason in refusal for refusal in two_ranks.run(ranks.refusal, str(place)))


@pytest.mark.parametrize("best_by", ["zero_shot_top1", "zero_shot_top2"])
def test_last_and_best_are_kept_and_copied(one_rank: RankPool, tmp_path: Path, best_by: str) -> None:
    there = str(tmp_path / "there")
    save = partial(ranks.save, keep_last=2, keep_best=1, best_by=best_by, sync_to=there)
    ((_, warnings),) = one_rank.run(save, str(tmp_path / "here"), (0.1, 0.9, float("nan"), 0.3, 0.2))
    best = ["step-00000002"] if best_by == "zero_shot_top1" else []
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [*best, "step-00000004", "step-00000005"]
    assert bool(warnings) == (not best)
    assert best or "'zero_shot_top2' is not among the metrics: zero_shot_top1" in warnings[0]
    assert sorted(RemoteFolder(there).read_all()) == [*best, "step-00000004", "step-00000005"]
    elsewhere = CheckpointFolder(tmp_path / "elsewhere", CheckpointSettings(sync_to=there))
    assert elsewhere.newest() == tmp_path / "elsewhere" / "step-00000005"
    assert CheckpointFolder(tmp_path / "empty").newest() is None


def test_a_tokenizer_in_a_folder_comes_along(one_rank: RankPool, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("made up")
    for tokenizer, recorded in ((str(tmp_path / "tokenizer"), "tokenizer"), ("FacebookAI/roberta-base",) * 2):
        (((saved,), _),) = one_rank.run(ranks.save, str(tmp_path / "checkpoints"), (None,), tokenizer)
        manifest, copy = Manifest.read(saved.path), saved.path / "tokenizer" / "tokenizer.json"
        assert manifest.tokenizer == recorded
        assert copy.exists() == ("tokenizer/tokenizer.json" in manifest.files) == (recorded == "tokenizer")
        assert not copy.exists() or copy.read_text() == "made up"


def test_a_place_that_cannot_be_read_is_no_empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(url: str) -> None:
        raise ConnectionError("the network is down")

    checkpoints = CheckpointFolder(tmp_path / "here", CheckpointSettings(sync_to="memory://anything"))
    monkeypatch.setattr("clap_ds.training.checkpoint.RemoteFolder", down)
    with pytest.raises(ValueError, match=r"sync_to: memory://anything can't be read .*the network is down"):
        checkpoints.newest()
