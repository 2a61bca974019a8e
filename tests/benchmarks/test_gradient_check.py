"""The gradient check accepts right gradients and detects a wrong one, with a micro model of Triton
kernels."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gradient_check
from benchmarks.common import changed
from clap_ds.config.settings import load_run
from tests.processes import ROOT

MICRO = "clap.model.preset=micro train_micro_batch_size_per_gpu=4 clap.context_length=16 clap.cpu_kernels=off"
NAME = "text.roberta.encoder.layer.0.output.dense.bias"


def list_wrong_gradients(*assignments: str) -> list[str]:
    """Return the gradients reported for a micro model whose compiled gradient of `NAME` is off by
    10%."""
    compute = gradient_check.gradients
    calls = 0

    def compute_and_plant(*arguments: Any) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        gradients = compute(*arguments)
        # Of each batch, the third are the compiled model's.
        if calls % 3 == 0:
            gradients[NAME] = 1.1 * gradients[NAME]
        return gradients

    content = changed(Path("htsat_tiny"), [*MICRO.split(), *assignments])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_check, "gradients", compute_and_plant)
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(content))
        run = load_run(path, 1)
        *_, rows = gradient_check.compare(run, torch.device("cpu"), 6, backend="aot_eager")
    print("shares of the bound:", *(f"{row['name']} {row['share']:.2f}" for row in rows[:2]))
    return [row["name"] for row in rows if row["wrong"]]


TRITON = """
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.process_group import initialize
from tests.benchmarks.test_gradient_check import list_wrong_gradients
initialize(Ranks.from_environment())
print("wrong:", *list_wrong_gradients(*(f"clap.model.{part}_impl=triton" for part in ("attention", "mlp", "text_attention"))))
"""


@pytest.mark.end_to_end
def test_gradients_of_triton_kernels_are_right_except_a_planted_one():
    """Triton's interpreter runs the kernels in compiled graphs."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", TRITON]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    output = process.stdout + process.stderr
    assert process.stdout.splitlines()[-1:] == [f"wrong: {NAME}"], output
