"""Messages at the start of training."""

from pathlib import Path

import pytest

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
