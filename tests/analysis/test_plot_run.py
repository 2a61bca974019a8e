"""Runs as pictures: drawn from their records, refused with words where there is nothing to draw."""

from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis import plot_run
from clap_ds.analysis.plot_run import draw_runs, draw_training
from clap_ds.config.errors import UserError
from tests.analysis.samples import command, record

COMMON = {"state": "completed", "preset": "micro", "world_size": 2, "num_nodes": 1, "device_name": "a device"}


def benchmark(folder: Path, **changes: Any) -> Path:
    phases = ["warmup", *["window"] * 4]
    steps = [{"step": n, "phase": phase, "window": n // 4, "time_s": n / 10} for n, phase in enumerate(phases, 1)]
    summary = COMMON | {
        "precision": "bf16", "micro_batch_per_gpu": 4, "text_tokens": 16, "data_wait_percent": 0.5,
        "samples_per_s_per_gpu": {"median": 10.0, "windows": [9.0, 11.0, 10.0]}, "memory_peak_bytes": 2**30,
        "step_time_s": {"median": 0.4, "p95": 0.5, "slowest_rank_median": 0.45},
        "breakdown_s": {"forward": 0.1, "backward": 0.2},
    }  # fmt: skip
    return record(folder, steps, **summary | changes)


def training(folder: Path, **changes: Any) -> Path:
    lines: list[dict[str, Any]] = [
        {"phase": "train", "step": step, "samples": 8 * step, "time_s": 0.4, "loss": 2 / step, "lr": 1e-3,
         "gradient_norm": 1.0, "logit_scale": 14.0}
        for step in range(1, 51)
    ]  # fmt: skip
    lines.insert(25, {"phase": "evaluation", "step": 25, "zero_shot_top1": 0.5, "retrieval_audio_to_text_r1": 0.1})
    lines.insert(26, {"phase": "checkpoint", "checkpoint": [1.0, 2.0]})
    summary = COMMON | {"command": "train", "samples": 400, "precision": "fp32", "global_batch": 8}
    return record(folder, lines, **summary | changes)


def test_a_benchmarks_picture_shows_its_figures(tmp_path: Path) -> None:
    draw_runs([benchmark(tmp_path / "run")], tmp_path / "run.svg")
    picture = (tmp_path / "run.svg").read_text()
    for text in ("10.00", "  75 % interval", "9.00 – 11.00", "20.00", "485 ms", "450 ms", "0.50 %", "1.00 GiB", "backward 67 %",
                 "micro on 2 × a device, bf16, batch per GPU 4, 16 text tokens"):  # fmt: skip
        assert f"<!-- {text}" in picture or f"\n{text}\n" in picture, text
    assert "1 nodes, 2 GPUs\nforward 100 ms, 33.3 %" in picture


def test_a_killed_benchmark_is_drawn_from_its_windows(tmp_path: Path) -> None:
    measured = ("samples_per_s_per_gpu", "step_time_s", "memory_peak_bytes", "breakdown_s", "data_wait_percent")
    draw_runs([benchmark(tmp_path / "run", state="terminated", **dict.fromkeys(measured))], tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_run_and_its_control_share_the_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [training(tmp_path / name) for name in ("run", "control")]
    command(monkeypatch, plot_run.main, *runs, "--output", tmp_path / "curves.svg")
    for text in ("micro on 2 × a device, fp32, global batch 8: 400 samples", "control", "logit scale"):
        assert f"<!-- {text} -->" in (tmp_path / "curves.svg").read_text()


def test_curves_are_the_steps_and_their_moving_mean(tmp_path: Path) -> None:
    summary = COMMON | {"state": "failed", "time_to_target_s": 12.0}
    picture = draw_training({training(tmp_path / "run"): summary})
    loss, rate, _, norm, evaluation, speed = picture.panels
    every, mean = (line.get_xydata().tolist() for line in loss.lines if len(line.get_xydata()))
    assert every == [[step, 2 / step] for step in range(1, 51)]
    assert mean[0] == [5, pytest.approx(sum(2 / step for step in range(1, 6)) / 5)]
    assert (len(mean), [len(line.get_xydata()) for line in rate.lines]) == (46, [50])
    assert norm.get_yscale() == "log"
    drawn = {line.get_label(): line.get_xydata().tolist() for line in evaluation.lines}
    assert drawn == {"zero_shot_top1": [[25, 0.5]], "retrieval_audio_to_text_r1": [[25, 0.1]]}
    assert speed.lines[0].get_xydata()[0].tolist() == [2, 20.0]
    assert picture.figure.get_suptitle().endswith("0 samples, failed, target reached after 12 s")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "summary.json").write_text("{")
    killed = {"step_time_s": None, "samples_per_s_per_gpu": None, "micro_batch_per_gpu": None, "state": "failed"}
    runs = [training(tmp_path / "run"), benchmark(tmp_path / "bench")]
    for folders, message in (
        ([benchmark(tmp_path / "killed", **killed)], "no timed windows; the run's state is 'failed'"),
        ([benchmark(tmp_path / "untrained", command="train")], "no step of training; the run's state is 'completed'"),
        ([tmp_path], r"not a readable run directory: no summary\.json"),
        (runs, "only where all are of training"),
        ([*runs, tmp_path / "torn"], r"summary\.json is not readable JSON"),
    ):
        with pytest.raises(UserError, match=message):
            draw_runs(folders, tmp_path / "run.png")
