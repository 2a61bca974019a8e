"""Plots of runs: drawn from their records, with an error if there is nothing to draw."""

from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.figure import FigureBuilder
from clap_ds.analysis.plot_run import draw_benchmark, draw_breakdown, draw_runs, draw_training
from clap_ds.analysis.table import Row
from clap_ds.utils.errors import UserError
from tests.analysis.samples import record

COMMON = {
    "state": "completed",
    "preset": "micro",
    "world_size": 2,
    "num_nodes": 1,
    "device_name": "a CPU",
}


def benchmark(folder: Path, **changes: Any) -> Path:
    phases = ["warmup", "timed", "timed"]
    steps = [
        {"step": n, "phase": phase, "time_s": n / 10} for n, phase in enumerate(phases, start=1)
    ]
    summary = COMMON | {
        "precision": "bf16",
        "micro_batch_per_gpu": 4,
        "context_length": 16,
        "step_time_s": {"median": 0.4},
        "samples_per_s_per_gpu": {"mean": 10.0, "windows": [9.0, 11.0, 10.1]},
        "breakdown_s": {"forward": 0.1, "backward": 0.2},
    }
    return record(folder, steps, **summary | changes)


def training(folder: Path, **changes: Any) -> Path:
    lines: list[dict[str, Any]] = [
        {
            "phase": "train",
            "step": step,
            "samples": 8 * step,
            "time_s": 0.4,
            "loss": 2 / step,
            "gradient_norm": 1.0,
        }
        for step in range(1, 51)
    ]
    evaluation = {"zero_shot_top1": 0.5, "chance": {"zero_shot_top1": 0.25}}
    lines.append({"phase": "evaluation", "step": 25, **evaluation})
    lines.append({"phase": "checkpoint", "checkpoint": [1.0, 2.0]})
    summary = COMMON | {"command": "train", "samples": 400, "precision": "fp32", "global_batch": 8}
    return record(folder, lines, **summary | changes)


def title_of(figure: FigureBuilder) -> str:
    return figure.figure.get_suptitle().replace("\n", " ")


def test_benchmark_is_drawn_with_its_numbers(tmp_path):
    figure = draw_benchmark(benchmark(tmp_path / "run"))
    rates = "10.00 samples/s/rank (windows: 9.00 – 11.00)"
    settings = "micro on 2 × a CPU, bf16, batch per rank 4, 16 text tokens"
    assert title_of(figure) == f"{rates} {settings}"
    times, parts = figure.panels
    warmup, timed, median = (line.get_xydata().tolist() for line in times.lines)
    assert warmup == [[1, 100]]
    assert timed == [[2, 200], [3, 300]]
    assert median[0][1] == 400
    bars = [(bar[0].get_x(), bar[0].get_width()) for bar in parts.containers]
    assert bars == [(0, 100), (100, 200)]


def test_curves_are_the_steps_and_their_moving_mean(tmp_path):
    figure = draw_training([training(tmp_path / "run")])
    loss, _, _, norm, speed, evaluation = figure.panels
    (mean,) = (line.get_xydata().tolist() for line in loss.lines)
    assert mean[4] == [5, pytest.approx(sum(2 / step for step in range(1, 6)) / 5)]
    assert speed.lines[0].get_xydata()[5].tolist() == [6, 20.0]
    assert norm.get_yscale() == "log"
    scores = {line.get_label(): line for line in evaluation.lines}
    assert scores["zero shot top1"].get_xydata().tolist() == [[25, 0.5]]
    (chance,) = (line for line in evaluation.lines if line.get_linestyle() == ":")
    assert chance.get_ydata()[0] == 0.25
    assert title_of(figure).endswith(": 400 samples")


def test_command_draws_curves_of_several_runs(tmp_path):
    run_dirs = [training(tmp_path / name, state="terminated") for name in ("first", "second")]
    output = tmp_path / "new" / "run.png"
    plot_scaling.main(["--curves", *map(str, run_dirs), "--output", str(output)])
    assert output.stat().st_size > 10_000
    first, second = draw_training(run_dirs).figure.get_suptitle().splitlines()
    assert first.startswith("first: micro on 2 × a CPU")
    assert second.startswith("second: ")
    assert "terminated" in first


def test_breakdown_has_a_bar_per_scale_in_milliseconds():
    figure = draw_breakdown([Row(n, 4 * n, forward_s=0.1, backward_s=0.2 * n) for n in (1, 2, 4)])
    _, backward = figure.panels[0].containers
    bars = [(bar.get_x(), bar.get_width()) for bar in backward]
    assert bars == [(100, 200), (100, 400), (100, 800)]
    labels = {text.get_text() for text in figure.figure.legends[0].get_texts()}
    assert labels == {"backward 88.9%", "forward 11.1%"}


def test_run_without_steps_is_rejected(tmp_path):
    summary = dict.fromkeys(("step_time_s", "samples_per_s_per_gpu", "micro_batch_per_gpu"))
    failed = benchmark(tmp_path / "failed", **summary, state="failed")
    untrained = benchmark(tmp_path / "untrained", command="train")
    for directory, message in (
        (failed, "no timed windows.*'failed'"),
        (untrained, "no training steps"),
        (tmp_path, r"no summary\.json"),
    ):
        with pytest.raises(UserError, match=message):
            draw_runs([directory], tmp_path / "run.png")
