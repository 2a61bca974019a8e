"""Peaks by exact name, MFU by hand, and nothing where the peak is unknown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clap_ds.flop_count.peaks import PEAKS, achieved_tflops, mfu_percent, no_peak_message, peak_for, utilization
from clap_ds.measuring.matmul_ceiling import measure_matmul_tflops
from clap_ds.record.terminal import rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 120GB", 989),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peak_of_known_devices(name: str, tflops: float) -> None:
    peak = peak_for(name)
    assert peak is not None
    assert peak.tflops == tflops
    assert "data sheet" in peak.source


@pytest.mark.parametrize(
    "name", ["NVIDIA H100", "H200", "NVIDIA H200 MIG 1g.18gb", "nvidia h200", "", "Intel(R) Xeon(R)"]
)
def test_names_that_are_not_exactly_in_the_table_have_no_peak(name: str) -> None:
    assert peak_for(name) is None


def test_setting_wins_over_the_table() -> None:
    peak = peak_for("NVIDIA H200", 500.0)
    assert peak is not None
    assert (peak.tflops, peak.source) == (500.0, "clap.hardware.peak_tflops")


def test_every_peak_has_a_source() -> None:
    assert all(peak.tflops > 0 and peak.source for peak in PEAKS.values())


@pytest.mark.parametrize(
    ("gflops", "rate", "percent"), [(111.20, 623.7, 21.0), (130.09, 538.2, 21.2), (111.20, 544.6, 18.4)]
)
def test_published_mfu_from_the_published_rate(gflops: float, rate: float, percent: float) -> None:
    """The published table: GFLOPs × 3 × samples/s / 989 TFLOPS."""
    found = mfu_percent(gflops * 1e9, rate, peak_for("NVIDIA GH200 120GB"))
    assert found is not None
    assert round(found, 1) == percent


def test_mfu_by_hand() -> None:
    # 2 GFLOPs forward, 6 with backward, 500 samples/s: 3 TFLOPS, of 12: a quarter.
    assert achieved_tflops(2e9, 500) == pytest.approx(3.0)
    assert mfu_percent(2e9, 500, peak_for("anything", 12.0)) == pytest.approx(25.0)


def test_unknown_device_has_no_mfu_and_says_what_to_set() -> None:
    found = utilization(4e9, 2e9, 500, "Some CPU", None)
    assert found["mfu_published_percent"] is None
    assert found["mfu_model_percent"] is None
    assert found["peak_tflops"] is None
    assert found["achieved_tflops"] == pytest.approx(3.0)
    assert found["peak_source"] == no_peak_message("Some CPU")
    assert "clap.hardware.peak_tflops" in found["peak_source"]
    assert "Some CPU" in found["peak_source"]


def test_both_conventions_are_kept_apart() -> None:
    found = utilization(4e9, 2e9, 500, "NVIDIA H200", 12.0)
    assert found["mfu_published_percent"] == pytest.approx(50.0)
    assert found["mfu_model_percent"] == pytest.approx(25.0)


def test_table_names_what_each_mfu_counts() -> None:
    summary = {
        "device_type": "cuda",
        "samples_per_s_per_gpu": {"median": 500.0, "low": 490.0, "high": 510.0},
        "step_time_s": {"median": 1.0, "p95": 1.0, "slowest_rank_median": 1.0},
        "samples_per_s": 500.0,
        "deepspeed_samples_per_s": None,
        "audio_hours_per_s": 1.0,
        "data_wait_percent": 0.0,
        "memory_peak_bytes": 2**30,
        "breakdown_s": None,
        "flops": {
            "published_gflops": 4.0,
            "model_gflops": 2.0,
            "recomputed_gflops": 1.5,
            "deepspeed_gflops": 2.1,
            "deepspeed_unseen_gflops": {},
        },
        "warnings": ["they differ"],
        **utilization(4e9, 2e9, 500, "NVIDIA H200", 12.0, recomputed_flops=1.5e9),
    }
    lines = dict(rows(summary))
    # 6 GFLOPs a sample of the model's and 1.5 done again: 3.75 TFLOPS.
    assert lines["  with recomputation"] == "3.750 (1.5000 GFLOPs a sample done twice)"
    assert lines["  with recomputation (HFU)"] == "31.25 % of 12 TFLOPS"
    assert lines["MFU, published convention (4.00 GFLOPs)"] == "50.00 % of 12 TFLOPS"
    assert lines["MFU, work really done"] == "25.00 % of 12 TFLOPS"
    assert lines["  by DeepSpeed's profiler"] == "2.1000"
    assert lines["warning"] == "they differ"
    summary |= utilization(4e9, 2e9, 500, "Some CPU", None)
    assert not any("%" in value for name, value in rows(summary) if name.startswith("MFU"))


def test_ceiling_counts_two_flops_per_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a clock that gives every product the same time."""
    seconds = iter(range(10**6))
    monkeypatch.setattr("clap_ds.measuring.matmul_ceiling.time.perf_counter", lambda: float(next(seconds)))
    found = measure_matmul_tflops(torch.device("cpu"), 16, warm_up_s=3, measure_s=0)
    assert found == pytest.approx(2 * 16**3 / 1e12)


def test_table_of_peaks_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import clap_ds.flop_count.peaks"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
