"""Messages at the start and at the end of training."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clap_ds.config.settings import load_run
from clap_ds.train import next_commands
from clap_ds.training.messages import log_run_start
from clap_ds.training.train_state import TrainPlan, TrainState


@pytest.mark.parametrize(("items", "warns"), [(63, True), (64, False), (None, False)])
def test_a_batch_larger_than_the_data_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, items: int | None, warns: bool
) -> None:
    log_run_start(TrainPlan(640, 64, items), TrainState(), tmp_path, {})
    output = capsys.readouterr().out
    assert "10 steps" in output
    assert ("a global batch has 64 pairs, but the data only 63" in output) == warns


@pytest.mark.parametrize(
    ("preset", "export"),
    [
        ("htsat_tiny_roberta_base", "--format open_clip"),
        ("clap_htsat_tiny_roberta_base", "FOLDER"),
        ("demo", None),
    ],
)
def test_the_end_names_an_export_that_the_model_has(
    write_run: Callable[..., Path], preset: str, export: str | None
) -> None:
    first, *rest = next_commands(load_run(write_run(clap={"model": {"preset": preset}})))
    assert first.startswith("clap-ds evaluate ")
    assert [line.endswith(export or "") for line in rest] == [True] * (export is not None)
