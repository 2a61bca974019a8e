"""The FLOPs command, its chart, and the profiler section of a bench run say what they should."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot_flops
from clap_ds import flops
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.flop_count import counters as flops_counters
from clap_ds.flop_count.analytic import (
    CONVENTIONS,
    TextLengths,
    forward_components,
    forward_flops,
    published_flops,
)
from clap_ds.flop_count.tables import disagreements
from clap_ds.measuring import flops_profile
from tests import processes
from tests.training.training_commands import RunningRanks

ROOT = Path(__file__).resolve().parents[2]
TINY, BASE = "htsat_tiny_roberta_base", "htsat_base_roberta_base"


@pytest.mark.parametrize(("percent", "warned"), [(-0.6, True), (-0.4, False), (0.0, False), (0.4, False), (0.6, True)])
def test_warning_above_half_a_percent(percent: float, warned: bool) -> None:
    assert bool(flops_profile.disagreement_warnings(25.0 * (1 + percent / 100), 25.0)) is warned


def test_a_model_that_does_more_than_the_closed_form_knows_is_told() -> None:
    report = flops.make_report(load_preset("micro"), 8, {})
    exact = report["model"]["analytic"] * 1e9
    agreeing = {("model", "deepspeed"): flops_counters.Count(exact - 7, {"FFT": 7.0})}
    assert "agrees with the closed form" in disagreements(report, agreeing)[-1]
    off = {("model", "deepspeed"): flops_counters.Count(exact * 1.01)}
    assert "NOT EXPLAINED: 1.0000 %" in disagreements(report, off)[-1]


def test_json_report(write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    flops.main(["--deepspeed_config", str(write_run()), "--text_tokens", "9", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["preset", "text_tokens", "published", "model", "parameters"]
    assert (report["preset"], report["text_tokens"]) == ("micro", 9)
    assert set(report["parameters"]) == {"audio", "text", "total", "trainable"}
    for convention in CONVENTIONS:
        section = report[convention]
        assert list(section) == ["analytic", "deepspeed", "torch", "components"]
        expected = forward_flops(load_preset("micro"), TextLengths.fixed(9), convention) / 1e9
        for counter in ("analytic", "deepspeed", "torch"):
            assert section[counter] == pytest.approx(expected, rel=1e-12)
        assert section["components"]["forward"] == section["analytic"]


def test_text_length_of_the_run_and_tables(write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    flops.main(["--deepspeed_config", str(write_run())])
    printed = capsys.readouterr().out
    assert "16 text tokens" in printed
    assert "agrees with the closed form to the last FLOP" in printed
    assert f"{forward_flops(load_preset('micro'), TextLengths.fixed(16), 'published') / 1e9:.4f}" in printed


@pytest.mark.parametrize("tokens", ["0", "-3", "67"])
def test_impossible_text_length(write_run: Callable[..., Path], tokens: str) -> None:
    with pytest.raises(UserError, match=r"expected 1 to 66.*numbers positions from 2"):
        flops.main(["--deepspeed_config", str(write_run()), "--text_tokens", tokens])


def test_lengths_without_a_usable_position_are_counted_with_a_note(
    write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--deepspeed_config", str(write_run()), "--counters", "analytic", "--text_tokens"]
    flops.main([*arguments, "64"])
    assert "can be counted but not run" not in capsys.readouterr().out
    flops.main([*arguments, "65"])
    assert "65 tokens can be counted but not run" in capsys.readouterr().out


def test_measured_ceiling_and_rate(write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(clap={"hardware": {"peak_tflops": 2.0}, "model": {"preset": "micro"}, "text_tokens": 16})
    options = ["--counters", "analytic", "--json", "--measure_peak", "--samples_per_s", "100"]
    flops.main(["--deepspeed_config", str(path), *options])
    report = json.loads(capsys.readouterr().out)
    done_tflops = 3 * 100 * report["model"]["analytic"] / 1000
    assert report["matmul_tflops"] > 0
    assert report["mfu_model_percent"] == pytest.approx(100 * done_tflops / 2.0)
    assert report["achievable_percent"] == pytest.approx(100 * done_tflops / report["matmul_tflops"])


@pytest.mark.parametrize("value", [0, -5.0, "fast"])
def test_impossible_peak_is_refused(write_run: Callable[..., Path], value: object) -> None:
    with pytest.raises(UserError, match=r"clap\.hardware\.peak_tflops"):
        flops.main(["--deepspeed_config", str(write_run(clap={"hardware": {"peak_tflops": value}}))])


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return processes.run(["-m", "clap_ds.flops", *arguments])


def test_exit_codes_and_messages(tmp_path: Path) -> None:
    too_long = _command("--deepspeed_config", "ds_configs/htsat_tiny.json", "--text_tokens", "515")
    assert (too_long.returncode, too_long.stdout) == (2, "")
    assert "515: expected 1 to 514" in too_long.stderr
    missing = _command("--deepspeed_config", str(tmp_path / "none.json"))
    assert missing.returncode == 2
    assert "no such file" in missing.stderr


def test_closed_form_needs_no_torch(tmp_path: Path) -> None:
    """As on a login node: importing torch or DeepSpeed is an error there."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = sys.modules['deepspeed'] = None\n")
    result = subprocess.run(
        [
            sys.executable, "-m", "clap_ds.flops", "--deepspeed_config", "ds_configs/htsat_base.json",
            "--counters", "analytic", "--json", "--text_tokens", "514",
        ],
        cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    assert f"{report['published']['analytic']:.4f}" == "130.0878"
    assert report["published"]["deepspeed"] is None


def test_chart_segments_are_the_whole_forward(tmp_path: Path) -> None:
    for preset in (TINY, BASE):
        for convention in CONVENTIONS:
            found = forward_components(load_preset(preset), TextLengths.fixed(77), convention)
            assert sum(plot_flops.group_components(found).values()) == pytest.approx(found["forward"] / 1e9)
    plot_flops.main(["--output", str(tmp_path / "chart.png")])
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.end_to_end
def test_profiler_section_in_a_bench_run(write_run: Callable[..., Path], tmp_path: Path) -> None:
    """Two ranks, accumulation, DeepSpeed's own section: report once, agreement, MFU by hand, no timers in the windows."""
    elsewhere = tmp_path / "deep" / "copy.txt"
    path = write_run(
        flops_profiler={"enabled": True, "module_depth": 1, "detailed": False, "output_file": str(elsewhere)},
        gradient_accumulation_steps=2,
        log_level="info",
        clap={
            "model": {"preset": "micro"},
            "text_tokens": 16,
            "bench": {"warmup_steps": 1, "windows": 2, "steps_per_window": 1, "breakdown_steps": 1},
            "hardware": {"peak_tflops": 3.0},
        },
    )
    ranks = RunningRanks(path, 2, "clap_ds/bench.py")
    assert ranks.wait() == [0, 0], ranks.outputs
    (directory,) = (tmp_path / "runs").iterdir()
    summary = json.loads((directory / "summary.json").read_text())
    report = (directory / "flops_profile.txt").read_text()
    assert report.count("DeepSpeed Flops Profiler ----") == 1
    assert "Detailed Profile" not in report
    assert elsewhere.read_text() == report
    assert summary["flops"]["deepspeed_gflops"] == pytest.approx(summary["flops"]["model_gflops"], rel=1e-9)
    assert summary["warnings"] == []
    rate = summary["samples_per_s_per_gpu"]["median"]
    assert summary["achieved_tflops"] == pytest.approx(3 * summary["flops"]["model_gflops"] * rate / 1e3)
    assert summary["mfu_model_percent"] == pytest.approx(100 * summary["achieved_tflops"] / 3.0)
    assert summary["mfu_published_percent"] == pytest.approx(
        100 * 3 * published_flops(load_preset("micro")) * rate / 3.0e12
    )
    assert "MFU, work really done" in ranks.outputs[0]
    assert "no MFU" not in ranks.outputs[0]
    # The engine itself doesn't profile: that would print every step's phases.
    assert "time (ms)" not in (directory / "rank0.log").read_text()
