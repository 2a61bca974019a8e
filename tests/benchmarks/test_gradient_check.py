"""The gradient check accepts right gradients and detects a wrong one, with a micro model of Triton
kernels."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import gradient_check
from benchmarks.common import changed
from clap_ds.config.settings import load_run
from tests.processes import ROOT

MICRO = "clap.model.preset=micro train_micro_batch_size_per_gpu=4 clap.context_length=16 clap.cpu_kernels=off"
NAME = "text.roberta.encoder.layer.0.output.dense.bias"


def wrong(*assignments: str) -> list[str]:
    """Return the gradients reported for a micro model whose compiled gradient of `NAME` is off by
    10%."""
    calls = [0]
    plain = gradient_check.gradients

    def off(*arguments: Any) -> dict[str, torch.Tensor]:
        calls[0] += 1
        found = plain(*arguments)
        return found | ({NAME: 1.1 * found[NAME]} if calls[0] % 3 == 0 else {})

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(gradient_check, "gradients", off),
    ):
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(changed(Path("htsat_tiny"), [*MICRO.split(), *assignments])))
        *_, rows = gradient_check.compare(
            load_run(path, 1), torch.device("cpu"), 6, backend="aot_eager"
        )
    margins = [f"{row['name']} {row['share']:.2f}" for row in rows[:2]]
    print("shares of the bound:", *margins)
    return [row["name"] for row in rows if row["wrong"]]


TRITON = """
from clap_ds.distributed.init import Ranks, initialize
from tests.benchmarks.test_gradient_check import wrong
initialize(Ranks.from_environment())
print("wrong:", *wrong(*(f"clap.model.{part}_impl=triton" for part in ("attention", "mlp", "text_attention"))))
"""


@pytest.mark.end_to_end
def test_a_model_of_triton_kernels_has_the_gradients_of_torchs_operations_but_one_that_is_off() -> (
    None
):
    """Triton's interpreter runs the kernels in compiled graphs."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", TRITON], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.stdout.splitlines()[-1:] == [f"wrong: {NAME}"], ended.stdout + ended.stderr
