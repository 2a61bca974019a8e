"""Every GPU of the table has a peak, plausible figures and a source; names are forgiving, wrong ones are not."""

import pytest

from clap_ds.config.errors import UserError
from clap_ds.flop_count.peaks import ALIASES, GPUS, gpu_named


def test_every_gpu_is_complete() -> None:
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert 300 < gpu.bf16_tflops < 3000, name  # dense: none of them has more
        assert gpu.bf16_tflops / gpu.fp32_tflops > 5, name
        assert 1 < gpu.memory_tbytes_per_s < 9
        assert 39 < gpu.memory_gib < 192
        assert gpu.link_gbytes_per_s < 1000 * gpu.memory_tbytes_per_s / 3
        assert "20" in gpu.source
    assert set(ALIASES.values()) <= set(GPUS)


def test_names() -> None:
    assert gpu_named("H100_SXM") is gpu_named("h100") is GPUS["h100-sxm"]
    with pytest.raises(UserError, match=r"--gpu h100-sxn: not in the table; did you mean 'h100-sxm'"):
        gpu_named("h100-sxn")
    with pytest.raises(UserError, match=r"there are a100-sxm-40gb, .*, mi300x"):
        gpu_named("tpu")
