"""The FLOPs command and its picture, and the profiler section of a bench run, say what they should."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clap_ds import flops
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.data.batch import Batch
from clap_ds.flop_count.analytic import TextLengths, forward_components, forward_flops, published_flops
from clap_ds.flop_count.counters import Count
from clap_ds.measuring.flops_profile import disagreement_warnings, measure_flops
from tests.processes import ROOT
from tests.training.training_commands import RunningRanks

WriteRun = Callable[..., Path]


def test_warning_above_half_a_percent() -> None:
    warned = [bool(disagreement_warnings(25 * (1 + percent / 100), 25)) for percent in (-0.6, -0.4, 0, 0.4, 0.6)]
    assert warned == [True, False, False, False, True]


def test_a_model_that_does_more_than_the_closed_form_knows_is_reported() -> None:
    report = flops.make_report(load_preset("micro"), 8, {})
    exact = report["model"]["analytic"] * 1e9
    agreeing, off = Count(exact - 7, {"FFT": 7.0}), Count(exact * 1.01)
    assert "agrees with the closed form" in flops.agreement(report, {"deepspeed": agreeing})
    assert "NOT EXPLAINED" in flops.agreement(report, {"deepspeed": agreeing, "torch": off})


def test_json_report(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    flops.main(["--deepspeed_config", str(write_run()), "--text_tokens", "9", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["preset"], report["text_tokens"]) == ("micro", 9)
    assert set(report["parameters"]) == {"audio", "text", "total", "trainable"}
    for convention, names in (("published", ["analytic"]), ("model", ["analytic", "deepspeed", "torch"])):
        section = report[convention]
        assert list(section) == [*names, "components"]
        expected = forward_flops(load_preset("micro"), TextLengths.fixed(9), convention) / 1e9
        assert [section[name] for name in names] == pytest.approx([expected] * len(names), rel=1e-12)
        assert section["components"]["forward"] == section["analytic"]


def test_tables_at_the_length_of_the_run(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    flops.main(["--deepspeed_config", str(write_run())])
    printed = capsys.readouterr().out
    assert "16 text tokens" in printed
    assert "agrees with the closed form to the last FLOP" in printed
    assert f"{forward_flops(load_preset('micro'), TextLengths.fixed(16), 'published') / 1e9:.4f}" in printed
    assert printed.count("FFT, which it can't see") == 2


def test_fed_features(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    flops.main(["--deepspeed_config", str(write_run()), "--audio", "mel"])
    printed = capsys.readouterr().out
    assert "16 text tokens, fed log-mel features" in printed
    assert "agrees with the closed form to the last FLOP" in printed
    assert "FFT, which it can't see" not in printed
    expected = forward_flops(load_preset("micro"), TextLengths.fixed(16), "model", front_end=False)
    assert f"{expected / 1e9:.4f}" in printed


def test_a_run_counts_what_its_batches_hold(write_run: WriteRun) -> None:
    run, audio = load_run(write_run()), load_preset("micro").audio
    ids = torch.ones(2, 16, dtype=torch.long)
    for front_end, shape in ((True, (audio.num_samples,)), (False, audio.feature_shape)):
        session: Any = SimpleNamespace(run=run, batches=iter([Batch(torch.zeros(2, *shape), ids, ids)]))
        found, warnings = measure_flops(session)
        counts = load_preset("micro"), TextLengths.fixed(16), "model"
        assert found["model_gflops"] == forward_flops(*counts, front_end=front_end) / 1e9
        assert found["published_gflops"] == published_flops(counts[0], front_end=front_end) / 1e9
        assert warnings == []


def test_text_lengths_beyond_the_model(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--deepspeed_config", str(write_run()), "--counters", "analytic", "--text_tokens"]
    for tokens in ("0", "67"):
        with pytest.raises(UserError, match=r"expected 1 to 66.*numbers positions from 2"):
            flops.main([*arguments, tokens])
    for tokens in ("64", "65"):
        flops.main([*arguments, tokens])
        assert (f"{tokens} tokens can be counted but not run" in capsys.readouterr().out) is (tokens == "65")


def test_utilization_of_a_rate(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(peak_tflops: float | None, rate: str) -> str:
        path = write_run(clap={"hardware": {"peak_tflops": peak_tflops}})
        flops.main(["--deepspeed_config", str(path), "--counters", "analytic", "--samples_per_s", rate])
        return capsys.readouterr().out

    percent = 100 * 3 * published_flops(load_preset("micro")) * 1000 / 3e12
    assert f"MFU {percent:.1f} % published" in shown(3.0, "1000")
    assert "no MFU: the peak of" in shown(None, "1000")
    assert "overstates by design" not in shown(3.0, "1000")
    impossible = shown(0.01, "1000")
    assert "overstates by design" in impossible
    assert "the rate or the peak must be wrong" in impossible
    with pytest.raises(UserError, match="--samples_per_s 0: expected a number above 0"):
        shown(None, "0")


def test_closed_form_needs_no_torch(tmp_path: Path) -> None:
    """As on a login node: importing torch or DeepSpeed is an error there."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = sys.modules['deepspeed'] = None\n")
    command = "-m clap_ds.flops --deepspeed_config ds_configs/htsat_base.json --counters analytic --json --text_tokens"
    options: Any = {"cwd": ROOT, "env": {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}, "timeout": 60}
    commands = [[sys.executable, *command.split(), tokens] for tokens in ("514", "515")]
    found, refused = (subprocess.run(each, capture_output=True, text=True, **options) for each in commands)
    assert found.returncode == 0, found.stderr
    assert f"{json.loads(found.stdout)['published']['analytic']:.4f}" == "130.0878"
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "515: expected 1 to 514" in refused.stderr


def test_picture_has_the_whole_forward(tmp_path: Path) -> None:
    found = forward_components(load_preset("htsat_tiny_roberta_base"), TextLengths.fixed(77), "published")
    assert sum(found[part] for parts in flops.GROUPS.values() for part in parts) == pytest.approx(found["forward"])
    flops.main(["--plot", str(tmp_path / "new" / "picture.png")])
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.end_to_end
def test_profiler_section_in_a_bench_run(write_run: WriteRun, tmp_path: Path) -> None:
    """Two ranks, accumulation, DeepSpeed's own section: report once, agreement, MFU by hand, no timers in the windows."""
    elsewhere = tmp_path / "deep" / "copy.txt"
    profiler = {"enabled": True, "module_depth": 1, "detailed": False, "output_file": str(elsewhere)}
    bench = {"warmup_steps": 1, "windows": 2, "steps_per_window": 1, "breakdown_steps": 1}
    clap = {"bench": bench, "hardware": {"peak_tflops": 3.0, "measure_peak": True}}
    path = write_run(flops_profiler=profiler, gradient_accumulation_steps=2, log_level="info", clap=clap)
    ranks = RunningRanks(path, 2, file="clap_ds/bench.py")
    assert ranks.wait() == [0, 0], ranks.outputs
    (directory,) = (tmp_path / "runs").iterdir()
    summary = json.loads((directory / "summary.json").read_text())
    report = (directory / "flops_profile.txt").read_text()
    assert report.count("DeepSpeed Flops Profiler ----") == 1
    assert "Detailed Profile" not in report
    assert elsewhere.read_text() == report
    assert summary["flops"]["deepspeed_gflops"] == pytest.approx(summary["flops"]["model_gflops"], rel=1e-9)
    assert summary["warnings"] == []
    done_tflops = 3 * summary["flops"]["model_gflops"] * summary["samples_per_s_per_gpu"]["median"] / 1e3
    published = published_flops(load_preset("micro")) / 1e9 / summary["flops"]["model_gflops"]
    assert summary["achieved_tflops"] == pytest.approx(done_tflops)
    assert summary["mfu_model_percent"] == pytest.approx(100 * done_tflops / 3.0)
    assert summary["mfu_published_percent"] == pytest.approx(100 * done_tflops * published / 3.0)
    assert summary["achievable_percent"] == pytest.approx(100 * done_tflops / summary["matmul_tflops"])
    assert "MFU, work really done" in ranks.outputs[0]
    assert "no MFU" not in ranks.outputs[0]
    # The engine itself doesn't profile: that would print every step's phases.
    assert "time (ms)" not in (directory / "rank0.log").read_text()
