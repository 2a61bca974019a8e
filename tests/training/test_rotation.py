"""A run deletes its own whole checkpoints and no others."""

from pathlib import Path

import pytest

from clap_ds.config.sections import CheckpointSettings
from clap_ds.training.rotation import Rotation
from tests.weights.fake_checkpoints import make_checkpoint


def _rotation(folder: Path, **rule: object) -> Rotation:
    rotation = Rotation(folder, CheckpointSettings.model_validate(rule), lambda path: False)
    rotation.run = "ours"
    return rotation


def test_what_others_wrote_or_what_is_damaged_is_left_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1, run="theirs")
    for step in range(2, 8):
        make_checkpoint(tmp_path, step, run="ours")
    (tmp_path / "step-00000002" / "weights.safetensors").unlink()
    (tmp_path / "step-00000003" / "manifest.json").write_text("{")
    rotation = _rotation(tmp_path, keep_last=1, keep_best=0)
    rotation.damaged["step-00000004"] = "its hash differed when it was read"
    rotation.delete_superfluous()
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "2", "3", "4", "7"]


def test_room_is_made_down_to_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, score in enumerate((0.1, 0.9, 0.5, 0.2), start=1):
        make_checkpoint(tmp_path, step, run="ours", metrics={"zero_shot_top1": score})
    rotation = _rotation(tmp_path, keep_last=9, best_by="zero_shot_top1")
    assert rotation.make_room()
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "3", "4"]
    assert "the disk is full: step-00000001 is given up" in capsys.readouterr().err
    assert [rotation.make_room() for _ in range(3)] == [True, True, False]
    assert [path.name[-1] for path in tmp_path.iterdir()] == ["2"]
