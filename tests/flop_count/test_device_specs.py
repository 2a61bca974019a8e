"""Test GPUs and peaks by full names, and MFU computed by hand and in the final table; none if the
peak is unknown."""

import pytest

from clap_ds.flop_count.device_specs import ALIASES, GPUS, find_peak, gpu_named, utilization
from clap_ds.utils.errors import UserError


@pytest.mark.parametrize(
    ("names", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB, NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3, H100 80GB HBM3, nvidia h200, H200, NVIDIA GH200 120GB", 989),
        ("NVIDIA H100 PCIe, H100 PCIe", 756),
        ("MI300X, AMD Instinct MI300X VF", 1307.4),
    ],
)
def test_name_variants_have_the_peak_of_their_device(names, tflops):
    for name in names.split(", "):
        gpu = find_peak(name)
        assert gpu is not None
        assert gpu.bf16_tflops == tflops


def test_ambiguous_or_unlisted_name_has_no_peak():
    assert find_peak("H100") is find_peak("NVIDIA H200 MIG 1g.18gb") is None


def test_gpus_of_plans_have_complete_data_sheets():
    for name, gpu in GPUS.items():
        assert gpu.name == name
        # Dense: none of them has more.
        assert 70 < gpu.bf16_tflops < 3000, name
        rates = (gpu.fp32_tflops, gpu.memory_tbytes_per_s, gpu.memory_gib, gpu.link_gbytes_per_s)
        assert min(rates) > 0, name
    assert set(ALIASES.values()) <= set(GPUS)


def test_gpu_is_found_by_name_or_alias_and_a_mistake_names_the_nearest():
    assert gpu_named("H100_SXM") is gpu_named("h100") is GPUS["h100-sxm"]
    for name, advice in (
        ("h100-sxn", "did you mean 'h100-sxm'"),
        ("tpu", r"expected one of v100-16gb, .*, mi300x"),
    ):
        with pytest.raises(UserError, match=f"--gpu {name}: unknown GPU; {advice}"):
            gpu_named(name)


def test_unknown_device_has_no_mfu_but_advice():
    summary = utilization(4e9, 2e9, 500, "Some CPU", None)
    missing = {name for name, value in summary.items() if value is None}
    assert missing == {"mfu_published_percent", "mfu_model_percent", "hfu_percent", "peak_tflops"}
    assert summary["achieved_tflops"] == pytest.approx(1.0)
    assert "'Some CPU' is unknown; set clap.hardware.peak_tflops" in summary["peak_source"]


def test_each_mfu_equals_a_hand_calculation():
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
    unpublished = utilization(None, 5e9, 500, "NVIDIA H200", 10.0, recomputed_flops=1.5e9)
    assert unpublished == {**mfu, "mfu_published_percent": None}
