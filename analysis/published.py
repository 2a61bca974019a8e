"""LAION's published results of CLAP training on Jupiter (`published/*.csv`), and their conventions.

MFU in the published convention is forward GFLOPs × 3 × samples/s/GPU over the GPU's dense bf16
peak. The forward cost is that of 514 text tokens for all caption lengths. Peaks of other GPUs come
from a run's record or the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clap_ds.config.model import load_preset
from clap_ds.config.model_names import list_presets
from clap_ds.flop_count.analytic import TextLengths, backward_flops, forward_flops

PUBLISHED_BY = "LAION's published runs"
PUBLISHED_DIR = Path(__file__).with_name("published")
FORWARD_GFLOPS: Mapping[str, float] = {
    "htsat_tiny_roberta_base": 111.20,
    "htsat_base_roberta_base": 130.09,
}
GH200_PEAK_TFLOPS = 989.0
PUBLISHED_CONTEXT_LENGTH = 77
_SETUP = {
    "device": "GH200",
    "peak_tflops": GH200_PEAK_TFLOPS,
    "precision": "amp_bf16",
    "scaling": "weak",
    "state": "published",
}
# Columns that the published CSV lacks, by its file name without suffix.
PUBLISHED_TABLES: Mapping[str, Mapping[str, Any]] = {
    "jupiter_htsat_tiny": {"model": "htsat_tiny_roberta_base", "batch_per_gpu": 616, **_SETUP},
    "jupiter_htsat_base": {"model": "htsat_base_roberta_base", "batch_per_gpu": 416, **_SETUP},
}


def training_gflops(model: str, context_length: int) -> float | None:
    """Return GFLOPs per sample of a preset's forward and backward pass with padded captions; None
    for other models."""
    if model not in list_presets():
        return None
    config = load_preset(model)
    lengths = TextLengths.fixed(context_length)
    return (forward_flops(config, lengths, "model") + backward_flops(config, lengths)) / 1e9


def published_mfu_percent(model: str, rate: float, peak_tflops: float | None) -> float | None:
    """Return MFU in the published convention at `rate` samples/s/GPU; None if the model's cost or
    the peak is unknown."""
    gflops = FORWARD_GFLOPS.get(model)
    if not gflops or not peak_tflops:
        return None
    # Forward and backward pass are counted as three forward passes.
    return 100 * gflops * 3 * rate / (peak_tflops * 1000)
