"""Test the FLOPs command and a benchmark's FLOPs."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
from clap_ds.flop_count.analytic import (
    CONVENTIONS,
    TextLengths,
    forward_components,
    forward_flops,
    published_flops,
)
from clap_ds.flop_count.counters import build, parameter_counts
from clap_ds.model.clap import ClapModel
from clap_ds.throughput_bench.flops_profile import measure_flops
from clap_ds.utils.errors import UserError
from tests.processes import ROOT

WriteRun = Callable[..., Path]
MICRO = load_preset("micro")
LENGTHS = TextLengths.fixed(16)


def test_every_figure_of_the_report(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    flops.main(["--deepspeed_config", str(write_run())])
    printed = capsys.readouterr().out
    assert printed.startswith("micro, 16 text tokens")
    assert "agrees with the closed form to the last FLOP" in printed
    assert f"trained {parameter_counts(build(MICRO))['trainable'] / 1e6:.2f}" in printed
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in printed.splitlines()
        if "|" in line
    ]
    published, done = (forward_components(MICRO, LENGTHS, convention) for convention in CONVENTIONS)
    whole = published["forward"], done["forward"]
    for name, values in (
        ("closed form", whole),
        ("DeepSpeed's profiler alone, 2 × MACs", (whole[0], whole[1] - done["fft"])),
        (
            "with the backward pass",
            (3 * whole[0], whole[1] + analytic.backward_flops(MICRO, LENGTHS)),
        ),
        ("of the stages: block linears", (published["block_linears"], done["block_linears"])),
    ):
        assert [name, *(f"{value / 1e9:.4f}" for value in values)] in rows
    assert flops.agreement(whole, [whole[0], 1.0005 * whole[1]]).endswith("differ by 0.0500%")


def test_lengths_that_a_caption_cannot_have(write_run: WriteRun) -> None:
    for tokens in ("0", "67"):
        with pytest.raises(UserError, match="1 to 66 tokens"):
            flops.main(["--deepspeed_config", str(write_run()), "--context_length", tokens])


@pytest.mark.parametrize("frozen", [(), ("text",), ("audio",)])
def test_a_run_counts_what_it_does(tmp_path: Path, frozen: tuple[str, ...]) -> None:
    """For waveforms and features, with frozen towers, recomputation and a second forward pass."""
    ids = torch.ones(2, 16, dtype=torch.long)
    model = ClapModel(MICRO)
    freeze(model, frozen)
    recomputing = ModelSettings(preset="micro", activation_checkpointing=["audio"], drop_path=0.2)
    trained = [name for name in ("audio", "text") if name not in frozen]
    again = (
        analytic.recomputed_flops(MICRO, LENGTHS, ("audio",), drop_path=0.2)
        if "audio" in trained
        else 0
    )
    for front_end, shape in (
        (True, (MICRO.audio.num_samples,)),
        (False, MICRO.audio.feature_shape),
    ):
        forward = forward_flops(MICRO, LENGTHS, "model", front_end=front_end)
        expected = {
            "model_gflops": forward / 1e9,
            "published_gflops": published_flops(MICRO, front_end=front_end) / 1e9,
            "training_gflops": (forward + analytic.backward_flops(MICRO, LENGTHS, trained=trained))
            / 1e9,
        }
        for settings, cached, repeated in (
            (recomputing, True, forward + again),
            (ModelSettings(), False, 0),
        ):
            engine: Any = SimpleNamespace(model=model, cached=cached)
            batches: Any = iter([Batch(torch.zeros(2, *shape), ids, ids)])
            found = measure_flops(engine, batches, settings, {}, tmp_path)
            assert found | expected | {"recomputed_gflops": pytest.approx(repeated / 1e9)} == found


def test_closed_form_needs_no_torch(tmp_path: Path) -> None:
    """As on a login node, importing torch or DeepSpeed fails."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['torch'] = sys.modules['deepspeed'] = None\n"
    )
    command = "-m clap_ds.flops --deepspeed_config ds_configs/htsat_base.json --context_length 514"
    options: Any = {
        "cwd": ROOT,
        "env": {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""},
        "timeout": 60,
    }
    found = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, **options
    )
    assert found.returncode == 0, found.stderr
    assert re.search(r"\| +closed form \| +130\.0878 \|", found.stdout)
    assert "the profiler was not run" in found.stdout
