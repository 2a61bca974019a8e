"""Times to a target by hand."""

import re
from pathlib import Path

import pytest

from clap_ds.analysis import scaling
from clap_ds.utils.errors import UserError
from tests.analysis.samples import TINY, record, run_main


def trained(
    folder: Path, gpus: int, scores: dict[int, float], step_s: float = 2.0, **columns: float
) -> None:
    """Write a training run whose evaluations after these steps have these scores."""
    lines = []
    for step, score in scores.items():
        position = {"step": step, "samples": 8 * gpus * step, "train_s": step * step_s}
        lines.append({"phase": "evaluation", **position, "score": score, **columns})
    summary = {"command": "train", "preset": "micro", "world_size": gpus, "num_nodes": 1}
    record(folder, lines, **summary, state="completed", micro_batch_per_gpu=8)


def test_time_to_target_is_that_of_each_scale_with_its_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three runs need 100, 200 and 300 s: ± is 4.303 · 100 / √3 = 248.4."""
    for step in (50, 100, 150):
        trained(tmp_path / f"a{step}", 1, {25: 0.2, step: 0.9, 200: 0.3}, energy_kwh=0.5)
    trained(tmp_path / "b", 2, {50: 0.7, 100: 0.8}, step_s=0.5)
    trained(tmp_path / "never", 2, {50: 0.7})
    run_main(scaling.main, tmp_path, "--time_to", "score=0.8")
    _, _, header, _, *rows = capsys.readouterr().out.splitlines()
    assert [re.sub(r"[ |]+", " ", line).strip() for line in (header, *rows)] == [
        "model nodes GPUs global batch runs reached time s ± steps ± samples ± kWh ± speed-up",
        "micro 1 1 8 3 3 200.0 ± 248.4 100.0 ± 124.2 800.0 ± 993.7 0.5000 ± 0.0000 1.00",
        "micro 1 2 16 2 1 50.00 100.0 1600 – 4.00",
    ]


def test_time_to_target_of_a_table_or_without_value_is_rejected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UserError, match="run directories"):
        run_main(scaling.main, TINY, "--time_to", "score=0.8")
    with pytest.raises(SystemExit):
        run_main(scaling.main, TINY, "--time_to", "score")
    assert "--time_to: expected a number above 0" in capsys.readouterr().err
