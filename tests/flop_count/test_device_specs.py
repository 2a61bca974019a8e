"""Test GPUs and peaks by full names, and MFU computed by hand and in the final table; none if the
peak is unknown."""

import json

import pytest

from clap_ds.flop_count.device_specs import ALIASES, GPUS, find_peak, gpu_named, utilization
from clap_ds.metrics.terminal import rows
from clap_ds.utils.errors import UserError
from tests.processes import ROOT


@pytest.mark.parametrize(
    ("names", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB, NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3, H100 80GB HBM3, nvidia h200, H200, NVIDIA GH200 120GB", 989),
        ("NVIDIA H100 PCIe, H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H20, H20", 148),
        ("MI300X, AMD Instinct MI300X VF", 1307.4),
    ],
)
def test_name_variants_have_the_peak_of_their_device(names: str, tflops: float) -> None:
    for name in names.split(", "):
        gpu = find_peak(name)
        assert gpu is not None
        assert gpu.bf16_tflops == tflops


@pytest.mark.parametrize("name", ["H100", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H20 NVL", ""])
def test_ambiguous_or_unlisted_name_has_no_peak(name: str) -> None:
    assert find_peak(name) is None


def test_gpus_of_plans_have_complete_data_sheets() -> None:
    for name, gpu in GPUS.items():
        assert gpu.name == name
        # Dense: none of them has more.
        assert 70 < gpu.bf16_tflops < 3000, name
        rates = (gpu.fp32_tflops, gpu.memory_tbytes_per_s, gpu.memory_gib, gpu.link_gbytes_per_s)
        assert min(rates) > 0, name
    assert set(ALIASES.values()) <= set(GPUS)


def test_gpu_is_found_by_name_or_alias_and_a_mistake_names_the_nearest() -> None:
    assert gpu_named("H100_SXM") is gpu_named("h100") is GPUS["h100-sxm"]
    for name, advice in (
        ("h100-sxn", "did you mean 'h100-sxm'"),
        ("tpu", r"expected one of v100-16gb, .*, mi300x"),
    ):
        with pytest.raises(UserError, match=f"--gpu {name}: unknown GPU; {advice}"):
            gpu_named(name)


@pytest.mark.parametrize(
    ("gflops", "samples_per_s", "percent"),
    [(111.20, 623.7, 21.0), (130.09, 538.2, 21.2), (111.20, 544.6, 18.4)],
)
def test_published_rates_give_the_published_mfu(
    gflops: float, samples_per_s: float, percent: float
) -> None:
    """The published table: GFLOPs × 3 × samples/s / 989 TFLOPS."""
    summary = utilization(gflops * 1e9, 1e9, samples_per_s, "NVIDIA GH200 120GB", None)
    assert summary["mfu_published_percent"] == pytest.approx(percent, abs=0.05)


def test_unknown_device_has_no_mfu_but_advice() -> None:
    summary = utilization(4e9, 2e9, 500, "Some CPU", None)
    missing = {name for name, value in summary.items() if value is None}
    assert missing == {"mfu_published_percent", "mfu_model_percent", "hfu_percent", "peak_tflops"}
    assert summary["achieved_tflops"] == pytest.approx(1.0)
    assert "'Some CPU' is unknown; set clap.hardware.peak_tflops" in summary["peak_source"]


def test_each_mfu_equals_a_hand_calculation_and_is_printed() -> None:
    # 5 GFLOPs forward and backward at 500 samples/s: 2.5 TFLOPS, 25% of 10. Recomputing 1.5 GFLOPs
    # adds 0.75 TFLOPS. 3 × 4 GFLOPs are 6 TFLOPS.
    mfu = utilization(4e9, 5e9, 500, "NVIDIA H200", 10.0, recomputed_flops=1.5e9)
    expected = {
        "mfu_published_percent": 60,
        "mfu_model_percent": 25,
        "hfu_percent": 32.5,
        "achieved_tflops": 2.5,
        "hardware_tflops": 3.25,
        "peak_tflops": 10.0,
    }
    assert {name: mfu[name] for name in expected} == pytest.approx(expected)
    assert mfu["peak_source"] == "clap.hardware.peak_tflops"
    summary = json.loads((ROOT / "results/cpu/htsat_tiny_cpu/summary.json").read_text()) | mfu
    summary["flops"] |= {"published_gflops": 4.0, "recomputed_gflops": 1.5}
    printed = dict(rows(summary))
    published_row = "MFU, published convention (3 × 4.00 GFLOPs)"
    assert printed[published_row] == "60.00% of 10 TFLOPS"
    assert printed["MFU (executed FLOPs)"] == "25.00% of 10 TFLOPS"
    assert printed["HFU (incl. recomputation)"] == "32.50% of 10 TFLOPS"
    # Models without published FLOPs have no such row.
    unpublished = utilization(None, 5e9, 500, "NVIDIA H200", 10.0, recomputed_flops=1.5e9)
    assert unpublished == {**mfu, "mfu_published_percent": None}
    summary["flops"]["published_gflops"] = None
    del printed[published_row]
    assert dict(rows(summary | unpublished)) == printed
