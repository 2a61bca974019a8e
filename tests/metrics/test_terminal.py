"""Every line of the final table, and the time left."""

from typing import Any

import pytest

from clap_ds.metrics.intervals import rates
from clap_ds.metrics.terminal import Progress, print_summary, rows

SUMMARY: Any = {
    "preset": "micro", "world_size": 8, "device_name": "H200", "num_nodes": 2, "precision": "bf16", "micro_batch_per_gpu": 4,
    "context_length": 16, "device_type": "cuda", "samples_per_s_per_gpu": rates([1000.0, 1000.0], [2.0, 1.0]),
    "step_time_s": {"median": 0.25, "p95": 0.5, "slowest_rank_median": 0.26}, "global_batch": 8000, "samples_per_s": 16000 / 3,
    "deepspeed_samples_per_s": 5400.0, "data_wait_percent": 1.5,
    "memory_peak_bytes": 3 * 2**30, "memory_reserved_peak_bytes": 4 * 2**30, "warnings": ["a straggler"],
    "breakdown_s": {"data_wait": 0.1, "backward": 0.3, "exposed_communication": 0.1},
}  # fmt: skip
FLOPS = {"published_gflops": 111.196718, "training_gflops": 75.7095, "recomputed_gflops": 15.0}
UTILIZATION = {
    "mfu_published_percent": 112.705,
    "mfu_model_percent": 25.579,
    "hfu_percent": 30.647,
    "achieved_tflops": 252.974,
    "peak_tflops": 989,
}
ENERGY = {"joules_per_sample": 0.2, "energy_kwh": 0.001}


def test_rows_have_values_with_units(capsys):
    print_summary(SUMMARY)
    title, *_, last_line = capsys.readouterr().out.splitlines()
    assert title == "micro on 8 × H200, 2 nodes, bf16, micro-batch 4, 16 text tokens"
    assert last_line == "warning: a straggler"
    assert [*rows(SUMMARY)] == [
        ("samples/s/GPU", "666.67"),
        ("  range of 2 windows", "500.00 – 1,000.00"),
        ("samples/s (total)", "5,333.33"),
        ("seconds per step", "1.500"),
        ("samples/s (total), DeepSpeed's timer", "5,400.00"),
        ("step time, median", "250.0 ms"),
        ("step time, 95th percentile", "500.0 ms"),
        ("step time, slowest rank", "260.0 ms"),
        ("data wait", "1.50%"),
        ("peak memory per rank (largest)", "3.00 GiB of tensors, 4.00 GiB reserved"),
        ("  data wait", "100.0 ms   20.0%"),
        ("  backward", "300.0 ms   60.0%"),
        ("  exposed communication", "100.0 ms   20.0%"),
    ]


def test_rows_with_a_peak_name_the_convention_of_each_utilization():
    """The published convention counts more FLOPs than are executed, and HFU recomputed ones,
    too."""
    summary: Any = {**SUMMARY, **UTILIZATION, **ENERGY, "flops": FLOPS, "breakdown_s": None}
    assert [*rows(summary)][10:] == [
        ("energy", "0.2 J per sample, 0.001 kWh"),
        ("TFLOPS achieved per device, forward and backward", "252.974"),
        ("GFLOPs per sample, forward and backward", "75.7095"),
        ("MFU, published convention (3 × 111.20 GFLOPs)", "112.70% of 989 TFLOPS"),
        ("MFU (executed FLOPs)", "25.58% of 989 TFLOPS"),
        ("HFU (incl. recomputation)", "30.65% of 989 TFLOPS"),
    ]


@pytest.mark.parametrize(
    ("elapsed_s", "remaining"),
    [(6, "12 s"), (600, "20.0 minutes")],
)
def test_progress_prints_time_left_by_the_steps_of_this_start(
    monkeypatch, capsys, elapsed_s, remaining
):
    clock = iter([100, 100 + elapsed_s])
    monkeypatch.setattr("clap_ds.metrics.terminal.time.monotonic", lambda: next(clock))
    Progress(10, enabled=True, first=4).advance(2, "loss 1.5")
    assert capsys.readouterr().out == f"step 6/10  loss 1.5  {remaining} left\n"
