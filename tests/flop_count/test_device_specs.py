"""Test GPUs and peaks by full names, and MFU computed by hand and in the final table; none if the
peak is unknown."""

import json

import pytest

from clap_ds.flop_count.device_specs import ALIASES, GPUS, gpu_named, peak_for, utilization
from clap_ds.metrics.terminal import rows
from clap_ds.utils.errors import UserError
from tests.processes import ROOT


@pytest.mark.parametrize(
    ("names", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB, NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3, H100 80GB HBM3, nvidia h200, H200, NVIDIA GH200 120GB", 989),
        ("NVIDIA H100 PCIe, H100 PCIe", 756),
        *[
            ("NVIDIA H100 NVL", 835),
            ("NVIDIA H20, H20", 148),
            ("MI300X, AMD Instinct MI300X VF", 1307.4),
        ],
    ],
)
def test_variants_of_a_name_have_the_peak_of_their_device(names: str, tflops: float) -> None:
    found = [peak_for(name) for name in names.split(", ")]
    assert [peak and peak.bf16_tflops for peak in found] == [tflops] * len(found)
    assert {
        peak_for(part) for part in ("H100", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H20 NVL", "")
    } == {None}


def test_gpus_of_plans_are_complete_and_found_by_their_names() -> None:
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert 70 < gpu.bf16_tflops < 3000, name  # dense: none of them has more
        assert (
            min(gpu.fp32_tflops, gpu.memory_tbytes_per_s, gpu.memory_gib, gpu.link_gbytes_per_s) > 0
        ), name
    assert set(ALIASES.values()) <= set(GPUS)
    assert gpu_named("H100_SXM") is gpu_named("h100") is GPUS["h100-sxm"]
    for name, said in (
        ("h100-sxn", "did you mean 'h100-sxm'"),
        ("tpu", r"expected one of v100-16gb, .*, mi300x"),
    ):
        with pytest.raises(UserError, match=f"--gpu {name}: unknown GPU; {said}"):
            gpu_named(name)


def test_published_mfu_from_the_published_rate() -> None:
    """The published table: GFLOPs × 3 × samples/s / 989 TFLOPS."""
    for gflops, rate, percent in (
        (111.20, 623.7, 21.0),
        (130.09, 538.2, 21.2),
        (111.20, 544.6, 18.4),
    ):
        found = utilization(gflops * 1e9, 1e9, rate, "NVIDIA GH200 120GB", None)
        assert found["mfu_published_percent"] == pytest.approx(percent, abs=0.05)


def test_unknown_device_has_no_mfu_and_says_what_to_set() -> None:
    found = utilization(4e9, 2e9, 500, "Some CPU", None)
    absent = {name for name, value in found.items() if value is None}
    assert absent == {"mfu_published_percent", "mfu_model_percent", "hfu_percent", "peak_tflops"}
    assert found["achieved_tflops"] == pytest.approx(1.0)
    assert "'Some CPU' is unknown; set clap.hardware.peak_tflops" in found["peak_source"]


def test_each_mfu_by_hand_and_in_the_table() -> None:
    # 5 GFLOPs forward and backward at 500 samples/s: 2.5 TFLOPS, 25% of 10. Recomputing 1.5 GFLOPs
    # adds 0.75 TFLOPS.
    found = utilization(4e9, 5e9, 500, "NVIDIA H200", 10.0, recomputed_flops=1.5e9)
    names = (
        "mfu_published_percent",
        "mfu_model_percent",
        "hfu_percent",
        "achieved_tflops",
        "hardware_tflops",
    )
    assert [found[name] for name in names] == pytest.approx([60, 25, 32.5, 2.5, 3.25])
    assert (found["peak_tflops"], found["peak_source"]) == (10.0, "clap.hardware.peak_tflops")
    summary = json.loads((ROOT / "results/cpu/htsat_tiny_cpu/summary.json").read_text()) | found
    summary["flops"] |= {"published_gflops": 4.0, "recomputed_gflops": 1.5}
    shown = dict(rows(summary))
    for name, percent in (
        (", published convention (3 × 4.00 GFLOPs)", 60),
        (" (executed FLOPs)", 25),
    ):
        assert shown[f"MFU{name}"] == f"{percent:.2f}% of 10 TFLOPS"
    assert shown["HFU (incl. recomputation)"] == "32.50% of 10 TFLOPS"
    without = utilization(None, 5e9, 500, "NVIDIA H200", 10.0, recomputed_flops=1.5e9)
    assert without == {**found, "mfu_published_percent": None}
    summary["flops"]["published_gflops"] = None
    del shown["MFU, published convention (3 × 4.00 GFLOPs)"]
    assert dict(rows(summary | without)) == shown
