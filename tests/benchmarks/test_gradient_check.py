"""The gradient check accepts right gradients and detects a wrong one, with a micro model on a CPU."""

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import gradient_check
from benchmarks.common import changed
from clap_ds.config.settings import load_run
from tests.rank_pool import RankPool

MICRO = "clap.model.preset=micro train_micro_batch_size_per_gpu=4 clap.context_length=16 clap.cpu_kernels=off"
NAME = "text.roberta.encoder.layer.0.output.dense.bias"


def _wrong() -> list[str]:
    """Return the gradients reported as wrong if the compiled model's gradient of `NAME` is off by 10%."""
    calls, plain = [0], gradient_check.gradients

    def off(*arguments: Any) -> dict[str, torch.Tensor]:
        calls[0] += 1
        found = plain(*arguments)
        return found | ({NAME: 1.1 * found[NAME]} if calls[0] == 3 else {})

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(gradient_check, "gradients", off):
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(changed(Path("htsat_tiny"), MICRO.split())))
        rows = gradient_check.compare(load_run(path, 1), torch.device("cpu"), 6, backend="aot_eager")
    return [row["name"] for row in rows if row["wrong"]]


@pytest.mark.end_to_end
def test_a_gradient_that_is_off_is_reported_and_no_other(one_rank: RankPool) -> None:
    assert one_rank.run(_wrong) == [[NAME]]
