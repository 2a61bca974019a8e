"""Three counters agree to the last FLOP, reproduce the published figures, and the command says what it should."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from analysis import plot_flops
from clap_ds import flops
from clap_ds.distributed import UserError
from clap_ds.measure import flops_counters, flops_profile
from clap_ds.measure.flops_analytic import (
    CONVENTIONS,
    Convention,
    TextLengths,
    forward_components,
    forward_flops,
    parameter_counts,
    published_flops,
)
from clap_ds.measure.flops_tables import disagreements
from clap_ds.model.clap import ClapModel
from clap_ds.model.config import AudioConfig, ClapConfig, ProjectionConfig, TextConfig, load_preset, preset_names

ROOT = Path(__file__).resolve().parents[1]
TINY, BASE = "htsat_tiny_roberta_base", "htsat_base_roberta_base"

# Published convention at 514 tokens, from the project's page of checked figures (GFLOPs, four decimals).
PUBLISHED_TABLE = {
    "mel": (0.0657, 0.0657),
    "patch_embedding": (0.0126, 0.0168),
    "stage_0": (2.1643, 3.7581),
    "stage_1": (2.0636, 3.6239),
    "stage_2": (5.7378, 19.9984),
    "stage_3": (1.8371, 3.2548),
    "block_linears": (10.8716, 28.9910),
    "patch_mergings": (0.4530, 0.8053),
    "tscam_conv": (0.1554, 0.2072),
    "audio_projection": (0.0013, 0.0042),
    "audio_tower": (14.1412, 33.0325),
    "text_linears": (87.3128, 87.3128),
    "text_attention": (9.7393, 9.7393),
    "text_pooler": (0.0012, None),
    "text_projection": (0.0013, 0.0032),
    "text_tower": (97.0546, 97.0554),
    "forward": (111.1958, 130.0878),
}


def _gflops(preset: str, tokens: int, convention: Convention = "published") -> dict[str, float]:
    components = forward_components(load_preset(preset), TextLengths.fixed(tokens), convention)
    return {name: value / 1e9 for name, value in components.items()}


@pytest.mark.parametrize(("index", "preset"), [(0, TINY), (1, BASE)])
def test_every_row_of_the_published_table(index: int, preset: str) -> None:
    found = _gflops(preset, 514)
    for name, values in PUBLISHED_TABLE.items():
        expected = values[index]
        assert (name in found) == (expected is not None), name
        if expected is not None:
            assert f"{found[name]:.4f}" == f"{expected:.4f}", name
    # 1001 frames × two convolutions × 513 bins × 1024 taps; the page's last digit (2.1034) is rounded up from 2.10335.
    assert found["stft_convolution"] == 2 * 1001 * 2 * 513 * 1024 / 1e9
    # Depth × tokens × two products × 64 tokens of a window × channels, summed over stages.
    blocks = [2, 2, 6 if index == 0 else 12, 2]
    width = 96 if index == 0 else 128
    by_hand = sum(2 * n * (64 >> s) ** 2 * 2 * 64 * (width << s) for s, n in enumerate(blocks)) / 1e9
    assert found["window_attention"] == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx((0.4781, 0.8389)[index], abs=1e-4)
    assert set(found) == {*PUBLISHED_TABLE, "stft_convolution", "window_attention"} - (
        {"text_pooler"} if index else set()
    )


@pytest.mark.parametrize(
    ("preset", "tokens", "expected"),
    [(TINY, 512, 110.7804), (BASE, 512, 129.6724), (TINY, 77, 27.4422), (BASE, 77, 46.3342)],
)
def test_published_convention_at_other_lengths(preset: str, tokens: int, expected: float) -> None:
    assert f"{_gflops(preset, tokens)['forward']:.4f}" == f"{expected:.4f}"


def test_published_figure_does_not_depend_on_the_run() -> None:
    assert [f"{published_flops(load_preset(name)) / 1e9:.2f}" for name in (TINY, BASE)] == ["111.20", "130.09"]


@pytest.mark.parametrize(("preset", "expected"), [(TINY, "111.1958"), (BASE, "130.0878")])
def test_all_counters_give_the_published_figure(preset: str, expected: str) -> None:
    config = load_preset(preset)
    for count in (flops_counters.count_by_deepspeed, flops_counters.count_by_torch):
        assert f"{count(config, 514, 'published').total / 1e9:.4f}" == expected


def odd_config() -> ClapConfig:
    """Sizes unlike every preset's: three stages, odd depths, a last grid below the window, other widths everywhere."""
    return ClapConfig(
        name="odd",
        audio=AudioConfig(
            sample_rate=16000, num_samples=12000, stft_window=256, hop_size=100, mel_bins=32, fmin=20, fmax=7000,
            image_size=64, patch_size=4, embed_dim=24, depths=[1, 3, 2], num_heads=[2, 3, 6], attention_window=8,
            mlp_ratio=3, num_classes=11, projection=ProjectionConfig(hidden_dim=20, activation="gelu", bias=False),
        ),
        text=TextConfig(
            hub_name="", vocab_size=97, max_positions=40, hidden_size=36, num_layers=3, num_heads=4,
            intermediate_size=52, pooling="mean", projection=ProjectionConfig(hidden_dim=28, activation="relu", bias=True),
        ),
        joint_dim=44,
    )  # fmt: skip


CASES = [
    (load_preset(TINY), 77),
    (load_preset("htsat_large_roberta_base"), 5),
    (load_preset("micro"), 1),
    (load_preset("micro"), 66),
    (odd_config(), 17),
    (odd_config(), 40),
]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(("config", "tokens"), CASES, ids=[f"{c.name}-{tokens}" for c, tokens in CASES])
def test_counters_agree_to_the_last_flop(config: ClapConfig, tokens: int, convention: Convention) -> None:
    expected = forward_flops(config, TextLengths.fixed(tokens), convention)
    by_deepspeed = flops_counters.count_by_deepspeed(config, tokens, convention)
    by_torch = flops_counters.count_by_torch(config, tokens, convention)
    assert by_deepspeed.total == expected
    assert by_torch.total == expected
    # What was added is what each counter is known not to see, no more.
    assert set(by_deepspeed.unseen) == ({flops_counters.FFT} if convention == "model" else set())
    attention = sum(
        value
        for name, value in forward_components(config, TextLengths.fixed(tokens), convention).items()
        if name in ("window_attention", "text_attention")
    )
    assert by_torch.unseen[flops_counters.ATTENTION] == attention


def test_profiling_twice_does_not_accumulate() -> None:
    config = load_preset("micro")
    first, second = (flops_counters.count_by_deepspeed(config, 8, "model") for _ in range(2))
    assert first == second


def test_model_convention_has_what_this_engine_executes() -> None:
    published, model = _gflops(TINY, 77), _gflops(TINY, 77, "model")
    assert {"fft", "stretch"} == set(model) - set(published)
    assert {"stft_convolution", "tscam_conv"} == set(published) - set(model)
    assert model["fft"] == pytest.approx(1001 * 2.5 * 1024 * 10 / 1e9)
    assert model["stretch"] == pytest.approx(2 * 64 * 1001 * 1024 / 1e9)


def test_components_add_up() -> None:
    for preset in preset_names():
        for convention in CONVENTIONS:
            found = _gflops(preset, 20, convention)
            views = found["block_linears"] + found["window_attention"] + found["patch_mergings"]
            assert views == pytest.approx(sum(value for name, value in found.items() if name.startswith("stage_")))
            assert found["forward"] == pytest.approx(found["audio_tower"] + found["text_tower"])


def test_packed_captions_cost_their_own_length() -> None:
    config = load_preset(TINY)
    mixed = forward_components(config, TextLengths.histogram({10: 3, 50: 1}), "model")
    alone = {n: forward_components(config, TextLengths.fixed(n), "model") for n in (10, 50)}
    for name, value in mixed.items():
        assert value == pytest.approx((3 * alone[10][name] + alone[50][name]) / 4, rel=1e-12), name


@pytest.mark.parametrize("config", [*map(load_preset, preset_names()), odd_config()], ids=lambda config: config.name)
def test_parameters_match_the_built_model(config: ClapConfig) -> None:
    with torch.device("meta"):
        model = ClapModel(config)
    counts = parameter_counts(config)
    assert counts.trainable == sum(parameter.numel() for parameter in model.parameters())
    towers = (model.text, model.text_projection)
    assert counts.text == sum(parameter.numel() for tower in towers for parameter in tower.parameters())
    unused = sum(tensor.numel() for held in (model.audio.tscam_conv, model.audio.head) for tensor in held.buffers())
    num_bins = config.audio.stft_window // 2 + 1
    frozen = 2 * num_bins * config.audio.stft_window + num_bins * config.audio.mel_bins
    assert counts.audio == counts.trainable - 1 - counts.text + unused + frozen
    assert counts.total == counts.audio + counts.text + 1


@pytest.mark.parametrize(("preset", "expected"), [(TINY, (31.98, 125.30, 157.28)), (BASE, (74.52, 125.66, 200.18))])
def test_parameters_as_open_clip_counts_them(preset: str, expected: tuple[float, ...]) -> None:
    counts = parameter_counts(load_preset(preset))
    assert tuple(round(n / 1e6, 2) for n in (counts.audio, counts.text, counts.total)) == expected


class _Broadcasting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x + torch.matmul(self.weight, x)


def test_broadcast_products_deepspeed_counts_once_are_noticed() -> None:
    x = torch.ones(6, 4, 5)
    model = nn.Sequential(_Broadcasting())
    with FlopCounterMode(display=False) as truth:
        model(x)
    found = flops_counters.profile_by_deepspeed(FlopsProfiler(model), lambda: model(x))
    assert truth.get_total_flops() == 2 * (2 * 6 * 3 * 4 * 5)
    assert found.counted == truth.get_total_flops() / 6
    assert found.total == truth.get_total_flops()


def test_functions_are_as_before_after_profiling() -> None:
    before = (torch.stft, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
    flops_counters.count_by_deepspeed(load_preset("micro"), 4, "model")
    assert (torch.stft, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) == before


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
    assert f"{_gflops('micro', 16)['forward']:.4f}" in printed


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
    return subprocess.run(
        [sys.executable, "-m", "clap_ds.flops", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    result = subprocess.run(
        [*command, "clap_ds/bench.py", "--deepspeed_config", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
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
    assert "MFU, work really done" in result.stdout
    assert "no MFU" not in result.stdout
    # The engine itself doesn't profile: that would print every step's phases.
    assert "time (ms)" not in (directory / "rank0.log").read_text()
