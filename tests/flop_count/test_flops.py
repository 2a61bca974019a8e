"""Test the FLOPs command and a benchmark's FLOPs."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clap_ds import flops
from clap_ds.config.model import load_preset
from clap_ds.config.schema import ModelSettings
from clap_ds.data.batch import Batch
from clap_ds.engine.factory import freeze
from clap_ds.flop_count import analytic
from clap_ds.flop_count.analytic import TextLengths, forward_components, published_flops
from clap_ds.flop_count.counters import build, parameter_counts
from clap_ds.model.clap import ClapModel
from clap_ds.throughput_bench.flops_profile import measure_flops
from clap_ds.utils.errors import UserError
from tests.processes import ROOT

MICRO = load_preset("micro")
LENGTHS = TextLengths.fixed(16)


def test_report_has_both_counts_in_both_conventions(write_run, capsys):
    flops.main(["--config", str(write_run())])
    printed = capsys.readouterr().out
    assert printed.startswith("micro, 16 text tokens")
    assert "agrees with the closed form to the last FLOP" in printed
    assert f"trained {parameter_counts(build(MICRO))['trainable'] / 1e6:.2f}" in printed
    published = forward_components(MICRO, LENGTHS, "published")
    executed = forward_components(MICRO, LENGTHS, "model")
    profiled = executed["forward"] - executed["fft"]
    training = executed["forward"] + analytic.backward_flops(MICRO, LENGTHS)
    for label, *counts in (
        ("DeepSpeed's profiler alone, 2 × MACs", published["forward"], profiled),
        ("with the backward pass", 3 * published["forward"], training),
    ):
        cells = r" +\| +".join([re.escape(label), *(f"{count / 1e9:.4f}" for count in counts)])
        assert re.search(cells, printed), label


def test_disagreement_is_reported():
    assert flops.agreement([1e9, 2e9], [1e9, 2.001e9]).endswith("differ by 0.0500%")


@pytest.mark.parametrize("tokens", ["0", "67"])
def test_impossible_caption_length_is_rejected(write_run, tokens):
    with pytest.raises(UserError, match="1 to 66 tokens"):
        flops.main(["--config", str(write_run()), "--context_length", tokens])


def test_benchmark_counts_executed_flops(tmp_path):
    """With a frozen text tower, recomputation, shards of mel features and GradCache."""
    model = ClapModel(MICRO)
    freeze(model, {"text"})
    forward = analytic.forward_flops(MICRO, LENGTHS, "model", front_end=False)
    backward = analytic.backward_flops(MICRO, LENGTHS, trained=("audio",))
    # A frozen tower isn't checkpointed.
    recomputed = analytic.recomputed_flops(MICRO, LENGTHS, {"audio"}, drop_path=0.2)
    towers: Any = ["audio", "text"]
    settings = ModelSettings(preset="micro", activation_checkpointing=towers, drop_path=0.2)
    ids = torch.ones(2, 16, dtype=torch.long)
    batches: Any = iter([Batch(torch.zeros(2, *MICRO.audio.feature_shape), ids, ids)])
    engine: Any = SimpleNamespace(model=model, uses_gradcache=True)
    measured = measure_flops(engine, batches, settings, {}, tmp_path)
    assert measured["model_gflops"] == forward / 1e9
    assert measured["training_gflops"] == (forward + backward) / 1e9
    assert measured["published_gflops"] == published_flops(MICRO, front_end=False) / 1e9
    # GradCache runs each micro-batch forward twice.
    assert measured["recomputed_gflops"] == pytest.approx((forward + recomputed) / 1e9)


def test_closed_form_runs_without_torch(tmp_path):
    """As on a login node, importing torch or DeepSpeed fails."""
    program = "import sys\nsys.modules['torch'] = sys.modules['deepspeed'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    process = subprocess.run(
        [sys.executable, "-m", "clap_ds.flops", "--config=htsat_base", "--context_length=514"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""},
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    assert re.search(r"\| +closed form \| +130\.0878 \|", process.stdout)
    assert "the profiler was not run" in process.stdout
